"""How cuda.tensor_core is planned, and the arithmetic by which its kernel shares the work; no GPU is needed."""

from __future__ import annotations

import dataclasses
import itertools
import struct

import pytest
import torch

from harness.ops.attention import AttentionSpec
from harness.ops.layouts import HND, HND_SWIZZLED, KV_NHD
from harness.registry import Unsupported
from impls import IMPLS
from impls.cuda import attention, jit, tensor_core, tensor_core_general, toolkit, verify
from impls.cuda.attention import LAYER, Shape
from impls.cuda.builds import ARCHS, SHARED_LIMIT
from impls.cuda.launch import Packer
from tests.cuda.test_launch_plans import step_of as tables_of

SMS = 132
SPEC = AttentionSpec(
    num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bf16", scale=0.1, layout=HND_SWIZZLED, num_blocks=40960,
    max_num_seqs=64, max_num_tokens=64, max_q_len=1, max_seq_len=8192, max_blocks_per_seq=512, device="cuda:0",
)
IMPL = next(impl for impl in IMPLS if impl.name == "cuda.tensor_core")


def spec_of(num_seqs, seq_len, fill=1.25, **changes):
    """SPEC with other capacities, the pool holding `fill` times all sequences at full length."""
    blocks = -(-seq_len // 16)
    return dataclasses.replace(
        SPEC, max_num_seqs=num_seqs, max_num_tokens=num_seqs, max_seq_len=seq_len, max_blocks_per_seq=blocks,
        num_blocks=int(num_seqs * blocks * fill) + 2, **changes,
    )


def plan(spec, arch="sm_90"):
    return tensor_core.plan_teams(Shape.of(spec), spec, SMS, arch)


def plan_any(spec):
    """As `prepare` chooses between the kernels."""
    if spec.params.get("products") == "warpgroups":
        return verify.plan_warpgroups(Shape.of(spec), spec, "sm_90")
    plan_teams = tensor_core_general.plan_crews if spec.features or spec.max_q_len > 1 else tensor_core.plan_teams
    return plan_teams(Shape.of(spec), spec, SMS, "sm_90")


# How warps make teams

@pytest.mark.parametrize(
    ("spec", "team"),
    [
        pytest.param(spec_of(64, 8192), 4, id="a large batch"),
        pytest.param(spec_of(256, 1024), 4, id="many short sequences"),
        pytest.param(spec_of(1, 131072), 4, id="one long sequence"),
        pytest.param(spec_of(1, 2048), 8, id="one short sequence"),
        pytest.param(spec_of(8, 2048), 4, id="a small batch"),
        pytest.param(spec_of(8, 2048, layout=HND), 8, id="a small batch, by loads"),
        pytest.param(spec_of(7, 2048), 8, id="a small batch that fits no shares"),
        pytest.param(spec_of(16, 4096), 8, id="a batch of which whole CTAs hold whole sequences"),
        pytest.param(spec_of(32, 1024, num_q_heads=64, layout=HND), 4, id="a middling batch, by loads"),
        pytest.param(spec_of(16, 512), 8, id="a small batch of short sequences"),
        pytest.param(spec_of(62, 65536, fill=0.07), 4, id="a small pool says that few sequences are long"),
        pytest.param(spec_of(62, 65536, fill=0.01), 8, id="a tiny pool"),
        pytest.param(spec_of(32, 8192, num_kv_heads=2), 4, id="few heads"),
        pytest.param(spec_of(32, 1024, num_q_heads=64), 4, id="a middling batch"),
        pytest.param(spec_of(256, 65536, fill=1 / 205), 8, id="few long among many short ones"),
        pytest.param(spec_of(256, 65536, fill=1 / 205, layout=HND), 8, id="the same by loads"),
    ],
)
def test_teams_follow_from_capacities(spec, team):
    """On 132 SMs: the whole CTA where shares are short and of few sequences, else half of it."""
    assert plan(spec).team == team


@pytest.mark.parametrize(
    ("spec", "solo"),
    [
        pytest.param(spec_of(256, 65536, fill=1 / 205), 16, id="few long among many short ones"),
        pytest.param(spec_of(256, 65536, fill=1 / 205, layout=HND), 16, id="the same by loads"),
        pytest.param(spec_of(256, 256), 16, id="many short sequences"),
        pytest.param(spec_of(256, 1024), 0, id="many that may all be of 64 tiles"),
        pytest.param(spec_of(256, 18432, fill=0.12), 0, id="lengths log-normal"),
        pytest.param(spec_of(16, 512), 0, id="one sequence a CTA"),
        pytest.param(spec_of(8192, 64), 0, id="so many that the list would take the room of warps"),
        pytest.param(spec_of(256, 65536, fill=1 / 205, params={"solo": 0}), 0, id="not asked for"),
        pytest.param(spec_of(256, 65536, fill=1 / 205, params={"opening": "quick"}), 0, id="a quick opening asked for"),
        pytest.param(spec_of(256, 65536, fill=1 / 205, params={"closing": "release"}), 0, id="a release asked for"),
        pytest.param(spec_of(1, 131072, params={"solo": 32}), 32, id="asked for"),
    ],
)
def test_short_sequences_are_single_warps_where_a_pool_says_that_there_are_many(spec, solo):
    """On 132 SMs; elsewhere the kernel is compiled without them, as it was."""
    teams = plan(spec)

    assert teams.solo == solo
    assert ("PA_SOLO" in tensor_core.build(Shape.of(spec), teams, spec.max_num_seqs).macros) == (solo > 0)


@pytest.mark.parametrize(
    ("spec", "arch", "copy"),
    [
        (spec_of(64, 8192), "sm_90", "bulk"),
        (spec_of(64, 8192), "sm_80", "async"),
        (spec_of(64, 8192, block_size=4), "sm_90", "bulk"),
        (spec_of(64, 8192, block_size=2), "sm_90", "async"),
        (spec_of(64, 8192, block_size=9), "sm_90", "async"),
        (spec_of(64, 8192, layout=HND), "sm_90", "load_once"),
        (spec_of(16, 512, layout=HND), "sm_90", "load_once"),
        (spec_of(1, 2048, layout=HND), "sm_90", "async"),
        (spec_of(64, 8192, layout=KV_NHD, num_q_heads=8), "sm_90", "load_once"),
        (spec_of(64, 8192, layout=HND, head_dim=64), "sm_90", "async"),
        (spec_of(64, 8192, layout=HND, num_q_heads=256), "sm_90", "load"),
        (spec_of(64, 8192, layout=HND, params={"stages": 3}), "sm_90", "async"),
        (spec_of(64, 8192, layout=HND), "sm_80", "async"),
    ],
    ids=[
        "swizzled", "swizzled, before Hopper", "swizzled, runs of 1 KB", "swizzled, runs of 512 bytes",
        "swizzled, no two in a run", "plain", "plain, some tiles a warp", "plain, one tile a warp",
        "one head a group", "head_dim 64", "a group in parts", "three stages asked for", "plain, before Hopper",
    ],
)
def test_plain_caches_come_by_loads_where_that_was_measured_to_be_faster(spec, arch, copy):
    """From two tiles a warp on, at a head_dim of 128; what other parts of a group read again may stay in L2. Swizzled ones
    come by bulk copies, where these are not too small."""
    assert plan(spec, arch).copy == copy


@pytest.mark.parametrize(
    ("num_teams", "num_heads", "lanes"),
    [
        (132, 8, 8), (264, 8, 8), (264, 32, 32), (132, 2, 2), (132, 1, 1), (132, 100, 10), (132, 71, 1), (1056, 71, 1),
        (7, 8, 1), (1, 4, 1),
    ],
)
def test_as_many_heads_side_by_side_as_leave_few_teams_idle(num_teams, num_heads, lanes):
    """A divisor of the heads; at most a twentieth of the teams has no share."""
    assert tensor_core.count_lanes(num_teams, num_heads) == lanes


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 16, 71])
@pytest.mark.parametrize("layout", [HND_SWIZZLED, HND, KV_NHD], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_999"])
def test_as_many_warps_as_shared_memory_holds(head_dim, group, layout, arch):
    """Rings, partials and sequences fit, twice the warps would not, or there are eight; parts cover the group. An
    architecture that is not listed is taken for one with the least shared memory."""
    copy = "planned" if layout is HND_SWIZZLED else "async"
    spec = spec_of(256, 1024, head_dim=head_dim, num_q_heads=group, num_kv_heads=1, layout=layout, params={"copy": copy})
    teams = plan(spec, arch)
    room = SHARED_LIMIT.get(arch, 99 * 1024) - tensor_core.STATIC_BYTES
    taken, twice = (
        tensor_core.shared_bytes(Shape.of(spec), teams.heads, times * teams.warps, teams.stages, 256) for times in (1, 2)
    )

    assert taken <= room
    assert teams.warps == 8 or twice > room
    assert teams.heads * (teams.parts - 1) < group <= teams.heads * teams.parts
    assert teams.heads <= 16


def test_bulk_copies_are_for_swizzled_caches():
    """Others come that way where it is asked for."""
    assert plan(SPEC).copy == "bulk"
    assert plan(dataclasses.replace(SPEC, layout=HND, params={"copy": "bulk"})).copy == "bulk"


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
@pytest.mark.parametrize("layout", [HND_SWIZZLED, HND, KV_NHD], ids=str)
def test_before_bulk_copies_lanes_copy(arch, layout):
    """Swizzled caches, too, as they lie; bulk copies asked for are refused."""
    assert plan(dataclasses.replace(SPEC, layout=layout), arch).copy == "async"
    with pytest.raises(Unsupported, match=rf"copy=bulk needs compute capability 9.0 or newer \(got {arch}\)"):
        plan(dataclasses.replace(SPEC, layout=layout, params={"copy": "bulk"}), arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_builds_are_of_the_planners_making(arch):
    """For every architecture the same shapes, swizzled ones among them, copied as the planner would at most."""
    made = tensor_core.builds(arch)
    copies = {(build.macros["PA_LAYOUT"], build.macros["PA_COPY"]) for build in made}

    assert len(made) == len(tensor_core.builds("sm_90"))
    assert ("HND_SWIZZLED", "ASYNC" if arch == "sm_80" else "BULK") in copies
    assert arch != "sm_80" or {copy for _, copy in copies} == {"ASYNC", "LOAD", "LOAD_ONCE"}


@pytest.mark.parametrize(
    ("capability", "missing"),
    [((7, 5), "mma of bf16 needs compute capability 8.0 or newer (got 7.5)"), ((8, 0), None), ((8, 9), None), ((12, 0), None)],
)
def test_it_is_available_from_8_0_on(monkeypatch, capability, missing):
    """By the device's capability; where kernels cannot be compiled or run at all, that is said first."""
    monkeypatch.setattr(toolkit, "why_missing", lambda device_kind: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)

    assert tensor_core.why_no_tensor_cores("cuda") == missing
    monkeypatch.setattr(toolkit, "why_missing", lambda device_kind: "no NVRTC")
    assert tensor_core.why_no_tensor_cores("cuda") == "no NVRTC"


OTHERS = ({}, {"warps": 4}, {"copy": "load"}, {"products": "warpgroups"})


@pytest.mark.parametrize("name", sorted(IMPL.params.keys() - {"prefix", "products", "ctas"}))
def test_every_declared_choice_is_reachable(name):
    """Each value of each parameter, the others at their defaults, with 4 warps, by loads, or by warpgroups, makes a
    kernel of its own: of plain decode, or of an 8-bit cache."""
    chosen = set()
    for value in IMPL.params[name]:
        for kv_dtype, others in itertools.product((None, "e4m3"), OTHERS):
            params = IMPL.resolve_params(others | {name: value})
            try:
                teams = plan_any(dataclasses.replace(SPEC, layout=HND, kv_dtype=kv_dtype, params=params))
            except Unsupported:
                continue
            chosen.add((value, getattr(teams, name, 16 if name == "tile" else 0)))

    assert {value for value, _ in chosen} == set(IMPL.params[name])
    asked = {got for value, got in chosen if value not in (0, "planned")}
    assert asked - {0} == set(IMPL.params[name]) - {0, "planned"}  # no stages are loads, and 0 what a kernel has not


@pytest.mark.parametrize(
    ("layout", "params", "rule"),
    [
        (HND_SWIZZLED, {"team": 8, "warps": 4}, r"team must divide the 4 warps of a CTA \(got 8\)"),
        (HND_SWIZZLED, {"warps": 8, "stages": 4}, "shared memory must hold .* set fewer stages"),
        (HND_SWIZZLED, {"copy": "load"}, r"copy=load must have the chunks of a row in order \(got HND_SWIZZLED\)"),
        (HND, {"copy": "load_once", "stages": 3}, r"copy=load_once has no ring: stages must be left at 2 \(got 3\)"),
        (HND, {"tile": 32}, r"tile must be 16 for plain decode of 16-bit caches \(got 32\)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(layout, params, rule):
    """With the numbers."""
    with pytest.raises(Unsupported, match=rule):
        plan(dataclasses.replace(SPEC, layout=layout, params=params))


def test_many_sequences_take_room_from_rings():
    """Their list lies in shared memory; where it leaves no room for one warp, the case is refused."""
    assert plan(spec_of(8192, 64)).warps == 8
    assert plan(spec_of(20000, 64)).warps < 8
    with pytest.raises(Unsupported, match="shared memory must hold"):
        plan(spec_of(40000, 64))


# The arithmetic of shares.cuh

def begin(column, length, columns):
    shorter, longer = divmod(length, columns)
    return column * shorter + min(column, longer)


def column_of(position, length, columns):
    shorter, longer = divmod(length, columns)
    first_shorter = longer * (shorter + 1)
    return position // (shorter + 1) if position < first_shorter else longer + (position - first_shorter) // shorter


@pytest.mark.parametrize("columns", [1, 2, 33, 132, 1056])
@pytest.mark.parametrize("surplus", [0, 1, 5, 131, 1000, 262144 - 1056])
def test_the_share_of_a_position_is_found_without_a_search(columns, surplus):
    """Shares cover a row without gaps, equal to within a tile, and each position is in the share that says so."""
    length = columns + surplus
    starts = [begin(column, length, columns) for column in range(columns + 1)]
    sizes = [after - before for before, after in itertools.pairwise(starts)]

    assert (starts[0], starts[-1]) == (0, length)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    for column in range(0, columns, max(columns // 37, 1)):
        for position in (starts[column], starts[column + 1] - 1):
            assert column_of(position, length, columns) == column


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 5, 8, 32, 64])
@pytest.mark.parametrize("team", [1, 2, 4, 8])
def test_lanes_and_columns_reach_every_head_once(num_kv_heads, team):
    """Each (round, lane) is a head of its own, and few teams are without a column."""
    num_teams = SMS * 8 // team
    lanes = tensor_core.count_lanes(num_teams, num_kv_heads)
    heads = {turn * lanes + lane for turn in range(num_kv_heads // lanes) for lane in range(lanes)}

    assert heads == set(range(num_kv_heads))
    assert num_teams // lanes * lanes >= 0.95 * num_teams


# What a launch passes

class Launched:
    """In place of a launcher: keeps where each launch went, and its parameters."""

    def __init__(self, build, signature):
        self.parameters, self.launches, self.signature = Packer(signature), [], signature

    def enqueue(self, grid, threads, stream):
        self.launches.append((grid, threads, stream, bytes(self.parameters.buffer)))


@pytest.fixture
def on_cpu(monkeypatch):
    """Kernels are not compiled, only told what to do; the streams that follow are current, one a launch."""
    streams = itertools.count(7)
    monkeypatch.setattr(attention, "device_index", lambda device: 0)
    monkeypatch.setattr(attention, "raw_stream", lambda index: next(streams))
    monkeypatch.setattr(jit, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(tensor_core, "count_sms", lambda device: SMS)
    monkeypatch.setattr(tensor_core, "load", lambda build, device, signature: (Launched(build, signature), {}))


def tensors_of(spec, num_tokens):
    """Four sets: rows that lie one, two and three rows apart in the same memory, and those of another."""
    shape = (spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    made = []
    for strides in ((1, 2, 3), (2,)):
        memory = torch.zeros((2, 3 * num_tokens, spec.num_q_heads, spec.head_dim), dtype=torch.bfloat16)
        caches, lse = spec.layout.empty(shape, torch.bfloat16, "cpu"), torch.zeros(num_tokens, spec.num_q_heads)
        for stride in strides:
            query, out = memory[:, ::stride][:, :num_tokens]
            made.append((query, *caches, out, lse))
    return made


@pytest.mark.parametrize(
    ("spec", "teams", "grid"),
    [
        pytest.param(spec_of(64, 8192), 2, (8, 32, 128), id="two sequences a share, not 64 of 33"),
        pytest.param(spec_of(63, 8192), 2, (8, 33, 132), id="no number of shares fits"),
        pytest.param(spec_of(1, 131072), 2, (8, 33, 132), id="any number fits one sequence"),
        pytest.param(spec_of(16, 4096, num_kv_heads=32), 2, (32, 8, 128), id="no CTA without a share"),
        pytest.param(spec_of(32, 8192, num_kv_heads=2), 1, (2, 64, 128), id="two shares a sequence"),
        pytest.param(spec_of(64, 65536, fill=0.1), 2, (8, 33, 132), id="a small pool says that lengths differ"),
        pytest.param(spec_of(0, 8192), 2, (8, 33, 132), id="nobody"),
    ],
)
def test_ctas_are_those_that_have_a_share_and_shares_fit_sequences(spec, teams, grid):
    """Lanes, columns and CTAs on 132 SMs."""
    found = tensor_core.Grid.of(spec, 1, SMS, teams)

    assert (found.lanes, found.columns, found.ctas) == grid


def test_more_ctas_than_sms_are_refused(on_cpu):
    """Teams wait for none that are not at work yet; workspace would be taken for them."""
    spec = spec_of(4, 64, device="cpu", params={"ctas": SMS + 1})
    with pytest.raises(Unsupported, match=r"ctas must be at most one for each of the 132 SMs \(got 133\)"):
        tensor_core.prepare(spec)


@pytest.mark.parametrize("changes", [{}, {"sinks": True}], ids=["plain", "sinks"])
def test_each_launch_passes_its_plan_its_tensors_and_its_stream(on_cpu, changes):
    """Byte for byte, in whatever order plans and tensors come and return, new ones at the same addresses among them."""
    spec = spec_of(4, 64, device="cpu", **changes)
    made, layer = tensor_core.prepare(spec), {"sinks": torch.zeros(32)} if changes else {}
    steps = [tables_of(lens, 16) for lens in ([40, 3, 64, 0], [17], [40, 3])]
    kept = [tensors_of(spec, step.num_tokens) for step in steps]
    rows, wanted = made._workspace.numel() // (128 + 2), []
    for planned, which in ((0, (1, 2, 2, 1)), (1, (0, 3)), (1, (3,)), (2, (2, 1, 3, 0)), (0, (2, 0, 3)), (2, (1, 0, 0, 3))):
        step = steps[planned]
        made.plan(step)
        for index in which:
            tensors = kept[planned][index]
            made.launch(*(tensor.detach() if planned == 2 else tensor for tensor in tensors), **layer)

            query, keys, values, out, lse = tensors
            packer = Packer(made._kernel.signature)
            packer.pack(
                *(tensor.data_ptr() for tensor in (out, lse, query, keys, values)),
                *(tensor.data_ptr() for tensor in (step.block_tables, step.query_start_loc, step.seq_lens)),
                step.num_seqs, 32, 8, step.block_tables.stride(0),
                query.stride(0), out.stride(0), keys.stride(0), values.stride(0), spec.scale,
                *([struct.pack("@" + LAYER, 0, layer["sinks"].data_ptr(), 0, 0, 0, 0.0)] if layer else []),
                made._workspace.data_ptr(), made._workspace.data_ptr() + 4 * rows * 128, made._arrived.data_ptr(), made._lanes,
            )
            wanted.append((made._grid, 32 * made._teams.warps, 7 + len(wanted), bytes(packer.buffer)))

    assert made._kernel.launches == wanted

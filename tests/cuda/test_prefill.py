"""How cuda.prefill chooses its tile, and the arithmetic by which its kernel deals items; no GPU is needed."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
from pathlib import Path

import pytest

from harness.registry import Unsupported
from impls import IMPLS
from impls.cuda import jit, prefill, prefix, toolkit, verify
from impls.cuda.builds import ARCHS, SHARED_LIMIT

IMPL = next(impl for impl in IMPLS if impl.name == "cuda.prefill")


# What a CTA holds

@pytest.mark.parametrize("head_dim", sorted(IMPL.limits.head_dims))
def test_every_head_dim_has_a_tile(head_dim):
    """By default, and with either number of warpgroups; shared memory and registers hold it."""
    for warpgroups in (0, *IMPL.params["warpgroups"]):
        try:
            tiles = prefill.plan_tiles(head_dim, {"warpgroups": warpgroups} if warpgroups else {})
        except Unsupported:
            assert (head_dim, warpgroups) == (256, 3)  # sums of 256 columns want more registers than a third of them
            continue
        assert tiles.shared_bytes(head_dim) <= SHARED_LIMIT["sm_90"]
        assert tiles.registers(head_dim) <= prefill.REGISTERS[tiles.warpgroups]


@pytest.mark.parametrize("name", sorted(IMPL.params))
def test_every_declared_choice_is_reachable(name):
    """Each value of each parameter makes a kernel of its own at some head_dim and tile."""
    reached = set()
    for value, head_dim, tile in itertools.product(IMPL.params[name], (64, 128), (0, 64)):
        try:
            reached.add((value, getattr(prefill.plan_tiles(head_dim, {"tile": tile} | {name: value}), name)))
        except Unsupported:
            continue

    assert {value for value, _ in reached} == set(IMPL.params[name])
    assert all(got == value for value, got in reached if value)


@pytest.mark.parametrize(
    ("head_dim", "params", "rule"),
    [
        (128, {"stages": 4}, r"shared memory must be at most 232448 bytes a CTA \(got 295936\)"),
        (256, {"tile": 128}, r"shared memory must be at most 232448 bytes a CTA \(got 328704\)"),
        (128, {"tile": 192}, r"registers must be at most 224 a thread \(got 236\); set a smaller tile"),
        (128, {"tile": 128, "warpgroups": 3}, r"registers must be at most 152 a thread \(got 188\)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(head_dim, params, rule):
    """With the numbers."""
    with pytest.raises(Unsupported, match=rule):
        prefill.plan_tiles(head_dim, params)


def test_registers_of_all_warpgroups_fit_an_sm():
    """What those that multiply take, and the 56 that one that copies keeps."""
    assert all((n * each + 56) * 128 <= 65536 and each % 8 == 0 for n, each in prefill.REGISTERS.items())


# Where it runs

@pytest.mark.parametrize(
    ("capability", "missing"),
    [
        ((8, 9), "wgmma is of compute capability 9.0 alone (got 8.9)"), ((9, 0), None),
        ((10, 0), "wgmma is of compute capability 9.0 alone (got 10.0)"),
    ],
)
def test_it_is_available_on_9_0_alone(monkeypatch, capability, missing):
    """By the device's capability; where kernels cannot be compiled or run at all, that is said first."""
    monkeypatch.setattr(toolkit, "why_missing", lambda device_kind: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)

    assert prefill.why_no_wgmma("cuda") == missing
    monkeypatch.setattr(toolkit, "why_missing", lambda device_kind: "no NVRTC")
    assert prefill.why_no_wgmma("cuda") == "no NVRTC"


def test_builds_are_for_hopper_and_its_own_instructions():
    """sm_90a, which no other device loads."""
    assert {arch: len(prefill.builds(arch)) > 0 for arch in ARCHS} == {arch: arch == "sm_90" for arch in ARCHS}
    assert {build.only for build in prefill.builds("sm_90")} == {"a"}


# What the assembler makes of it

def disassembler():
    """nvdisasm, which comes with Triton, or None."""
    spec = importlib.util.find_spec("triton")
    file = Path(spec.submodule_search_locations[0]) / "backends/nvidia/bin/nvdisasm" if spec else None
    return file if file and file.is_file() else None


@pytest.mark.skipif(toolkit.compiler_why_missing() is not None or disassembler() is None, reason="no compiler, or no nvdisasm")
@pytest.mark.parametrize(
    "build", [build for page in (prefill, prefix, verify) for build in page.builds("sm_90") if build.only == "a"], ids=str
)
def test_weights_are_computed_while_sums_go_on(build, tmp_path):
    """All exponentials of a tile stand before the wait for the sums over the tile before: only so do both go on at once."""
    cubin = tmp_path / "prefill.cubin"
    cubin.write_bytes(jit.compile(build.source, entry=build.entry, macros=build.macros, arch="sm_90a").cubin)
    text = subprocess.run([disassembler(), "-c", cubin], capture_output=True, text=True, check=True).stdout
    _, *after = text.split("DEPBAR.LE gsb0, 0x1")
    between = [rest.partition("DEPBAR.LE gsb0, 0x0")[0] for rest in after]

    assert [part.count("MUFU.EX2") >= build.macros["PA_TILE"] // 2 for part in between] == [True]


# How items are dealt: the arithmetic of deal.cuh

ROWS, CLASSES = 128, 16


def first_above(num_keys, seq_len, q_len, group):
    query = num_keys - (seq_len - q_len)
    num_items = -(-q_len * group // ROWS)
    return num_items if query >= q_len else 0 if query <= 0 else query * group // ROWS


def deal(seq_lens, q_lens, group):
    """Items in order: (class, seq, item)."""
    longest = max((n for n, q in zip(seq_lens, q_lens, strict=True) if q), default=0)
    width = longest // CLASSES + 1
    order = []
    for c in range(CLASSES):
        for seq, (seq_len, q_len) in enumerate(zip(seq_lens, q_lens, strict=True)):
            def first_of(c, seq_len=seq_len, q_len=q_len):
                if c < 0:
                    return -(-q_len * group // ROWS)
                return 0 if c == CLASSES - 1 else first_above(longest - (c + 1) * width, seq_len, q_len, group)

            order += [(c, seq, item) for item in reversed(range(first_of(c), first_of(c - 1)))]
    return order, width, longest


def keys_of(item, seq_len, q_len, group):
    last = min((item * ROWS + ROWS - 1) // group, q_len - 1)
    return max(0, min(seq_len - q_len + last + 1, seq_len))


@pytest.mark.parametrize("group", [1, 4, 5, 71, 200])
@pytest.mark.parametrize(
    ("seq_lens", "q_lens"),
    [
        ((10240,), (2048,)), ((8192,), (8192,)), ((5000, 300, 0, 0, 77), (4000, 1, 0, 3, 77)), ((1,) * 70, (1,) * 70),
        ((40, 900), (50, 900)), ((7,), (0,)), ((), ()),
    ],
    ids=str,
)
def test_every_item_is_dealt_once_and_dear_ones_first(seq_lens, q_lens, group):
    """In classes a sixteenth of the longest apart."""
    order, width, longest = deal(seq_lens, q_lens, group)
    keys = [keys_of(item, seq_lens[seq], q_lens[seq], group) for _, seq, item in order]

    assert sorted(order, key=lambda one: one[1:]) == sorted(set(order), key=lambda one: one[1:])
    assert len(order) == sum(-(-q * group // ROWS) for q in q_lens)
    assert all((longest - n) // width == c or c == CLASSES - 1 for n, (c, _, _) in zip(keys, order, strict=True))

"""The host side of the CUDA attention kernels: how they are cut, what they refuse, what they pass. No GPU is needed."""

from __future__ import annotations

import dataclasses
import struct
import weakref

import numpy as np
import pytest
import torch

from harness.ops.attention import AttentionSpec, AttentionStep
from harness.ops.layouts import HND, KV_NHD
from harness.registry import Unsupported
from impls.cuda import attention
from impls.cuda.attention import LAYER, SIGNATURE, Attention, Shape
from impls.cuda.group import Group
from impls.cuda.launch import Packer
from impls.cuda.split_kv import LONG_SPLIT, MAX_SPLITS, MAX_WORKSPACE_BYTES, plan_splits

SMS = 132
SPEC = AttentionSpec(
    num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bf16", scale=0.1, layout=HND, num_blocks=40960,
    max_num_seqs=64, max_num_tokens=64, max_q_len=1, max_seq_len=8192, max_blocks_per_seq=512, device="cuda:0",
)


def spec_of(num_seqs, seq_len, fill=1.25, **changes):
    """SPEC with other capacities, the pool holding `fill` times all sequences at full length."""
    blocks = -(-seq_len // 16)
    return dataclasses.replace(
        SPEC, max_num_seqs=num_seqs, max_num_tokens=changes.pop("tokens", num_seqs), max_seq_len=seq_len,
        max_blocks_per_seq=blocks, num_blocks=int(num_seqs * blocks * fill) + 2, **changes,
    )


# How a group is cut

@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 112, 128, 256])
@pytest.mark.parametrize("block_size", [1, 4, 16, 24])
def test_a_tile_fits_the_lanes_and_the_step_the_tile(dtype, head_dim, block_size):
    """A tile has at most 32 tokens, a power of two of them, and a lane's rows straddle blocks only where they must."""
    group = Group.of(Shape(head_dim=head_dim, block_size=block_size, dtype=dtype))
    tile = group.step // group.warps

    assert tile in (1, 2, 4, 8, 16, 32)
    assert tile % group.rows == 0
    assert block_size % group.rows == 0 or group.rows <= 4


@pytest.mark.parametrize("heads", [1, 2, 4, 5, 7, 8, 9, 12, 16, 64, 71])
def test_every_query_head_of_a_group_is_taken(heads):
    """Parts cover the group, and none of them is empty."""
    group = Group.of(Shape(group=heads))

    assert group.heads * (group.parts - 1) < heads <= group.heads * group.parts
    assert group.heads <= 8


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 16])
def test_the_ctas_of_an_sm_fit_its_shared_memory(heads, head_dim, dtype):
    """As many as the registers are bounded for, each with 1 KB that the driver takes: else fewer would be resident."""
    group = Group.of(Shape(group=heads, head_dim=head_dim, dtype=dtype))

    assert group.ctas * (group.shared_bytes + 1024 + 64) <= 228 * 1024


# How sequences are split

@pytest.mark.parametrize(
    ("spec", "least", "most"),
    [
        pytest.param(spec_of(1, 2048), 32, 32, id="one short sequence is cut as fine as a CTA takes"),
        pytest.param(spec_of(1, 131072), SMS * 3 // 8, 128, id="one long sequence fills the GPU"),
        pytest.param(spec_of(8, 2048), 7, 9, id="a small batch fills the GPU"),
        pytest.param(spec_of(64, 8192), 2, 8, id="a large batch is cut in long splits, to even out its end"),
        pytest.param(spec_of(256, 1024), 1, 1, id="many short sequences stay whole"),
        pytest.param(spec_of(62, 65536, fill=0.07), 30, 64, id="a small pool says that few sequences are long"),
        pytest.param(spec_of(1, 4096, tokens=4096), 1, 1, id="a prefill has rows enough"),
    ],
)
def test_splits_follow_from_capacities(spec, least, most):
    """On 132 SMs."""
    splits = plan_splits(spec, SMS)

    assert least <= splits.count <= most
    assert Group.of(Shape.of(spec)).step <= splits.min_tokens <= LONG_SPLIT
    assert splits.count * splits.min_tokens <= 2 * spec.max_seq_len


def test_splits_stay_within_the_workspace():
    """More rows leave room for fewer splits, and a single split needs none."""
    wide = plan_splits(spec_of(64, 131072, fill=0.01, num_q_heads=512), SMS)

    assert wide.count > 1
    assert wide.workspace_bytes <= MAX_WORKSPACE_BYTES
    assert plan_splits(spec_of(256, 1024), SMS).workspace_bytes == 0


def test_splits_asked_for_are_given():
    """`--set splits=7` cuts in seven, down to single steps; too many are refused."""
    splits = plan_splits(dataclasses.replace(SPEC, params={"splits": 7}), SMS)

    assert (splits.count, splits.min_tokens) == (7, 64)
    assert splits.workspace_bytes == 7 * 64 * 32 * (128 + 2) * 4
    with pytest.raises(Unsupported, match="splits must be 0"):
        plan_splits(dataclasses.replace(SPEC, params={"splits": MAX_SPLITS + 1}), SMS)


# What a launch passes and refuses

class Recorded(Attention):
    """Keeps what would be launched."""

    def _enqueue(self, stream, values):
        self.launched = (stream, values)


SMALL = dataclasses.replace(
    SPEC, num_q_heads=4, num_kv_heads=2, head_dim=16, block_size=4, num_blocks=6, max_num_seqs=3, max_num_tokens=4,
    max_seq_len=12, max_blocks_per_seq=3,
)


@pytest.fixture
def kernel(monkeypatch):
    """A prepared kernel on a machine without a GPU."""
    monkeypatch.setattr(attention, "device_index", lambda device: 0)
    monkeypatch.setattr(attention, "raw_stream", lambda index: 99)
    return Recorded(SMALL)


def step_of(seq_lens, q_lens=None, blocks=3):
    tables = np.zeros((len(seq_lens), blocks), np.int32)
    starts = np.concatenate([[0], np.cumsum(q_lens or [1] * len(seq_lens))]).astype(np.int32)
    lens = np.array(seq_lens, np.int32)
    return AttentionStep(
        block_tables=torch.from_numpy(tables), seq_lens=torch.from_numpy(lens), query_start_loc=torch.from_numpy(starts),
        host_block_tables=tables, host_seq_lens=lens, host_query_start_loc=starts,
    )


def tensors_of(num_tokens, spec=SMALL):
    caches = spec.layout.empty((spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim), torch.bfloat16, "cpu")
    rows = (num_tokens, spec.num_q_heads, spec.head_dim)
    query, out = torch.zeros((2, *rows), dtype=torch.bfloat16)
    return {"query": query, "key_cache": caches[0], "value_cache": caches[1], "out": out, "lse": torch.zeros(rows[:2])}


def test_launch_passes_addresses_sizes_and_strides_in_order(kernel):
    """As SIGNATURE says, with the strides of the very tensors."""
    step, tensors = step_of([5, 12]), tensors_of(2)
    tensors["query"] = torch.zeros(2, 6, 16, dtype=torch.bfloat16)[:, 1:5]
    kernel.plan(step)
    kernel.launch(**tensors)
    stream, values = kernel.launched

    Packer(SIGNATURE).pack(*values)
    assert stream == 99
    assert values[:5] == tuple(tensors[name].data_ptr() for name in ("out", "lse", "query", "key_cache", "value_cache"))
    assert values[5:8] == tuple(t.data_ptr() for t in (step.block_tables, step.query_start_loc, step.seq_lens))
    assert values[8:] == (2, 4, 2, 3, 6 * 16, 4 * 16, 2 * 4 * 16, 2 * 4 * 16, 0.1)


def test_halves_of_one_tensor_have_twice_the_block_stride(monkeypatch):
    """KV_NHD runs the NHD kernel."""
    monkeypatch.setattr(attention, "device_index", lambda device: 0)
    monkeypatch.setattr(attention, "raw_stream", lambda index: 99)
    spec = dataclasses.replace(SMALL, layout=KV_NHD)
    kernel = Recorded(spec)
    kernel.plan(step_of([5]))
    kernel.launch(**tensors_of(1, spec))

    assert Shape.of(spec).layout == "NHD"
    assert kernel.launched[1][14:16] == (2 * 2 * 4 * 16, 2 * 2 * 4 * 16)


@pytest.mark.parametrize(
    ("step", "rule"),
    [
        (step_of([1, 1, 1, 1]), "num_seqs must be at most 3"),
        (step_of([9, 9], [3, 2]), "num_tokens must be at most 4"),
        (step_of([13], blocks=4), "seq_len must be at most 12"),
        (step_of([9], blocks=2), "seq_len must be at most 8"),
    ],
)
def test_step_beyond_the_capacities_is_refused(kernel, step, rule):
    """Before anything is launched: the workspace, or the table, would be overrun."""
    with pytest.raises(ValueError, match=rule):
        kernel.plan(step)


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("query", lambda t: t[:1], r"query must have shape \(2, 4, 16\)"),
        ("out", lambda t: t.float(), "out must have shape .* and type torch.bfloat16"),
        ("lse", lambda t: t.half(), "lse must have shape .* and type torch.float32"),
        ("out", lambda t: t.view(torch.float16), "out must have .* type torch.bfloat16 .got .* of torch.float16"),
        ("lse", lambda t: t.view(torch.int32), "lse must have .* type torch.float32 .got .* of torch.int32"),
        ("key_cache", lambda t: t[:, :, :2], "key_cache must have shape"),
        ("value_cache", lambda t: t.view(torch.float16), "value_cache must have shape .* and type torch.bfloat16"),
        ("query", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "query must be contiguous, but for its first"),
        ("query", lambda t: torch.zeros(140, dtype=t.dtype)[4:132].view(2, 4, 16), "must begin at a multiple of 16 bytes"),
        ("query", lambda t: torch.zeros(2, 68, dtype=t.dtype)[:, :64].unflatten(1, (4, 16)), "rows must be a multiple of 16"),
    ],
)
def test_tensor_that_does_not_fit_is_refused(kernel, name, change, rule):
    """Shape, type, inner strides and alignment are what the kernel reads by; even after a launch that was right."""
    tensors = tensors_of(2)
    kernel.plan(step_of([5, 12]))
    kernel.launch(**tensors)
    tensors[name] = change(tensors[name])

    with pytest.raises(ValueError, match=rule):
        kernel.launch(**tensors)


def test_tensors_that_passed_are_checked_again_for_another_step(kernel):
    """What was right for two query tokens is not for one."""
    tensors = tensors_of(2)
    kernel.plan(step_of([5, 12]))
    kernel.launch(**tensors)
    kernel.plan(step_of([5]))

    with pytest.raises(ValueError, match=r"query must have shape \(1, 4, 16\)"):
        kernel.launch(**tensors)


def test_a_tensor_passed_by_name_is_noticed_when_its_memory_is_another(monkeypatch):
    """As when weights are loaded again into the same parameter: the kernel is told the new address."""
    monkeypatch.setattr(attention, "device_index", lambda device: 0)
    monkeypatch.setattr(attention, "raw_stream", lambda index: 99)
    kernel = Recorded(dataclasses.replace(SMALL, sinks=True))
    tensors, sinks = tensors_of(2), torch.zeros(4)
    kernel.plan(step_of([5, 12]))
    for data in (sinks.data, torch.ones(4)):
        sinks.data = data
        kernel.launch(**tensors, sinks=sinks)

        assert struct.unpack("@" + LAYER, kernel.launched[1][-1])[1] == data.data_ptr()


def test_tensors_that_passed_are_not_kept(kernel):
    """A kernel remembers them only as long as somebody else holds them."""
    tensors = tensors_of(2)
    kernel.plan(step_of([5, 12]))
    kernel.launch(**tensors)
    held = weakref.ref(tensors["out"])
    tensors.clear()

    assert held() is None


def test_launch_needs_a_plan(kernel):
    """Told, instead of a launch on no tables."""
    with pytest.raises(ValueError, match="call plan first"):
        kernel.launch(**tensors_of(1))


@pytest.mark.parametrize("step", [step_of([]), step_of([4, 2], [0, 0])])
def test_nothing_to_do_launches_nothing(kernel, step):
    """No sequences, or no query tokens."""
    kernel.plan(step)
    kernel.launch(**tensors_of(0))

    assert not hasattr(kernel, "launched")

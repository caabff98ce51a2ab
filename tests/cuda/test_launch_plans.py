"""Launch plans of the CUDA pages that write, copy and read blocks: pure functions, tested without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.ops.attention import AttentionStep
from harness.ops.layouts import KV_NHD
from impls import IMPLS
from impls.cuda import block_copy, cache_write, read_blocks
from impls.cuda.builds import ARCHS, SHARED_LIMIT


def step_of(lens, block_size):
    """Shuffled tables for `lens`, unused entries wild."""
    counts = [-(-n // block_size) for n in lens]
    tables = np.full((len(lens), max(counts, default=0) + 2), 2**30, np.int32)
    order = iter(np.random.default_rng(1).permutation(sum(counts)))
    for row, count in zip(tables, counts, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    seq_lens, starts = np.array(lens, np.int32), np.arange(len(lens) + 1, dtype=np.int32)
    return AttentionStep(
        block_tables=torch.from_numpy(tables), seq_lens=torch.from_numpy(seq_lens), query_start_loc=torch.from_numpy(starts),
        host_block_tables=tables, host_seq_lens=seq_lens, host_query_start_loc=starts,
    )


@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("lens", [(40, 0, 1, 16, 23, 24), (5,), (0, 0), ()], ids=str)
def test_blocks_in_use_are_listed_with_their_tokens(lens, block_size):
    """The list holds each block in use once, in order of sequences, and how many tokens it holds; nothing past it changes."""
    step = step_of(lens, block_size)
    entries = torch.full((200, 2), -7, dtype=torch.int32)
    wanted = [
        [int(row[begin // block_size]), min(block_size, n - begin)]
        for row, n in zip(step.host_block_tables, lens, strict=True) for begin in range(0, n, block_size)
    ]

    num_entries = read_blocks.list_blocks(step, block_size, None, entries)

    assert entries[:num_entries].tolist() == wanted
    assert (entries[num_entries:] == -7).all()


def test_a_step_beyond_capacity_is_refused():
    """More blocks than prepared for are an error, never written past the list."""
    with pytest.raises(ValueError, match=r"blocks in use must be at most 2, what was prepared \(got 3\)"):
        read_blocks.list_blocks(step_of((40,), 16), 16, None, torch.empty(2, 2, dtype=torch.int32))


@pytest.mark.parametrize("block_vectors", [1, 8, 255, 256, 512, 600, 1023, 1024, 2048, 5000, 65536])
def test_tiles_cover_a_block(block_vectors):
    """The CTAs of a block hold a thread for each of its vectors, and none is without work."""
    tile = block_copy.THREADS * block_copy.loads(block_vectors)

    assert (block_copy.num_tiles(block_vectors) - 1) * tile < block_vectors <= block_copy.num_tiles(block_vectors) * tile


def test_halves_of_one_tensor_are_strided_blocks():
    """KV_NHD blocks lie twice as far apart as they are long."""
    key_cache, value_cache = KV_NHD.empty((3, 2, 16, 64), torch.bfloat16, "cpu")

    assert block_copy.block_stride((key_cache, value_cache)) == 2 * 2 * 16 * 64 * 2 // 16
    assert cache_write.vector_stride("key_cache", key_cache) == 2 * 2 * 16 * 64 * 2 // 16


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(4, 2, 8, dtype=torch.bfloat16)[:, :, :4], "must be contiguous but for its first dimension"),
        (torch.zeros(4, 12, dtype=torch.bfloat16).as_strided((2, 8), (12, 1)), "must be a multiple of 16 bytes"),
    ],
    ids=["gaps inside", "odd stride"],
)
def test_tensors_that_vectors_cannot_walk_are_refused(tensor, reason):
    """A view that 16-byte vectors would read wrongly is an error that names the tensor."""
    with pytest.raises(ValueError, match=f"key.*{reason}"):
        cache_write.vector_stride("key", tensor)


def test_caches_of_different_strides_are_refused():
    """One launch copies all layers by one stride, so layers must agree in it."""
    caches = (torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(3, 2, 8, dtype=torch.bfloat16)[:, 0])

    with pytest.raises(ValueError, match=r"equally far apart.*got strides of 16, 32 bytes"):
        block_copy.block_stride(caches)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["ceiling.load_16b", "ceiling.bulk_copy"])
def test_builds_are_those_of_the_table(name, arch):
    """The builds that stand for the readers are at the defaults that the table of impls declares."""
    params = next(impl for impl in IMPLS if impl.name == name).resolve_params({})
    make = {"ceiling.load_16b": read_blocks.load_build, "ceiling.bulk_copy": read_blocks.bulk_build}[name]
    listed = make(read_blocks.Shape(), params) in read_blocks.builds(arch)

    assert listed == (name == "ceiling.load_16b" or arch != "sm_80")  # bulk copies begin with sm_90


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_declared_launch_shapes_fit_an_sm(arch):
    """Each bulk-copy parameter, alone off its default, has room beside one CTA; the defaults beside their number."""
    params = next(impl for impl in IMPLS if impl.name == "ceiling.bulk_copy").params
    default = {name: values[0] for name, values in params.items()}

    assert read_blocks.why_too_large(read_blocks.bulk_build(read_blocks.Shape(), default).shared_bytes, 2, arch) is None
    for name, values in params.items():
        for value in values:
            shape = default | {name: value}
            assert read_blocks.bulk_build(read_blocks.Shape(), shape).shared_bytes < SHARED_LIMIT[arch]


def test_too_many_ctas_are_refused_with_the_numbers():
    """CTAs that cannot be on an SM together would run one after the other and measure the wrong thing."""
    reason = read_blocks.why_too_large(128 * 1024, 2, "sm_90")

    assert reason == "2 CTAs of 131072 bytes of stages exceed the 233472 bytes of an SM; set fewer"

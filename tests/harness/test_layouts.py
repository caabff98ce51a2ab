"""Layouts move bits and change none: there and back, and every element where the layout's documentation says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.ops.layouts import CONTIGUOUS, HND, HND_SWIZZLED, KV_NHD, LAYOUTS, NHD, X_PACKED

BLOCKED = [layout for layout in LAYOUTS.values() if layout.paged]
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BITS = {2: torch.int16, 4: torch.int32}
#: num_blocks, num_kv_heads, block_size, head_dim; sizes of 1 make transposed tensors contiguous by accident
SHAPES = [(3, 2, 5, 64), (2, 1, 16, 128), (4, 3, 1, 80), (1, 1, 1, 8), (2, 5, 24, 16), (2, 2, 9, 112)]


def random_bits(shape, dtype, seed=0):
    """Key and value of every bit pattern alike, so of NaNs with all payloads, quiet and signalling."""
    raw = np.random.default_rng(seed).bytes(2 * int(np.prod(shape)) * dtype.itemsize)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(2, *shape).unbind(0)


def bits(tensor):
    return tensor.contiguous().view(BITS[tensor.element_size()])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("layout", BLOCKED, ids=str)
def test_there_and_back_is_the_identity(layout, dtype, shape):
    """Bit for bit, NaN payloads included, and the canonical tensors stay as they are."""
    pair = random_bits(shape, dtype)
    before = [bits(part).clone() for part in pair]
    back = layout.restore(*layout.arrange(*pair))

    for part, wanted, after in zip(back, before, pair, strict=True):
        assert torch.equal(bits(part), wanted)
        assert torch.equal(bits(after), wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("layout", BLOCKED, ids=str)
def test_an_empty_cache_is_born_as_arranged(layout, dtype, shape):
    """The same shapes, strides and dtype as a converted one: a kernel cannot tell which it was given."""
    arranged = layout.arrange(*random_bits(shape, dtype))
    made = layout.empty(shape, dtype, "cpu")

    for one, other in zip(made, arranged, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.device.type == "cpu"


@pytest.mark.parametrize("layout", [layout for layout in BLOCKED if layout is not HND], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_arranged_caches_share_nothing(layout, shape):
    """What a kernel does to its cache reaches neither the canonical tensors nor the other half."""
    pair = random_bits(shape, torch.bfloat16)
    before = [bits(part).clone() for part in pair]
    key_cache, value_cache = layout.arrange(*pair)
    kept = bits(value_cache).clone()
    key_cache.fill_(1.0)

    assert torch.equal(bits(value_cache), kept)
    value_cache.fill_(2.0)
    assert all(torch.equal(bits(part), wanted) for part, wanted in zip(pair, before, strict=True))


def test_hnd_is_the_canonical_order_itself():
    """No copy: an implementation that takes HND is given the tensors as they were made."""
    pair = random_bits((2, 2, 4, 8), torch.float16)

    assert all(one is other for one, other in zip(HND.arrange(*pair), pair, strict=True))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_elements_lie_where_the_layout_says(dtype):
    """Each layout's own index formula, element by element, for K and for V."""
    shape = (2, 2, 10, 72)
    pair = random_bits(shape, dtype)
    key, value = (bits(part).numpy() for part in pair)
    arranged = {layout.name: [bits(part).numpy() for part in layout.arrange(*pair)] for layout in BLOCKED}
    x = 16 // dtype.itemsize
    num_chunks = shape[3] // x
    for block, head, token, dim in np.ndindex(shape):
        chunk, inner = divmod(dim, x)
        swizzled = chunk ^ (token % 8) if chunk < num_chunks // 8 * 8 else chunk
        places = {
            "HND": ((block, head, token, dim),) * 2,
            "NHD": ((block, token, head, dim),) * 2,
            "KV_NHD": ((block, token, head, dim),) * 2,
            "X_PACKED": ((block, head, chunk, token, inner), (block, head, dim, token)),
            "HND_SWIZZLED": ((block, head, token, swizzled * x + inner),) * 2,
        }
        for name, (key_place, value_place) in places.items():
            assert arranged[name][0][key_place] == key[block, head, token, dim], (name, key_place)
            assert arranged[name][1][value_place] == value[block, head, token, dim], (name, value_place)
    assert set(arranged) == set(places)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_swizzle_permutes_whole_chunks_within_a_token(head_dim):
    """Eight tokens spread one chunk over eight places: what a warp reads from shared memory meets no bank twice."""
    key = torch.arange(head_dim // 8).repeat_interleave(8).expand(1, 1, 16, -1).to(torch.bfloat16)
    chunks = HND_SWIZZLED.arrange(key, key)[0][0, 0, :, ::8].int()

    assert torch.equal(chunks[0], torch.arange(head_dim // 8).int())
    assert torch.equal(chunks.sort().values, chunks[:1].expand(16, -1))
    assert all(len(set(chunks[:8, column].tolist())) == 8 for column in range(head_dim // 8))


def test_kv_nhd_is_one_tensor_seen_as_two():
    """K and V of a block lie side by side: [num_blocks, 2, block_size, num_kv_heads, head_dim]."""
    key, value = random_bits((3, 2, 4, 8), torch.float16)
    key_cache, value_cache = KV_NHD.arrange(key, value)
    both = key_cache._base

    assert both is value_cache._base
    assert both.shape == (3, 2, 4, 2, 8)
    assert both.is_contiguous()
    assert torch.equal(bits(both[:, 1]), bits(value_cache))
    assert value_cache.data_ptr() - key_cache.data_ptr() == 4 * 2 * 8 * 2


@pytest.mark.parametrize(("layout", "head_dim", "multiple"), [(X_PACKED, 12, 8), (HND_SWIZZLED, 12, 8), (X_PACKED, 6, 4)])
def test_a_head_that_has_no_whole_chunks_is_refused(layout, head_dim, multiple):
    """Sixteen bytes do not divide it: the error names the layout, the rule and what was got."""
    key, value = random_bits((1, 1, 2, head_dim), {8: torch.bfloat16, 4: torch.float32}[multiple])

    with pytest.raises(ValueError, match=rf"{layout}: head_dim must be a multiple of {multiple}, 16 bytes \(got {head_dim}\)"):
        layout.arrange(key, value)


def test_an_unpaged_cache_cannot_be_made_of_blocks_alone():
    """CONTIGUOUS needs the tables; who asks without is told."""
    pair = random_bits((1, 1, 2, 8), torch.float32)

    with pytest.raises(NotImplementedError, match="CONTIGUOUS is gathered from the block tables"):
        CONTIGUOUS.arrange(*pair)


def test_layouts_are_found_by_their_names():
    """The table's keys are what records and --layouts say."""
    assert all(str(layout) == name for name, layout in LAYOUTS.items())
    assert LAYOUTS["NHD"] is NHD


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
@pytest.mark.parametrize(("head_dim", "dtype", "fits"), [(20, "f16", False), (20, "f32", True), (24, "bf16", True)])
def test_a_layout_says_which_heads_it_cannot_hold(layout, head_dim, dtype, fits):
    """Of chunks of 16 bytes there must be whole ones; such a row is unsupported, and no failure."""
    case = SimpleNamespace(head_dim=head_dim, dtype=dtype)
    why_not = layout.why_not(case)

    assert (why_not is None) == (fits or layout.unit == 1)
    assert why_not is None or "head_dim must be a multiple of 8, 16 bytes (got 20)" in why_not
    assert {layout.name for layout in LAYOUTS.values() if layout.unit > 1} == {"X_PACKED", "HND_SWIZZLED"}

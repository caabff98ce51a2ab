"""How cuda.tensor_core is planned where more is asked than plain decode; no GPU is needed."""

from __future__ import annotations

import dataclasses

import pytest

from harness.ops.layouts import HND, HND_SWIZZLED
from harness.registry import Unsupported
from impls.cuda import tensor_core_general
from impls.cuda.attention import Shape
from impls.cuda.builds import SHARED_LIMIT
from impls.cuda.tensor_core_general import Asked, plan_rows
from tests.cuda.test_tensor_core import SMS, SPEC, spec_of


def plan(spec, arch="sm_90"):
    return tensor_core_general.plan_crews(Shape.of(spec), spec, SMS, arch)


@pytest.mark.parametrize(
    ("group", "queries", "head_dim", "wanted"),
    [
        pytest.param(4, 1, 128, (4, 1, 1), id="decode"),
        pytest.param(4, 4, 128, (16, 1, 1), id="as many rows as registers hold with their query"),
        pytest.param(4, 5, 128, (24, 1, 1), id="whole columns of eight"),
        pytest.param(4, 8, 128, (32, 1, 1), id="as many as one warp sums"),
        pytest.param(8, 8, 128, (64, 1, 2), id="two warps a ring"),
        pytest.param(16, 8, 128, (128, 1, 4), id="four warps a ring"),
        pytest.param(32, 8, 128, (128, 2, 4), id="two parts, each a read of K and V"),
        pytest.param(8, 4, 256, (32, 1, 2), id="half as many of long rows"),
    ],
)
def test_rows_are_shared_by_as_few_warps_as_their_sums_fit(group, queries, head_dim, wanted):
    """Rows of a part, parts, and the warps of a crew."""
    assert plan_rows(Shape(group=group, head_dim=head_dim), Asked(queries=queries)) == wanted


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 71])
@pytest.mark.parametrize("queries", [1, 2, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_parts_cover_all_rows_of_a_kv_head(group, queries, head_dim):
    """Once, and each warp of a crew has as many as the others, at most 32."""
    rows, parts, crew = plan_rows(Shape(group=group, head_dim=head_dim), Asked(queries=queries))

    assert rows * (parts - 1) < group * queries <= rows * parts
    assert rows % crew == 0
    assert rows // crew <= (32 if head_dim <= 128 else 16)
    assert crew == 1 or rows // crew % 8 == 0


@pytest.mark.parametrize("layout", [HND_SWIZZLED, HND], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, "e4m3"])
@pytest.mark.parametrize("queries", [1, 4, 8])
@pytest.mark.parametrize("heads", [8, 32, 64, 128])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_rings_hold_as_many_bytes_whatever_they_hold(layout, kv_dtype, queries, heads, arch):
    """A crew's ring as much as those of its warps would, and all of it fits."""
    spec = spec_of(256, 1024, num_q_heads=heads, layout=layout, kv_dtype=kv_dtype, max_q_len=queries)
    crews = plan(spec, arch)
    taken = tensor_core_general.shared_bytes(Shape.of(spec), Asked.of(spec), crews, 256)

    assert crews.stages * crews.tile * (1 if kv_dtype else 2) == 64 * crews.crew
    assert taken + tensor_core_general.STATIC_BYTES <= SHARED_LIMIT[arch]
    assert crews.team % crews.crew == 0


@pytest.mark.parametrize(
    ("num_seqs", "seq_len", "tile"), [(64, 8192, 32), (1, 131072, 32), (32, 1024, 32), (16, 512, 32), (1, 2048, 16)]
)
def test_short_shares_of_8_bit_caches_are_cut_smaller(num_seqs, seq_len, tile):
    """So that there is one for each warp, and they are equal."""
    assert plan(spec_of(num_seqs, seq_len, kv_dtype="e4m3")).tile == tile
    assert plan(spec_of(num_seqs, seq_len, sinks=True)).tile == 16


def test_a_window_bounds_how_long_shares_are():
    """The teams of a long context with a window of 1024 are those of a context of 1024."""
    windowed = plan(spec_of(8, 131072, window=1024))

    assert windowed.team == plan(spec_of(8, 1024, softcap=1.0)).team == 8
    assert plan(spec_of(8, 131072, softcap=1.0)).team == 4


@pytest.mark.parametrize(
    ("changes", "team"),
    [
        (spec_of(64, 8192, kv_dtype="e4m3"), 8),
        (spec_of(256, 1024, kv_dtype="e4m3"), 4),
        (dataclasses.replace(spec_of(64, 65536, kv_dtype="e4m3"), num_blocks=20_000), 4),
        (spec_of(64, 8192, max_q_len=8), 8),
        (spec_of(64, 8192, max_q_len=8, num_q_heads=64), 4),
    ],
    ids=["long", "short", "skewed", "verify", "crews"],
)
def test_all_warps_take_a_sequence_together_where_all_are_long(changes, team):
    """As measured on A, C, F, A and G: docs/kernels.md."""
    assert plan(changes).team == team


@pytest.mark.parametrize(
    ("changes", "params", "rule"),
    [
        ({"kv_dtype": "e4m3"}, {"team": 3}, r"team must divide the 8 warps of a CTA \(got 3\)"),
        ({"num_q_heads": 64, "max_q_len": 8}, {"team": 1}, r"team must be a multiple of the 2 warps .* \(got 1\)"),
        ({"sinks": True}, {"copy": "load"}, "copy=load is for plain decode of 16-bit caches"),
        ({"sinks": True}, {"solo": 8}, "solo=8 is for plain decode of 16-bit caches"),
        ({"max_q_len": 8}, {"stages": 4, "warps": 8}, "shared memory must hold .* set fewer stages"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes, params, rule):
    """With the numbers."""
    with pytest.raises(Unsupported, match=rule):
        plan(dataclasses.replace(SPEC, params=params, **changes))


def test_bulk_copies_are_refused_before_hopper():
    """As in plain decode."""
    spec = dataclasses.replace(SPEC, sinks=True, params={"copy": "bulk"})

    with pytest.raises(Unsupported, match=r"copy=bulk needs compute capability 9.0 or newer \(got sm_80\)"):
        plan(spec, "sm_80")

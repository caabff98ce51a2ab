"""When cuda.tensor_core leaves query rows to warpgroups, and how many; no GPU is needed."""

from __future__ import annotations

import dataclasses

import pytest

from harness.ops.layouts import HND
from harness.registry import Unsupported
from impls.cuda import prefix, tensor_core_general, verify
from impls.cuda.attention import Shape
from impls.cuda.builds import ARCHS, SHARED_LIMIT
from impls.cuda.tensor_core import STATIC_BYTES
from impls.cuda.tensor_core_general import Asked
from tests.cuda.test_tensor_core import SMS, spec_of

G = spec_of(32, 8192, num_q_heads=64, max_q_len=8)


def plan(spec, arch="sm_90"):
    return verify.plan_warpgroups(Shape.of(spec), spec, arch)


def asking(**params):
    return dataclasses.replace(G, params={"products": "warpgroups", **params})


@pytest.mark.parametrize(
    ("changes", "arch", "found"),
    [
        pytest.param({}, "sm_90", True, id="64 rows"),
        pytest.param({"sinks": True, "layout": HND}, "sm_90", True, id="sinks, another layout"),
        pytest.param({"max_q_len": 5}, "sm_90", True, id="40 rows"),
        pytest.param({"max_q_len": 4}, "sm_90", False, id="32 rows, which a warp sums"),
        pytest.param({"head_dim": 256, "max_q_len": 3}, "sm_90", True, id="24 long rows"),
        pytest.param({"head_dim": 96}, "sm_90", False, id="rows of another length"),
        pytest.param({"kv_dtype": "e4m3"}, "sm_90", False, id="an 8-bit cache"),
        pytest.param({"window": 512}, "sm_90", False, id="a window"),
        pytest.param({"softcap": 30.0}, "sm_90", False, id="softcap"),
        pytest.param({"params": {"products": "warps"}}, "sm_90", False, id="not as asked"),
        pytest.param({"params": {"team": 8}}, "sm_90", False, id="a team is asked for"),
        pytest.param({"max_q_len": 1, "params": {"products": "warpgroups"}}, "sm_90", True, id="as asked"),
        pytest.param({}, "sm_80", False, id="older"),
        pytest.param({}, "sm_100", False, id="newer"),
    ],
)
def test_warpgroups_take_what_warps_would_share_a_ring_for(changes, arch, found):
    """On Hopper, where all they have to know is which row sees how many keys."""
    assert (plan(dataclasses.replace(G, **changes), arch) is not None) is found


@pytest.mark.parametrize(
    ("group", "queries", "warpgroups", "parts"), [(8, 8, 1, 1), (8, 1, 1, 1), (16, 5, 2, 1), (16, 8, 2, 1), (71, 8, 2, 5)]
)
def test_a_warpgroup_has_64_rows(group, queries, warpgroups, parts):
    """Two in a CTA, and more rows in parts."""
    found = verify.fitting(Shape(group=group), Asked(queries=queries), 64, SHARED_LIMIT["sm_90"])

    assert (found.tiles.warpgroups, found.parts) == (warpgroups, parts)
    assert found.heads * (found.parts - 1) < group * queries <= found.heads * found.parts


@pytest.mark.parametrize(("max_num_seqs", "stages"), [(32, 2), (1024, 2), (1100, 2), (8192, None)])
def test_the_list_of_sequences_leaves_room_for_stages(max_num_seqs, stages):
    """At least two, else warps do it."""
    found = plan(dataclasses.replace(G, max_num_seqs=max_num_seqs))

    assert (found and found.tiles.stages) == stages
    if found:
        taken = verify.shared_bytes(Shape.of(G), Asked.of(G), found, max_num_seqs)
        assert taken + STATIC_BYTES <= SHARED_LIMIT["sm_90"]


@pytest.mark.parametrize(
    ("spec", "arch", "rule"),
    [
        (asking(), "sm_80", r"products=warpgroups needs compute capability 9.0 \(got sm_80\)"),
        (dataclasses.replace(asking(), head_dim=80), "sm_90", r"needs a head_dim of 64, 128 or 256 \(got 80\)"),
        (dataclasses.replace(asking(), softcap=3.0), "sm_90", r"takes 16-bit caches and sinks \(got softcap\)"),
        (asking(team=4), "sm_90", "has neither team nor warps"),
        (asking(copy="load"), "sm_90", r"copies by async \(got load\)"),
        (asking(solo=8), "sm_90", "has no warps by themselves; leave solo planned"),
        (asking(opening="quick"), "sm_90", r"begins the plain way \(got opening=quick\)"),
        (asking(closing="release"), "sm_90", r"ends with fences \(got closing=release\)"),
        (asking(tile=16), "sm_90", r"takes tiles of 64 or 128 \(got 16\)"),
        (asking(stages=6), "sm_90", "set fewer stages, or a smaller tile"),
    ],
    ids=["sm_80", "head_dim", "softcap", "teams", "loads", "solo", "opening", "closing", "small tiles", "stages"],
)
def test_what_warpgroups_do_not_do_is_said(spec, arch, rule):
    """Where they are asked for."""
    with pytest.raises(Unsupported, match=rule):
        plan(spec, arch)


def test_tiles_of_warpgroups_are_not_for_warps():
    """They would not fit their registers."""
    spec = dataclasses.replace(G, params={"products": "warps", "tile": 64})
    with pytest.raises(Unsupported, match=r"tile must be 16 or 32 where warps multiply \(got 64\)"):
        tensor_core_general.plan_crews(Shape.of(spec), spec, SMS, "sm_90")


@pytest.mark.parametrize(
    ("changes", "by", "unit"), [({}, verify.Warpgroups, 128), ({"max_q_len": 4}, tensor_core_general.Crews, 16)]
)
def test_what_is_a_sequences_own_beside_a_shared_prefix_is_planned_alike(changes, by, unit):
    """And runs are whole tiles of it."""
    found = prefix.Prefixes(dataclasses.replace(G, **changes), SMS, "sm_90")

    assert isinstance(found._own, by)
    assert found._unit == unit


def test_builds_are_for_hopper_and_its_own_instructions():
    """sm_90a, which no other device loads."""
    assert {arch: len(verify.builds(arch)) > 0 for arch in ARCHS} == {arch: arch == "sm_90" for arch in ARCHS}
    assert {build.only for build in verify.builds("sm_90")} == {"a"}

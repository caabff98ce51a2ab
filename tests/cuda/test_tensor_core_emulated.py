"""Plain decode by warps, on a CPU as in test_prefill_emulated.py, against a softmax in float64."""

from __future__ import annotations

import pytest
import torch

from harness.ops.layouts import HND, HND_SWIZZLED, NHD
from tests.cuda import emulated
from tests.cuda.test_verify_emulated import launched, on_cpu, prepared  # noqa: F401 - a fixture
from tests.impls.test_attention_cpu import Problem, Shape, assert_close

pytestmark = pytest.mark.skipif(emulated.why_missing() is not None, reason=emulated.why_missing() or "g++ is here")

#: lengths: short ones side by side, such as shares cut, and such as end at a share's end
LENS = {
    "one long among short": (*(64,) * 6, 400, *(30, 0, 1, 17, 64, 128, 129)),
    "all alike": (64,) * 9,
    "none short": (200, 300),
    "fewer than warps, and a short line": (20, 130, 5),
    "as many as a warp has lanes": (0, *range(1, 32)),
    "one more": (5,) * 33,
}
#: layout, shape, parameters
KERNELS = {
    "bulk copies": (HND_SWIZZLED, {"head_dim": 64}, {"team": 4, "solo": 8}),
    "all warps a team": (HND_SWIZZLED, {"head_dim": 64, "dtype": "bf16"}, {"solo": 4}),
    "a warp a team": (HND_SWIZZLED, {"head_dim": 64}, {"team": 1, "solo": 8}),
    "16 bytes a lane, group 12": (NHD, {"head_dim": 16, "num_q_heads": 12, "num_kv_heads": 1}, {"team": 2, "solo": 16}),
    "no solo": (HND_SWIZZLED, {"head_dim": 64}, {"team": 4, "solo": 0}),
    "quick": (HND_SWIZZLED, {"head_dim": 64}, {"solo": 0, "opening": "quick", "closing": "release"}),
    "quick, teams of two": (NHD, {"head_dim": 64}, {"solo": 0, "opening": "quick", "closing": "release", "team": 2}),
    "loads": (HND, {"head_dim": 128, "dtype": "bf16", "num_q_heads": 6}, {"copy": "load"}),
    "loads of a block of 24": (HND, {"head_dim": 80, "num_q_heads": 6, "block_size": 24}, {"copy": "load", "solo": 8}),
    "loads of one token": (NHD, {"head_dim": 64, "block_size": 1}, {"copy": "load", "opening": "plain"}),
}


@pytest.mark.parametrize("num_ctas", [1, 5])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=[name.replace(" ", "_") for name in KERNELS])
@pytest.mark.parametrize("lens", LENS.values(), ids=[name.replace(" ", "_") for name in LENS])
def test_attention_is_the_softmax_over_all_keys(on_cpu, monkeypatch, lens, kernel, num_ctas):  # noqa: F811
    """Launched twice, the second time on sequences that have become shorter; the counters are as they were."""
    layout, fields, params = kernel
    problem = Problem(Shape(lens, (1,) * len(lens), **fields))
    params = {"products": "planned", "prefix": "never", **params}
    made, step = prepared(monkeypatch, problem, layout, params, num_ctas), problem.step()
    made.plan(step)
    for by in (0, 1):
        step.seq_lens[:] = torch.tensor([max(n - by, 0) for n in lens])
        problem.tokens = [[part[: max(n - by, 0)] for part in pair] for pair, n in zip(problem.tokens, lens, strict=True)]
        problem.shape = Shape(tuple(step.seq_lens.tolist()), (1,) * len(lens), **fields)

        assert_close(launched(made, problem, layout), problem.truth(), problem.shape.dtype)
        assert not made._arrived.any()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 24])
def test_rows_of_a_swizzled_cache_lie_in_different_banks(on_cpu, monkeypatch, block_size):  # noqa: F811
    """Whatever the block size, where they come 16 bytes a lane; a matrix load that meets a bank twice is refused."""
    problem = Problem(Shape((70, 33), (1, 1), head_dim=64, block_size=block_size))
    params = {"products": "planned", "prefix": "never", "copy": "async"}
    made = prepared(monkeypatch, problem, HND_SWIZZLED, params, 2)
    made.plan(problem.step())

    assert_close(launched(made, problem, HND_SWIZZLED), problem.truth(), "f16")

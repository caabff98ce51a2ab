"""Plain decode by cuda.tensor_core, on a CPU as in test_prefill_emulated.py, against a softmax in float64."""

from __future__ import annotations

import pytest
import torch

from harness.ops.layouts import HND, HND_SWIZZLED, NHD
from harness.registry import Registry
from impls import IMPLS
from impls.cuda import attention, jit, tensor_core
from tests.cuda import emulated
from tests.impls.test_attention_cpu import Problem, Shape, assert_close

pytestmark = pytest.mark.skipif(emulated.why_missing() is not None, reason=emulated.why_missing() or "g++ is here")

LENS = {
    "one of many shares": (300,),
    "ragged": (0, 33, 16, 1, 129, 15, 70, 0),
    "as many as a warp has lanes": (0, *range(1, 32)),
    "one more": (5,) * 33,
}
#: layout, shape, parameters
KERNELS = {
    "swizzled": (HND_SWIZZLED, {"num_q_heads": 8, "head_dim": 64}, {}),
    "quick": (HND_SWIZZLED, {"num_q_heads": 8, "head_dim": 64}, {"opening": "quick", "closing": "release"}),
    "quick, teams of two": (NHD, {"num_q_heads": 8, "head_dim": 64}, {"opening": "quick", "closing": "release", "team": 2}),
    "loads": (HND, {"num_q_heads": 6, "head_dim": 128, "dtype": "bf16"}, {"copy": "load", "opening": "quick"}),
    "loads of a block of 24": (HND, {"num_q_heads": 6, "head_dim": 80, "block_size": 24}, {"copy": "load"}),
    "loads of one token": (NHD, {"num_q_heads": 4, "head_dim": 64, "block_size": 1}, {"copy": "load", "opening": "quick"}),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernel is prepared for the CPU."""
    monkeypatch.setattr(attention, "device_index", lambda device: 0)
    monkeypatch.setattr(attention, "raw_stream", lambda index: 0)
    monkeypatch.setattr(jit, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(tensor_core, "load", lambda build, device, signature: (emulated.Emulated(build, signature), {}))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=[name.replace(" ", "_") for name in KERNELS])
@pytest.mark.parametrize("lens", LENS.values(), ids=[name.replace(" ", "_") for name in LENS])
def test_attention_is_the_softmax_over_visible_keys(on_cpu, monkeypatch, lens, kernel):
    """Launched twice, the second time on sequences that have become shorter; the counters are as they were."""
    layout, fields, params = kernel
    monkeypatch.setattr(tensor_core, "count_sms", lambda device: 9)
    problem = Problem(Shape(lens, (1,) * len(lens), **fields))
    (entry,) = (entry for entry in Registry(IMPLS).entries(("cuda.tensor_core",)) if entry.layout is layout)
    made = tensor_core.prepare(problem.spec(entry, params=entry.impl.resolve_params(params)))
    step = problem.step()
    made.plan(step)
    for by in (0, 1):
        lens = tuple(max(n - by, 0) for n in lens)
        step.seq_lens[:] = torch.tensor(lens)
        problem.tokens = [[part[:n] for part in pair] for pair, n in zip(problem.tokens, lens, strict=True)]
        problem.shape = Shape(lens, (1,) * len(lens), **fields)
        out, lse = torch.full_like(problem.query, torch.nan), torch.full(problem.query.shape[:2], torch.nan)
        made.launch(problem.query, *problem.caches(layout), out, lse)

        assert_close((out, lse), problem.truth(), problem.shape.dtype)
        assert not made._arrived.any()

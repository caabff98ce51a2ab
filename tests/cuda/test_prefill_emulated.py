"""cuda.prefill on a CPU: threads, copies and products in random order, against a softmax in float64."""

from __future__ import annotations

import pytest
import torch

from harness.ops.layouts import HND, HND_SWIZZLED, KV_NHD, NHD
from harness.registry import Registry
from impls import IMPLS
from impls.cuda import attention, prefill
from tests.cuda import emulated
from tests.impls.test_attention_cpu import Problem, Shape, assert_close

pytestmark = pytest.mark.skipif(emulated.why_missing() is not None, reason=emulated.why_missing() or "g++ is here")

LENS = {
    "one tile": ((40,), (5,)),
    "tiles": ((300, 129), (200, 129)),
    "ragged": ((5, 0, 65, 128, 1), (5, 2, 0, 1, 1)),
    "more queries than keys": ((2, 40), (4, 43)),
}
#: layout, then what is prepared: shape and parameters
KERNELS = {
    "as planned": (HND, {"num_q_heads": 8, "head_dim": 128, "dtype": "bf16"}, {}),
    "swizzled, blocks of 24": (HND_SWIZZLED, {"num_q_heads": 10, "head_dim": 128, "dtype": "bf16", "block_size": 24}, {}),
    "queries in registers": (NHD, {"head_dim": 128}, {"query": "registers"}),
    "three warpgroups": (KV_NHD, {"head_dim": 128, "block_size": 1}, {"warpgroups": 3, "stages": 3}),
    "head_dim 64": (HND, {"head_dim": 64, "num_q_heads": 2}, {"tile": 192}),
    "head_dim 256": (HND_SWIZZLED, {"head_dim": 256, "dtype": "bf16", "block_size": 8}, {}),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """Prefill prepares for the CPU, with two SMs."""
    monkeypatch.setattr(attention, "device_index", lambda device: 0)
    monkeypatch.setattr(attention, "raw_stream", lambda index: 0)
    monkeypatch.setattr(prefill, "count_sms", lambda device: 2)
    monkeypatch.setattr(prefill, "load", lambda build, device, signature: (emulated.Emulated(build, signature), {}))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=[name.replace(" ", "_") for name in KERNELS])
@pytest.mark.parametrize("lens", LENS.values(), ids=[name.replace(" ", "_") for name in LENS])
def test_attention_is_the_softmax_over_visible_keys(on_cpu, kernel, lens):
    """Launched twice, the second time on sequences that have become shorter; the counters are as they were."""
    layout, fields, params = kernel
    problem = Problem(Shape(*lens, **fields))
    (entry,) = (entry for entry in Registry(IMPLS).entries(("cuda.prefill",)) if entry.layout is layout)
    made = prefill.prepare(problem.spec(entry, params=entry.impl.resolve_params(params)))
    step = problem.step()
    made.plan(step)
    for by in (0, 1):
        step.seq_lens[:] = torch.tensor([max(n - by, 0) for n in lens[0]])
        problem.tokens = [[part[: max(n - by, 0)] for part in pair] for pair, n in zip(problem.tokens, lens[0], strict=True)]
        problem.shape = Shape(tuple(step.seq_lens.tolist()), lens[1], **fields)
        out, lse = torch.full_like(problem.query, torch.nan), torch.full(problem.query.shape[:2], torch.nan)
        made.launch(problem.query, *problem.caches(layout), out, lse)

        assert_close((out, lse), problem.truth(), problem.shape.dtype)
        assert made._counters.tolist() == [0, 0]

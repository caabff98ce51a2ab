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
    "a tile of 176": (NHD, {"head_dim": 128, "block_size": 32}, {"tile": 176}),
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


def prepared(problem, layout, params):
    (entry,) = (entry for entry in Registry(IMPLS).entries(("cuda.prefill",)) if entry.layout is layout)
    return prefill.prepare(problem.spec(entry, params=entry.impl.resolve_params(params)))


def launched(made, problem, layout):
    """Out and lse, which were full of NaN."""
    out, lse = torch.full_like(problem.query, torch.nan), torch.full(problem.query.shape[:2], torch.nan)
    made.launch(problem.query, *problem.caches(layout), out, lse)
    return out, lse


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=[name.replace(" ", "_") for name in KERNELS])
@pytest.mark.parametrize("lens", LENS.values(), ids=[name.replace(" ", "_") for name in LENS])
def test_attention_is_the_softmax_over_visible_keys(on_cpu, kernel, lens):
    """Launched twice, the second time on sequences that have become shorter; the counters are as they were."""
    layout, fields, params = kernel
    problem = Problem(Shape(*lens, **fields))
    made, step = prepared(problem, layout, params), problem.step()
    made.plan(step)
    for by in (0, 1):
        step.seq_lens[:] = torch.tensor([max(n - by, 0) for n in lens[0]])
        problem.tokens = [[part[: max(n - by, 0)] for part in pair] for pair, n in zip(problem.tokens, lens[0], strict=True)]
        problem.shape = Shape(tuple(step.seq_lens.tolist()), lens[1], **fields)

        assert_close(launched(made, problem, layout), problem.truth(), problem.shape.dtype)
        assert made._counters.tolist() == [0, 0]


@pytest.mark.parametrize("query", ["shared", "registers"])
def test_sums_are_rescaled_where_a_maximum_rises(on_cpu, query):
    """Scores of 40 and more lie in later tiles than those that came first."""
    problem = Problem(Shape((900,), (60,), head_dim=64))
    problem.query *= 16
    made = prepared(problem, HND, {"query": query, "tile": 64})
    made.plan(problem.step())

    assert_close(launched(made, problem, HND), problem.truth(), "f16")


def test_out_may_begin_and_step_anywhere(on_cpu):
    """At odd elements, which no pair of them can be written to at once."""
    problem = Problem(Shape((70,), (70,), head_dim=64))
    made = prepared(problem, HND, {})
    made.plan(problem.step())
    tokens, heads, head_dim = problem.query.shape
    room = torch.full((tokens, heads * head_dim + 3), torch.nan, dtype=problem.query.dtype)
    out, lse = room[:, 1:-2].unflatten(1, (heads, head_dim)), torch.empty(tokens, heads)

    made.launch(problem.query, *problem.caches(HND), out, lse)

    assert_close((out, lse), problem.truth(), "f16")
    assert room[:, [0, -2, -1]].isnan().all()

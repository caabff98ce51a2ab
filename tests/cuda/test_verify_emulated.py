"""Drafts verified by warpgroups, on a CPU as in test_prefill_emulated.py, against a softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.ops.layouts import HND, HND_SWIZZLED, KV_NHD, NHD
from harness.registry import Registry
from impls import IMPLS
from impls.cuda import attention, jit, prefix, tensor_core
from tests.cuda import emulated
from tests.cuda.test_prefix_emulated import shared_problem
from tests.impls.test_attention_cpu import Problem, Shape, assert_close

pytestmark = pytest.mark.skipif(emulated.why_missing() is not None, reason=emulated.why_missing() or "g++ is here")

#: seq_lens, q_lens
LENS = {
    "one tile": ((40,), (5,)),
    "one sequence of many shares": ((1100,), (8,)),
    "ragged": ((700, 0, 65, 128, 1, 129), (5, 2, 0, 8, 1, 3)),
    "more queries than keys": ((2, 300), (4, 7)),
}
#: layout, shape, parameters
KERNELS = {
    "swizzled": (HND_SWIZZLED, {"num_q_heads": 16, "head_dim": 128, "dtype": "bf16"}, {}),
    "blocks of 24, group 5": (HND, {"num_q_heads": 10, "head_dim": 128, "dtype": "bf16", "block_size": 24}, {"tile": 64}),
    "two warpgroups": (NHD, {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 128, "block_size": 8}, {}),
    "two parts": (HND, {"num_q_heads": 48, "num_kv_heads": 2, "head_dim": 64, "dtype": "bf16"}, {"stages": 2}),
    "head_dim 256": (KV_NHD, {"num_q_heads": 12, "head_dim": 256, "dtype": "bf16"}, {}),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernel is prepared for the CPU."""
    monkeypatch.setattr(attention, "device_index", lambda device: 0)
    monkeypatch.setattr(attention, "raw_stream", lambda index: 0)
    monkeypatch.setattr(jit, "arch_of", lambda device: "sm_90")
    for page in (tensor_core, prefix):
        monkeypatch.setattr(page, "load", lambda build, device, signature: (emulated.Emulated(build, signature), {}))


def prepared(monkeypatch, problem, layout, params, num_ctas, **changes):
    monkeypatch.setattr(tensor_core, "count_sms", lambda device: num_ctas)
    (entry,) = (entry for entry in Registry(IMPLS).entries(("cuda.tensor_core",)) if entry.layout is layout)
    params = entry.impl.resolve_params({"products": "warpgroups", **params})
    return tensor_core.prepare(problem.spec(entry, params=params, **changes))


def launched(made, problem, layout, **layer):
    """Out and lse, which were full of NaN."""
    out, lse = torch.full_like(problem.query, torch.nan), torch.full(problem.query.shape[:2], torch.nan)
    made.launch(problem.query, *problem.caches(layout), out, lse, **layer)
    return out, lse


@pytest.mark.parametrize("num_ctas", [2, 9])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=[name.replace(" ", "_") for name in KERNELS])
@pytest.mark.parametrize("lens", LENS.values(), ids=[name.replace(" ", "_") for name in LENS])
def test_attention_is_the_softmax_over_visible_keys(on_cpu, monkeypatch, lens, kernel, num_ctas):
    """Launched twice, the second time on sequences that have become shorter; the counters are as they were."""
    layout, fields, params = kernel
    problem = Problem(Shape(*lens, **fields))
    made, step = prepared(monkeypatch, problem, layout, params, num_ctas), problem.step()
    made.plan(step)
    for by in (0, 1):
        step.seq_lens[:] = torch.tensor([max(n - by, 0) for n in lens[0]])
        problem.tokens = [[part[: max(n - by, 0)] for part in pair] for pair, n in zip(problem.tokens, lens[0], strict=True)]
        problem.shape = Shape(tuple(step.seq_lens.tolist()), lens[1], **fields)

        assert_close(launched(made, problem, layout), problem.truth(), problem.shape.dtype)
        assert not made._arrived.any()


@pytest.mark.parametrize("num_ctas", [1, 16])
def test_a_sink_counts_once_whatever_the_shares(on_cpu, monkeypatch, num_ctas):
    """Of a sequence that one CTA has to itself, that several share, and that is empty."""
    fields = {"num_q_heads": 16, "head_dim": 128, "dtype": "bf16"}
    problem = Problem(Shape((900, 0, 20), (8, 2, 3), **fields))
    made = prepared(monkeypatch, problem, HND, {}, num_ctas, sinks=True)
    made.plan(problem.step())
    sinks = torch.linspace(-3, 9, 16)

    out, lse = launched(made, problem, HND, sinks=sinks)

    want, want_lse = problem.truth()
    whole = np.logaddexp(want_lse, sinks.double().numpy())
    np.testing.assert_allclose(lse, whole, atol=1e-4)
    np.testing.assert_allclose(out.double(), want * np.exp(want_lse - whole)[..., None], rtol=1.2e-2, atol=2e-3)


@pytest.mark.parametrize("num_ctas", [2, 9])
@pytest.mark.parametrize("num_q_heads", [8, 16], ids=["one warpgroup", "two"])
def test_what_is_shared_is_added_to_what_is_a_sequences_own(on_cpu, monkeypatch, num_q_heads, num_ctas):
    """Runs of several levels by the first launch; a sequence that shares nothing is all the second's."""
    fields = {"num_q_heads": num_q_heads, "num_kv_heads": 1, "head_dim": 128, "dtype": "bf16"}
    problem = shared_problem(((700, 650, 400, 300, 50), (8, 1, 3, 8, 5), (0, 640, 384, 0, 32)), fields)
    made = prepared(monkeypatch, problem, HND_SWIZZLED, {"prefix": "always"}, num_ctas)
    made.plan(problem.step())

    assert_close(launched(made, problem, HND_SWIZZLED), problem.truth(), "bf16")
    assert [run.end for run in made._prefixes.runs] == [384, 640]
    assert not any(tensor.any() for tensor in (made._prefixes._kernels[0].held[0], made._prefixes._kernels[1].held[1]))

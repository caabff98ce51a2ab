"""What warpgroups leave of shared prefixes, on a CPU as in test_prefill_emulated.py, against a softmax in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from harness.ops.layouts import HND, HND_SWIZZLED, KV_NHD, NHD
from harness.registry import Registry
from impls import IMPLS
from impls.cuda import prefix
from impls.cuda.runs import list_pieces
from tests.cuda import emulated
from tests.impls.test_attention_cpu import Problem, Shape

pytestmark = pytest.mark.skipif(emulated.why_missing() is not None, reason=emulated.why_missing() or "g++ is here")

#: seq_lens, q_lens, and how many tokens each sequence has in common with the first
BATCHES = {
    "one run": ((300, 290, 310), (1, 1, 1), (0, 288, 288)),
    "levels": ((700, 650, 400, 144), (1, 2, 3, 1), (0, 640, 384, 96)),
    "more query tokens than a piece has": ((200, 200, 200), (30, 40, 20), (0, 144, 144)),
    "an empty sequence": ((96, 0, 96, 96), (1, 0, 0, 1), (0, 0, 48, 48)),
}
#: layout, shape
KERNELS = {
    "swizzled": (HND_SWIZZLED, {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bf16"}),
    "blocks of 24, group 5": (HND, {"num_q_heads": 10, "num_kv_heads": 2, "head_dim": 128, "dtype": "bf16", "block_size": 24}),
    "head_dim 64, f16": (NHD, {"num_q_heads": 4, "num_kv_heads": 1, "block_size": 8}),
    "head_dim 256": (KV_NHD, {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 256, "dtype": "bf16"}),
}


class Nothing:
    """In place of the second launch."""

    def __call__(self, *values) -> None:
        pass


@pytest.fixture
def on_cpu(monkeypatch):
    """The first launch is emulated."""

    def load(build, device, signature):
        return emulated.Emulated(build, signature) if build.source == "prefix.cu" else Nothing(), {}

    monkeypatch.setattr(prefix, "load", load)


def shared_problem(batch, fields):
    """A problem whose tables begin alike."""
    seq_lens, q_lens, shared = batch
    problem = Problem(Shape(seq_lens, q_lens, **fields))
    for seq, tokens in enumerate(shared):
        blocks = tokens // problem.shape.block_size
        problem.tables[seq, :blocks] = problem.tables[0, :blocks]
        for part, first in zip(problem.tokens[seq], problem.tokens[0], strict=True):
            part[: blocks * problem.shape.block_size] = first[: blocks * problem.shape.block_size]
    return problem


def prepared(problem, layout, num_ctas):
    (entry,) = (entry for entry in Registry(IMPLS).entries(("cuda.tensor_core",)) if entry.layout is layout)
    spec = problem.spec(entry, params=entry.impl.resolve_params({"prefix": "always", "products": "warps"}))
    return prefix.Prefixes(spec, num_ctas, "sm_90")


def launch(made, problem, layout, step):
    """As Attention does."""
    query, (keys, values) = problem.query, problem.caches(layout)
    shape = problem.shape
    pointers = (0, 0, query.data_ptr(), keys.data_ptr(), values.data_ptr(), step.block_tables.data_ptr(), 0, 0)
    strides = (step.block_tables.stride(0), query.stride(0), 0, keys.stride(0), values.stride(0))
    counts = (len(shape.seq_lens), shape.num_q_heads, shape.num_kv_heads)
    made.enqueue(0, (*pointers, *counts, *strides, shape.head_dim**-0.5))


def merged(made, problem, listing, seq, i, head):
    """Output and lse (log2) of a query token over what its sequence shares."""
    left = listing.left[listing.lists[seq] : listing.lists[seq + 1]] + i
    rows, head_dim = made._rows, problem.shape.head_dim
    sums = made._sums[: rows * head_dim].view(-1, problem.shape.num_q_heads, head_dim)[left, head].double().numpy()
    stats = made._sums[rows * head_dim :].view(-1, problem.shape.num_q_heads, 2)[left, head].double().numpy()
    weights = np.exp2(stats[:, 0] - stats[:, 0].max())
    total = (weights * stats[:, 1]).sum()
    return weights @ sums / total, stats[:, 0].max() + np.log2(total)


@pytest.mark.parametrize("num_ctas", [2, 9])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=[name.replace(" ", "_") for name in KERNELS])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=[name.replace(" ", "_") for name in BATCHES])
def test_pieces_are_the_softmax_over_what_is_shared(on_cpu, batch, kernel, num_ctas):
    """Of every query token that shares anything; the counters are as they were, and unused places untouched."""
    layout, fields = kernel
    problem = shared_problem(batch, fields)
    shape, step, made = problem.shape, problem.step(), prepared(problem, layout, num_ctas)
    made.plan(step)
    made._sums.fill_(torch.nan)

    launch(made, problem, layout, step)

    listing = list_pieces(made.runs, step.host_query_start_loc, made._cut)
    assert made._kernels[0].held[0].tolist() == [0, 0]
    assert made._sums[: made._rows * shape.head_dim].view(made._most_places, -1).isfinite().all(1).sum() == len(listing.tokens)
    for seq in range(len(shape.seq_lens)):
        shared = listing.own_firsts[seq]
        for i in range(shape.q_lens[seq] if shared else 0):
            for head in range(shape.num_q_heads):
                keys, values = (part[:shared, head * shape.num_kv_heads // shape.num_q_heads].double().numpy()
                                for part in problem.tokens[seq])
                scores = keys @ problem.query[problem.starts[seq] + i, head].double().numpy() * shape.head_dim**-0.5
                weights = np.exp(scores - scores.max())
                want, lse = weights @ values / weights.sum(), (scores.max() + np.log(weights.sum())) / np.log(2)
                got, got_lse = merged(made, problem, listing, seq, i, head)
                assert np.linalg.norm(got - want) <= (6e-3 if shape.dtype == "bf16" else 1e-3) * np.linalg.norm(want)
                assert abs(got_lse - lse) < 1e-4


def test_what_is_told_is_not_told_again(on_cpu, monkeypatch):
    """A step that shares what the one before did costs no copy to the device; one that shares less, or nothing, does."""
    problem = shared_problem(BATCHES["levels"], KERNELS["swizzled"][1])
    step, made, told = problem.step(), prepared(problem, HND_SWIZZLED, 3), []
    monkeypatch.setattr(made, "_tell", lambda listing: told.append(len(listing.ends)))
    fewer = dataclasses.replace(step, host_seq_lens=np.array([700, 650, 0, 0], np.int32))
    none = dataclasses.replace(step, host_seq_lens=np.array([700, 0, 0, 0], np.int32))

    for planned in (none, step, step, fewer, none, none):
        made.plan(planned)

    assert len(told) == 3
    assert told[2] == 0


def test_a_captured_launch_does_nothing_once_nothing_is_shared(on_cpu):
    """It reads what is shared from the device, which a later plan has written."""
    layout, fields = KERNELS["swizzled"]
    problem = shared_problem(BATCHES["levels"], fields)
    step, made = problem.step(), prepared(problem, layout, 3)
    made.plan(step)
    tables = np.arange(step.host_block_tables.size, dtype=np.int32).reshape(step.host_block_tables.shape)
    alone = dataclasses.replace(step, host_block_tables=tables)
    assert made.plan(alone) is False
    made._sums.fill_(torch.nan)

    launch(made, problem, layout, step)

    assert made._sums.isnan().all()
    assert made._kernels[0].held[0].tolist() == [0, 0]

"""A step planned on the host, and calls of torch.ops.pagedbench.paged_attention that launch by it."""

from __future__ import annotations

import gc
import types

import numpy as np
import pytest
import torch

from impls.cuda.prefix import find_runs
from runtime.torch_op import StepPlan
from tests.runtime.test_torch_op import arguments, attend, features


def hosts(tensors):
    """Copies of a step on the host."""
    return [tensor.cpu().numpy().copy() for tensor in tensors[3:]]


def planned(tensors, **options):
    return StepPlan(*tensors, host=hosts(tensors), **options)


def shared(num_seqs=4, **fields):
    """Sequences that begin with the same two blocks of eight."""
    tensors = arguments(num_seqs, **fields)
    tensors[3][:, :2] = tensors[3][0, :2]
    tensors[4].fill_(25)
    return tensors


@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_planned_call_is_an_unplanned_one(as_tensors):
    """Bit for bit, for every layer of a step and for the next step in the same tensors and in others."""
    tensors = shared()
    host = [tensor.clone() for tensor in tensors[3:]] if as_tensors else hosts(tensors)
    plan = StepPlan(*tensors, host=host)
    layers = [tensors, [tensors[0] * 2, *(cache.flip(0) for cache in tensors[1:3]), *tensors[3:]]]
    for step in (tensors, arguments(3, seed=1), tensors):
        plan.renew(*step[3:], host=host if step is tensors else hosts(step))
        for query, key_cache, value_cache, *_ in layers:
            called = [query[: len(step[4])], key_cache, value_cache, *step[3:]]
            for got, want in zip(attend(*called, plan=plan.id), attend(*called), strict=True):
                assert torch.equal(got, want)


def test_all_that_a_layer_adds_is_planned_by():
    """And whatever the plan is not for is refused."""
    tensors, named = features()
    plan = planned(tensors, **named)

    assert torch.equal(attend(*tensors, **named, plan=plan.id)[0], attend(*tensors, **named)[0])
    with pytest.raises(ValueError, match=r"plan \d+ is for window 9 \(got None\)"):
        attend(*tensors, **{**named, "window": None}, plan=plan.id)
    with pytest.raises(ValueError, match=r"plan \d+ is for sinks True \(got False\)"):
        attend(*tensors, **{**named, "sinks": None}, plan=plan.id)


def test_tokens_of_padding_belong_to_no_sequence():
    """As without a plan."""
    tensors = shared()
    plan = planned(tensors)
    padded = [torch.cat([tensors[0], torch.full((3, 4, 32), torch.nan)]), *tensors[1:]]

    with pytest.raises(ValueError, match="is for max_num_tokens 4"):
        attend(*padded, plan=plan.id)
    plan = planned(padded)
    assert torch.equal(attend(*padded, plan=plan.id)[0][:4], attend(*tensors)[0])


def test_the_kernel_is_told_what_tables_share():
    """It plans once, by copies on the host, in which runs of blocks are found; layers only launch."""
    tensors = shared()
    plan = planned(tensors)
    steps, launches = [], []
    plan._plan.prepared = types.SimpleNamespace(plan=steps.append, launch=lambda *tensors: launches.append(tensors))
    plan.renew(*tensors[3:], host=hosts(tensors))
    for _ in range(3):
        attend(*tensors, plan=plan.id)
    (step,) = steps
    (run,) = find_runs(step.host_block_tables, (step.host_seq_lens - 1).tolist(), 8, 8)

    assert (run.seqs, run.begin, run.end) == ((0, 1, 2, 3), 0, 16)
    assert len(launches) == 3


def test_a_copy_that_is_written_to_does_not_matter():
    """An engine may prepare its next step in the arrays that it gave."""
    tensors = shared()
    host = hosts(tensors)
    plan = StepPlan(*tensors, host=host)
    want = attend(*tensors)[0]
    for array in host:
        array.fill(0)

    assert torch.equal(attend(*tensors, plan=plan.id)[0], want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_as_one_graph(backend):
    """Without a break, for all steps of a plan; a second plan, of another batch, costs one compilation at most."""
    compiled = []

    def layer(plan, *tensors):
        return attend(*tensors, plan=plan.id)[0].float() * 2

    def counting(graph, example):
        compiled.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, example)

    torch._dynamo.reset()
    traced = torch.compile(layer, fullgraph=True, backend=counting, dynamic=True)
    counts, plans = [], []
    for num_seqs in (6, 5):
        plans.append(planned(shared(num_seqs)))
        for seed in range(3):
            tensors = shared(num_seqs, seed=seed)
            plans[-1].renew(*tensors[3:], host=hosts(tensors))
            assert torch.equal(traced(plans[-1], *tensors), attend(*tensors)[0].float() * 2)
        counts.append(len(compiled))

    assert counts[0] == 1
    assert counts[1] <= 2


# What is refused

def test_a_plan_that_is_gone_is_refused():
    """Its id is no number of another one."""
    tensors = shared()
    number = planned(tensors).id
    gc.collect()

    with pytest.raises(ValueError, match=rf"plan must be the id of a StepPlan that is alive \(got {number}\)"):
        attend(*tensors, plan=number)
    assert planned(tensors).id != number


def test_other_tables_than_those_of_the_plan_are_refused():
    """A step that nobody planned would be attended to by the tables of the last one."""
    tensors = shared()
    plan = planned(tensors)

    for place in (3, 4, 5):
        other = [tensor.clone() if at == place else tensor for at, tensor in enumerate(tensors)]
        with pytest.raises(ValueError, match=r"query_start_loc must be the tensors that plan \d+ was made of"):
            attend(*other, plan=plan.id)
    fewer = [tensors[0][:3], *tensors[1:3], tensors[3][:3], tensors[4][:3], tensors[5][:4]]
    with pytest.raises(ValueError, match="must be the tensors that plan"):
        attend(*fewer, plan=plan.id)
    with pytest.raises(ValueError, match=r"query must have the 4 tokens that plan \d+ knows \(got 3\)"):
        attend(tensors[0][:3], *tensors[1:], plan=plan.id)


@pytest.mark.parametrize(
    ("place", "change", "rule"),
    [
        (0, lambda a: a[:2], r"host block_tables must have shape \(4, 4\) and type int32"),
        (1, lambda a: a.astype(np.int64), r"host seq_lens must have shape \(4,\) and type int32.* of int64"),
        (1, lambda a: a + 100, "seq_lens must be at most 32"),
        (2, lambda a: a * 2, r"query_start_loc\[-1\] must be at most 4"),
        (2, lambda a: np.array([0, 2, 2, 3, 4], np.int32), "query tokens of a sequence must be at most 1"),
        (0, lambda a: a.tolist(), r"host block_tables must be a NumPy array, or a tensor on the CPU \(got list\)"),
        (0, lambda a: torch.empty(4, 4, dtype=torch.int32, device="meta"), r"a tensor on the CPU \(got meta\)"),
    ],
)
def test_copies_that_cannot_be_are_refused(place, change, rule):
    """With the rule and what was got; the plan stays as it was."""
    tensors = shared()
    plan, host = planned(tensors), hosts(tensors)
    host[place] = change(host[place])

    with pytest.raises(ValueError, match=rule):
        plan.renew(*tensors[3:], host=host)
    with pytest.raises(ValueError, match=r"host must be copies of block_tables, seq_lens, query_start_loc \(got 2 of them\)"):
        plan.renew(*tensors[3:], host=host[:2])
    assert torch.equal(attend(*tensors, plan=plan.id)[0], attend(*tensors)[0])


# On a GPU

def document(dtype=torch.bfloat16, seed=0):
    """Twelve sequences of some 8192 tokens, of which they share 8000: enough to be worth it. Blocks of 16, 8 KV heads."""
    chance = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=chance, device="cuda").to(dtype)

    tables = torch.arange(12 * 520, device="cuda").view(12, 520).int()
    tables[:, :500] = tables[0, :500]
    lens = torch.arange(8100, 8100 + 12 * 10, 10, device="cuda").int()
    caches = (normal(12 * 520, 8, 16, 128), normal(12 * 520, 8, 16, 128))
    return [normal(12, 32, 128), *caches, tables, lens, torch.arange(13, device="cuda").int()]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@needs_gpu
def test_a_gpu_reads_a_prefix_once():
    """By the ledger, with the answer of a call that reads it for each sequence; layers do not wait for the device."""
    tensors = document()
    plan = planned(tensors)
    want = attend(*tensors)
    attend(*tensors, plan=plan.id)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = attend(*tensors, plan=plan.id)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert plan.ledger["prefixes"] == "1 runs of blocks read once"
    torch.testing.assert_close(got[0], want[0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(got[1], want[1], rtol=1e-3, atol=1e-3)


@needs_gpu
def test_a_captured_plan_follows_its_renewal():
    """Replayed after the same tensors were planned anew: with another prefix, and with none."""
    tensors = document()
    plan = planned(tensors)
    attend(*tensors, plan=plan.id)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = attend(*tensors, plan=plan.id)
    alone = torch.arange(12 * 520, device="cuda").view(12, 520).int()
    half = torch.where(torch.arange(520, device="cuda") < 200, alone[3], alone)
    for tables in (half, alone, document()[3]):
        tensors[3].copy_(tables)
        plan.renew(*tensors[3:], host=hosts(tensors))
        graph.replay()
        want = attend(*tensors)

        torch.testing.assert_close(got[0], want[0], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(got[1], want[1], rtol=1e-3, atol=1e-3)

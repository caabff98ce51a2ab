"""The engine's tokens are Hugging Face's: alone, batched, preempted, found as a prefix, in any block size, on any entry."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from harness.registry import Limits, Registry, default_registry
from runtime.attention import StepAttention
from runtime.buffers import StepBuffers
from runtime.requests import Sampling
from tests.runtime.served import NEW, Watched, faults, greedy, model, needs_transformers, prompts

pytestmark = needs_transformers
GREEDY = Sampling(max_tokens=NEW, ignore_eos=True)
MODELS = ("qwen3-tiny", "qwen3-moe-tiny")


def serve(name="qwen3-tiny", wanted=None, arrivals=(), **changes):
    """Serve the prompts, request i not before step arrivals[i]; returns the engine, its tokens and what was wanted."""
    engine = Watched(model(name), **changes)
    texts = prompts() if wanted is None else wanted
    answers = {f"r{i}": greedy(tuple(prompt), name=name) for i, prompt in enumerate(texts)}
    late = list(zip(answers, arrivals or [0] * len(answers), strict=True))
    tokens: dict = {}
    while late or not engine.is_idle:
        while late and (late[0][1] <= engine.num_steps or engine.is_idle):
            request, _ = late.pop(0)
            engine.submit(answers[request].prompt, GREEDY, request)
        for event in engine.step():
            tokens.setdefault((event.request_id, event.index), []).append(event.token)
    assert engine.manager.num_live_blocks == 0
    return engine, tokens, answers


def assert_exact(engine, tokens, answers):
    wrong, ties = faults(engine, tokens, answers)
    print(f"{len(answers)} requests, {ties} ties")
    assert wrong == []
    assert ties < len(answers)


@pytest.mark.parametrize("name", MODELS)
def test_references_can_tell_right_from_wrong(name):
    """Greedy answers of the tiny models wander: at least 20 of 40 tokens differ."""
    distinct = [len(set(greedy(tuple(prompt), name=name).tokens)) for prompt in prompts()]

    assert min(distinct) >= 20


@pytest.mark.parametrize("name", MODELS)
def test_a_request_alone_is_hugging_faces(name):
    """One request at a time, its prompt in chunks."""
    for prompt in prompts(3):
        assert_exact(*serve(name, [prompt], max_num_tokens=8))


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_hugging_faces(name):
    """All at once: prompts in chunks beside decoding sequences."""
    assert_exact(*serve(name))


def test_arrivals_do_not_matter():
    """Requests that come in the middle of others."""
    assert_exact(*serve(arrivals=(0, 3, 9, 10, 20, 45)))


@pytest.mark.parametrize("preempt_by", ["recompute", "swap"])
def test_preempted_requests_go_on_exactly(preempt_by):
    """A pool that holds a third of them."""
    engine, *rest = serve(num_blocks=32, preempt_by=preempt_by, num_host_blocks=64)

    assert engine.scheduler.num_preemptions > 3
    assert_exact(engine, *rest)


def test_a_full_host_memory_makes_a_swap_a_recompute():
    """Two host blocks hold nobody; requests go on exactly all the same."""
    engine, *rest = serve(num_blocks=32, preempt_by="swap", num_host_blocks=2)

    assert engine.scheduler.num_preemptions > 3
    assert_exact(engine, *rest)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 32])
def test_block_sizes_do_not_matter(block_size):
    """From one token a block to more than a prompt has; preemption included."""
    assert_exact(*serve(block_size=block_size, num_blocks=max(160 // block_size, 12), arrivals=(0, 3, 9, 10, 20, 45)))


def test_prefixes_that_are_found_are_not_computed_again():
    """A prompt that was served before, whole and with another end; and two that share their beginning at the same time."""
    (first,) = prompts(1, seed=3, longest=40)
    engine, *rest = serve(wanted=[first, first, [*first[:17], 7, 8, 9], first[:16]], arrivals=(0, 60, 60, 75))

    assert engine.scheduler.num_cached_tokens == len(first) // 4 * 4 + 16 + 15  # of a whole prompt, the last is computed
    assert_exact(engine, *rest)


def test_answers_of_one_prompt_share_it_and_part():
    """Greedy answers, forked from one prompt, are each Hugging Face's."""
    engine = Watched(model())
    wanted = greedy(tuple(prompts(1, seed=5)[0]))
    engine.submit(wanted.prompt, Sampling(max_tokens=NEW, n=3, ignore_eos=True), "r")
    most, tokens = 0, {}
    while not engine.is_idle:
        for event in engine.step():
            tokens.setdefault(event.index, []).append(event.token)
        most = max(most, engine.manager.num_live_blocks)

    end = min(wanted.ties, default=NEW)
    assert [tokens[index][:end] for index in range(3)] == [wanted.tokens[:end]] * 3
    assert most < 3 * -(-(len(wanted.prompt) + NEW) // 4)


def on_cpu(row):
    impl = row.impl
    ours = impl.op == "attention" and not impl.name.startswith("peer.")
    return ours and row.layout.paged and "cpu" in impl.devices and impl.why_missing("cpu") is None


ROWS = [str(row) for row in default_registry().entries() if on_cpu(row)]
SLOW = {"triton": 1, "numpy": 2}  # an interpreter, and float64


@pytest.mark.parametrize("row", ROWS)
def test_every_entry_serves(row):
    """Every implementation of attention that runs here, in each of its layouts."""
    count = next((few for word, few in SLOW.items() if word in row), 4)
    if "triton" in row:
        answers = [prompts(1)[0][:6]]
        engine = Watched(model(), impl=row)
        engine.submit(answers[0], Sampling(max_tokens=3, ignore_eos=True), "r0")
        tokens = engine.finish()
        assert tokens["r0", 0] == greedy(tuple(answers[0])).tokens[:3]
        return
    assert_exact(*serve(wanted=prompts(count, longest=20), impl=row, max_num_tokens=12))


def test_a_decode_kernel_shares_a_step_with_one_for_prompts():
    """Rows of one token go to the entry that takes no more, the rest of a mixed step to another one."""
    impls = list(default_registry())
    decode = next(impl for impl in impls if impl.name == "torch.blocked")
    only_one = dataclasses.replace(decode, name="torch.decode_only", limits=Limits(max_q_len=1))
    registry = Registry([*impls, only_one])
    engine, *rest = serve(impl="torch.decode_only[NHD]", registry=registry)

    assert str(engine.kernels.prefill) == "torch.gather[NHD]"
    assert_exact(engine, *rest)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_padding_are_nobodys(monkeypatch, name):
    """They see no key, and what an entry leaves in them, NaN too, reaches no other row."""
    fill, launch, used, seen = StepBuffers.fill, StepAttention.launch, [0], []

    def filled(self, batch, num_rows):
        fill(self, batch, num_rows)
        used[0] = batch.num_tokens
        seen.extend(self.host.arrays["seq_lens"][len(batch.rows) : num_rows].tolist())

    def launched(self, *args):
        out = launch(self, *args)
        out[used[0] :] = torch.nan
        return out

    monkeypatch.setattr(StepBuffers, "fill", filled)
    monkeypatch.setattr(StepAttention, "launch", launched)
    engine, *rest = serve(name, arrivals=(0, 3, 9, 10, 20, 45))

    assert set(seen) == {0}
    assert_exact(engine, *rest)


# The tests above can fail


def no_attention(monkeypatch):
    launch = StepAttention.launch
    monkeypatch.setattr(StepAttention, "launch", lambda *args: torch.zeros_like(launch(*args)))


def no_first_block(monkeypatch):
    fill = StepBuffers.fill

    def filled(self, batch, num_rows):
        fill(self, batch, num_rows)
        for row in range(len(batch.rows)):
            tables, seq_lens = self.host.arrays["block_tables"], self.host.arrays["seq_lens"]
            if seq_lens[row] > 4 + batch.q_lens[row]:
                tables[row, :-1] = tables[row, 1:].copy()
                seq_lens[row] -= 4

    monkeypatch.setattr(StepBuffers, "fill", filled)


def positions_off_by_one(monkeypatch):
    """Of decoded tokens: what is shifted by as much everywhere is the same to a rotary embedding."""
    fill = StepBuffers.fill

    def filled(self, batch, num_rows):
        fill(self, batch, num_rows)
        if batch.is_decode:
            self.host.arrays["positions"][: len(batch.rows)] += 1

    monkeypatch.setattr(StepBuffers, "fill", filled)


@pytest.mark.parametrize("sabotage", [no_attention, no_first_block, positions_off_by_one])
def test_what_is_wrong_shows(monkeypatch, sabotage):
    """Attention that is zero, a first block that is dropped, positions that are off: nearly every request is wrong."""
    sabotage(monkeypatch)
    engine, tokens, answers = serve()
    wrong, _ = faults(engine, tokens, answers)

    assert len(wrong) >= len(answers) - 1

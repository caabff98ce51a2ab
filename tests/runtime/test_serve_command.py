"""`pagedbench serve` and `pagedbench align`, from their words to their records; and what their numbers are made of."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch

from harness.names import UsageError
from harness.store import load as load_records
from runtime import align, measuring
from runtime import serve as door
from runtime.attention import StepAttention
from runtime.clock import StepClock, Timed
from runtime.engine import Engine
from runtime.floor import Costs, Rates, floor_s
from runtime.loads import ServeCase, prompts_of
from runtime.requests import Sampling
from runtime.serving import Served, serve
from runtime.traces import Trace
from tests.runtime.served import Watched, model, needs_transformers


def run(command, *words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args(words))


def dry(tmp_path, *words):
    code = run(door, "--dry", "--device", "cpu", "--out", str(tmp_path), *words)
    records, problems = load_records(next(tmp_path.iterdir()))
    assert problems == []
    return code, records


@needs_transformers
def test_a_dry_run_serves_and_records(tmp_path, capsys):
    """Two implementations and one that cannot run here; a row each, and the same case for all."""
    code, records = dry(tmp_path, "--impl", "torch.gather[NHD],torch.blocked[HND]", "--impl", "cuda.per_token[HND]")
    good, blocked, missing = records
    out = capsys.readouterr().out

    assert code == 0
    assert [record.row for record in records] == ["torch.gather[NHD]", "torch.blocked[HND]", "cuda.per_token[HND]"]
    assert len({record.case_digest for record in records}) == 1
    assert (missing.status, "runs on cuda only" in missing.reason) == ("unsupported", True)
    assert blocked.status == "ok"
    serving = good.serving
    assert (serving["num_requests"], serving["num_output_tokens"]) == (6, 48)
    assert len(good.launch_s.samples) == 2
    assert serving["output_tokens_per_s"] == pytest.approx(48 / min(good.launch_s.samples), rel=1)
    assert serving["ttft_s"]["p50"] <= serving["ttft_s"]["p99"] < good.launch_s.median
    assert 0 < good.ceiling_share < 1
    assert serving["decode_over_floor"] > 1
    assert 0 < serving["utilisation"] <= 1
    assert good.params["prefill"] == "torch.gather[NHD]"
    assert "torch.gather[NHD]" in out
    assert "unsupported: " in out


@needs_transformers
def test_a_load_is_sampled_where_it_is_asked_for(tmp_path, monkeypatch):
    """Another case than greedy, its settings in its name; each request draws by a seed of its own."""
    seen, submit = [], Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, prompt, sampling, name: (
        seen.append(sampling), submit(self, prompt, sampling, name)
    ))
    _, (greedy,) = dry(tmp_path / "greedy", "--impl", "torch.gather[NHD]")
    seen.clear()
    code, (sampled,) = dry(
        tmp_path / "sampled", "--impl", "torch.gather[NHD]", "--temperature", "0.8", "--top-k", "50", "--top-p", "0.9"
    )

    assert (code, sampled.status, sampled.serving["num_output_tokens"]) == (0, "ok", 48)
    assert sampled.case == greedy.case + ".t0.8.k50.p0.9"
    assert sampled.case_digest != greedy.case_digest
    assert {(s.temperature, s.top_k, s.top_p, s.ignore_eos) for s in seen} == {(0.8, 50, 0.9, True)}
    assert {s.seed for s in seen} == set(range(6))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--temperature", "1", "--top-k", "1000000"), ".t1.0.k1000000"),
        (("--temperature", "1e20", "--top-p", "0.9999999"), ".t1e20.p0.9999999"),
        (("--seed", str(2**63 - 2)), ""),
    ],
)
def test_a_name_has_every_digit_of_what_is_asked_for(words, wanted):
    """And no sign that names must not have; a seed that greedy requests have no use for may be any."""
    parser = argparse.ArgumentParser()
    door.add_arguments(parser)
    (case,) = door.cases_of(parser.parse_args(
        ["--model", "m", "--requests", "9", "--prompt", "5", "--output", "6", "--concurrency", "7", *words,
         "--dtype", "f32", "--max-num-tokens", "99"]
    ))

    assert case.name == f"serve.m.9x5.6.c7.b16{wanted}"


@pytest.mark.parametrize(
    ("globs", "wanted"),
    [
        ("torch.gather,cuda.per_tok*", ["torch.gather", "cuda.per_token"]),
        ("torch.blocked[*HD]", ["torch.blocked[NHD]", "torch.blocked[KV_NHD]"]),
        ("torch.gather,torch.g*", ["torch.gather"]),
    ],
)
def test_implementations_are_named_by_globs(globs, wanted):
    """Each row once; without a layout the first that takes the model."""
    found = door.entries_of(argparse.Namespace(impl=[globs]))

    assert [name for name in wanted if name not in found] == []
    assert len(found) == len(set(found))
    assert "[" in globs or found == wanted


@needs_transformers
def test_a_sweep_is_a_case_for_each_size(tmp_path):
    """Lengths and block sizes, each a row of its own; what is said is not made smaller by --dry."""
    _, records = dry(tmp_path, "--block-size", "4,8", "--prompt", "5,9", "--num-blocks", "20", "--requests", "3")

    shapes = [(record.shape["prompt"], record.shape["block_size"]) for record in records]
    assert shapes == [("5", 4), ("5", 8), ("9", 4), ("9", 8)]
    assert [record.serving["num_requests"] for record in records] == [3] * 4
    assert len({record.case_digest for record in records}) == 4


@needs_transformers
def test_an_engine_that_fails_is_a_row_that_failed(tmp_path, monkeypatch):
    """With its reason; the exit code is 1, and the next row is served."""
    launch = StepAttention.launch

    def fails(self, *tensors):
        if "blocked" in type(self._parts[0].prepared).__module__:
            raise RuntimeError("a kernel died")
        return launch(self, *tensors)

    monkeypatch.setattr(StepAttention, "launch", fails)
    code, (bad, good) = dry(tmp_path, "--impl", "torch.blocked[HND],torch.gather[HND]")

    assert code == 1
    assert (bad.status, "a kernel died" in bad.reason, good.status) == ("failed", True, "ok")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--prompt", "x"), "must be tokens, 512, or a span"),
        (("--output", "9-3"), "must be tokens, 512, or a span"),
        (("--trace", "nowhere.csv"), "none of sharegpt, azure_chat, azure_code, and no file"),
        (("--block-size", "16,,8"), "--block-size must be whole numbers"),
        (("--concurrency", "0"), "--concurrency must be whole numbers"),
        (("--requests", "0"), "requests must be a whole number of at least 1"),
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("--max-num-tokens", "0"), "max_num_tokens must be a whole number of at least 1"),
        (("--max-num-tokens", "1"), "max_num_tokens must be at least max_num_seqs"),
        (("--memory-share", "2"), "memory_share must be above 0 and at most 1"),
        (("--num-blocks", "0"), "num_blocks must be at least 1"),
        (("--impl", "torch.gathr"), "no implementation matches 'torch.gathr'"),
        (("--prefill", "torch.gather[XYZ]"), "no implementation matches"),
        (("--temperature", "-1"), "temperature must be a number, 0"),
        (("--temperature", "nan"), "temperature must be a number .got nan"),
        (("--temperature", "1", "--top-k", "-1"), "top_k must be a whole number"),
        (("--temperature", "1", "--top-p", "1.5"), "top_p must be above 0 and at most 1"),
        (("--temperature", "1e31"), "temperature must be a number, 0"),
        (("--temperature", "1", "--seed", str(2**63 - 200)), "seed must be 0 to"),
        (("--top-k", "5"), r"top_k and top_p are for a temperature above 0 \(got \(5, 1.0\)\)"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words, rule, tmp_path):
    """Before a model is loaded."""
    with pytest.raises(UsageError, match=rule):
        run(door, "--device", "cpu", "--out", str(tmp_path), *words)


@pytest.mark.parametrize(
    ("line", "rule"),
    [("0,0,3", "prompt and output 1 to"), ("nan,5,3", "arrival must be finite"), ("", "no requests below")],
)
def test_a_trace_that_cannot_be_served_is_refused_before_a_model_is_loaded(line, rule, tmp_path):
    """As wrong usage, not as a row that failed."""
    trace = tmp_path / "bad.csv"
    trace.write_text(f"arrival,prompt,output\n{line}\n")
    with pytest.raises(UsageError, match=rule):
        run(door, "--dry", "--model", "/nowhere", "--trace", str(trace), "--out", str(tmp_path))


@needs_transformers
def test_a_load_longer_than_the_model_is_refused(tmp_path):
    """Before anything is made of its lengths: a prompt of two thousand million tokens is eight gigabytes."""
    trace = tmp_path / "long.csv"
    trace.write_text("arrival,prompt,output\n0,2000000000,3\n")
    with pytest.raises(UsageError, match=r"takes 4096 tokens, prompt and output together \(got 2000000003"):
        run(door, "--dry", "--device", "cpu", "--trace", str(trace), "--out", str(tmp_path))


def test_lengths_come_from_words_traces_and_files(tmp_path):
    """The same for equal seeds; a file's digest is part of the case's."""
    path = tmp_path / "mine.csv"
    path.write_text("arrival,prompt,output\n0,5,2\n1.5,7,3\n")
    fields = {"name": "serve.x", "model": "qwen3-tiny", "requests": 4}
    fixed = ServeCase(**fields, prompt="5", output="2").load()
    one, two = (ServeCase(**fields, prompt="5-90", output="2", seed=3).load() for _ in range(2))
    mine = ServeCase(**fields, trace=str(path), trace_digest="a")
    other = ServeCase(**fields, trace=str(path), trace_digest="b")

    assert (fixed.prompt.tolist(), fixed.output.tolist()) == ([5] * 4, [2] * 4)
    assert one.prompt.tolist() == two.prompt.tolist()
    assert (one.prompt.min() >= 5, one.prompt.max() <= 90, len(set(one.prompt.tolist())) > 1) == (True, True, True)
    assert mine.load().arrival.tolist() == [0, 1.5]
    assert mine.digest != other.digest
    assert len(ServeCase(**fields, trace="sharegpt").load()) == 4


def test_prompts_share_nothing():
    """Nor with those of another seed: no first token stands twice."""
    trace = Trace(name="t", prompt=np.full(40, 9), output=np.ones(40, np.int64))
    prompts = prompts_of(trace, 512, 0)

    assert len({prompt[0] for prompt in prompts}) == 40
    assert not np.array_equal(prompts[0], prompts_of(trace, 512, 1)[0])


def test_times_are_those_of_tokens():
    """TTFT, TPOT and ITL of two requests, by hand."""
    served = Served(submitted={"a": 0.0, "b": 1.0}, tokens_at={"a": [0.5, 0.7, 1.1], "b": [3.0]})

    assert served.first_token_s().tolist() == [0.5, 2.0]
    assert served.per_token_s().tolist() == pytest.approx([0.3])
    assert served.between_tokens_s().tolist() == pytest.approx([0.2, 0.4])
    assert (served.elapsed_s, served.num_tokens) == (3.0, 4)
    assert measuring.percentiles(np.zeros(0)) is None


@needs_transformers
def test_requests_come_when_they_arrive():
    """A request is not served before its time, and its TTFT counts from then on."""
    trace = Trace(name="t", prompt=np.array([5, 5]), output=np.array([3, 3]), arrival=np.array([0.0, 0.3]))

    def greedy(index, max_tokens):
        return Sampling(max_tokens=max_tokens, ignore_eos=True)

    served = serve(Watched(model()), trace, prompts_of(trace, 512, 0), greedy)

    assert served.tokens_at["load-0"][-1] < 0.3 < served.tokens_at["load-1"][0]
    assert (served.first_token_s() < 0.3).all()


def timed(is_decode, num_rows, num_tokens, kv_tokens, begin, end, keys=0):
    num_ones = num_rows if is_decode else 0
    return Timed(is_decode=is_decode, num_rows=num_rows, num_ones=num_ones, num_tokens=num_tokens, kv_tokens=kv_tokens,
                 keys=keys, begin=begin, end=end)  # fmt: skip


def test_the_floor_is_work_over_rate():
    """A step of prompts computes, a decode step reads weights and cache once; by hand."""
    costs = Costs(token_flops=10.0, key_flops=2.0, token_bytes=4, dense_bytes=100, expert_bytes=80, expert_share=0.5)
    rates = Rates(flops=5.0, bytes=20.0)
    prompts, decode = timed(False, 2, 30, 0, 0, 0, keys=40), timed(True, 2, 2, 25, 0, 0)

    assert costs.step_s(prompts, rates) == pytest.approx((30 * 10 + 40 * 2) / 5)
    assert costs.step_s(decode, rates) == pytest.approx((25 * 4 + 100 + 80 * 0.75) / 20)
    assert floor_s([prompts, decode], costs, rates) == pytest.approx(76 + 13)


@needs_transformers
def test_costs_are_those_of_the_model():
    """Products of all weights but the embedding, which is looked up; experts by the share that a token reads."""
    dense, moe = model(), model("qwen3-moe-tiny")
    parameters = dense.num_parameters - 512 * 64
    costs, mixed = Costs.of(dense), Costs.of(moe)

    assert costs.dense_bytes == 4 * parameters
    assert costs.token_flops == 2 * (parameters - 512 * 64)
    assert costs.token_bytes == 2 * 3 * 2 * 16 * 4
    assert (mixed.expert_share, mixed.expert_bytes) == (0.25, 4 * 3 * 8 * 3 * 64 * 32)


def test_gaps_are_between_decode_steps_of_a_size():
    """End to end, less the model itself; steps after a prompt's, or of another size, are left out."""
    clock = StepClock("cpu")
    clock.steps = [timed(False, 2, 9, 0, 0.0, 1.0), timed(True, 2, 2, 9, 1.5, 2.0), timed(True, 2, 2, 9, 2.1, 3.0),
                   timed(True, 1, 1, 9, 3.2, 4.0)]  # fmt: skip
    steps, whole, gaps = clock.decode_steps()

    assert steps == [clock.steps[2]]
    assert (whole.tolist(), gaps.tolist()) == ([1.0], pytest.approx([0.1]))


@needs_transformers
def test_a_floor_is_told_of_the_fullest_steps_and_of_all():
    """What makes steps slow as soon as the first sequence has ended shows in the latter alone."""
    clock, rates, token_bytes = StepClock("cpu"), Rates(flops=1.0, bytes=1.0), Costs.of(model()).token_bytes
    floor = Costs.of(model()).dense_bytes + 10 * token_bytes
    for num_rows, end in ((2, 0), (2, 1), (2, 2), (1, 3), (1, 6)):
        clock.steps.append(timed(True, num_rows, num_rows, 10, end * floor, end * floor))
    found = measuring.steps_of(clock, model(), rates)

    assert (found["decode_rows"], found["decode_over_floor"]) == (2, pytest.approx(1))
    assert found["all_decode_over_floor"] == pytest.approx((1 + 1 + 3) / 3)


# align


@needs_transformers
@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-moe-tiny"])
def test_align_tells_every_layer(name, capsys):
    """Two lines a layer, errors of rounding, and the exit code is good."""
    code = run(align, name, "--device", "cpu", "--tokens", "50", "--chunk", "17")
    out = capsys.readouterr().out

    assert code == 0
    assert all(f"| {what} {layer} " in out for what in ("attention", "layer") for layer in range(3))


@needs_transformers
def test_align_sees_wrong_attention(monkeypatch, capsys):
    """Attention that is a fraction of what it should be: exit code 1."""
    launch = StepAttention.launch
    monkeypatch.setattr(StepAttention, "launch", lambda *args: torch.mul(launch(*args), 0.99))

    assert run(align, "qwen3-tiny", "--device", "cpu", "--tokens", "20") == 1


@needs_transformers
def test_align_sees_what_no_later_token_reads(monkeypatch, capsys):
    """The last layer's output of a token in the middle of a prompt: exit code 1."""
    launch, calls = StepAttention.launch, []

    def one_wrong(self, query, *tensors):
        calls.append(len(query))
        out = launch(self, query, *tensors)
        if len(query) == 20 and len(calls) % 3 == 0:  # of three layers
            out[5] *= 0.9
        return out

    monkeypatch.setattr(StepAttention, "launch", one_wrong)

    assert run(align, "qwen3-tiny", "--device", "cpu", "--tokens", "20") == 1
    assert 20 in calls


@needs_transformers
def test_align_takes_no_nan_for_agreement(monkeypatch, capsys):
    """In steps of one token alone: the other way through the engine is right."""
    launch = StepAttention.launch

    def decodes_nothing(self, query, *tensors):
        return launch(self, query, *tensors) * (torch.nan if len(query) == 1 else 1)

    monkeypatch.setattr(StepAttention, "launch", decodes_nothing)

    assert run(align, "qwen3-tiny", "--device", "cpu", "--tokens", "20") == 1


@needs_transformers
@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--tokens", "0"), "--tokens must be at least 1"),
        (("--block-size", "0"), "--block-size must be at least 1"),
        (("--tokens", "5000"), "must be at most 4096 together"),
        (("--impl", "cuda.per_token"), "runs on cuda only"),
        (("--attention", "nonsense"), "--attention nonsense: ValueError: .*nonsense"),
        (("--attention", "paged|sdpa"), "without a paged cache"),
        (("--attention", "pagedbench"), "without a paged cache"),
    ],
)
def test_align_refuses_what_cannot_be_meant(words, rule):
    """In a sentence."""
    with pytest.raises(UsageError, match=rule):
        run(align, "qwen3-tiny", "--device", "cpu", *words)

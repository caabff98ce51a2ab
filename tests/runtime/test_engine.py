"""The engine's doors: sampling, beams, ends, streams, aborts, what is refused, and models that it cannot serve."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch

from harness.names import UsageError
from harness.registry import Unsupported
from runtime import graphs
from runtime.configs import CONFIGS
from runtime.engine import Engine
from runtime.model import UnsupportedModel, load
from runtime.requests import InvalidRequest, Sampling
from runtime.settings import Settings
from runtime.steps import bucket_sizes
from tests.runtime.served import NEW, Watched, greedy, model, needs_transformers, prompts, reference

pytestmark = needs_transformers
DRAWN = {"max_tokens": 24, "temperature": 0.9, "top_k": 60, "top_p": 0.95, "ignore_eos": True}


def tokens_of(engine, samplings, texts):
    answers = engine.generate(texts, samplings)
    assert engine.manager.num_live_blocks == 0
    return [[answer.tokens for answer in each] for each in answers]


# Sampling


def test_a_seed_gives_the_same_tokens_alone_batched_and_preempted():
    """Sampled answers, three to a prompt, among greedy ones; in a pool that thrashes as well."""
    texts = prompts(4)
    samplings = [Sampling(seed=seed, n=1 + seed % 2 * 2, **DRAWN) for seed in range(4)]
    alone = [tokens_of(Watched(model()), [one], [text])[0] for one, text in zip(samplings, texts, strict=True)]
    greedy_ones = [Sampling(max_tokens=24)] * 2
    batched = tokens_of(Watched(model(), num_blocks=200), [*samplings, *greedy_ones], [*texts, *prompts(2, seed=9)])
    tight = Watched(model(), num_blocks=52)
    preempted = tokens_of(tight, samplings, texts)

    assert batched[:4] == alone
    assert preempted == alone
    assert tight.scheduler.num_preemptions > 0
    assert len({tokens for each in alone for tokens in each}) == 8


def test_another_seed_gives_other_tokens():
    """Or a seed would be no seed."""
    (text,) = prompts(1)
    one, two = (tokens_of(Watched(model()), [Sampling(seed=seed, **DRAWN)], [text]) for seed in (0, 1))
    assert one != two


@pytest.mark.parametrize(
    "narrow", [{"temperature": 1e-4}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-50}]
)
def test_what_leaves_one_token_is_greedy(narrow):
    """A tiny temperature, one token, or no share to speak of, less than float32 holds."""
    (text,) = prompts(1)
    found = tokens_of(Watched(model()), [Sampling(max_tokens=24, ignore_eos=True, **narrow)], [text])

    assert list(found[0][0]) == greedy(tuple(text)).tokens[:24]


# Beams


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-moe-tiny"])
@pytest.mark.parametrize("num_blocks", [200, 60])
def test_beams_are_hugging_faces(name, num_blocks):
    """Two searches of four beams beside greedy requests: the same tokens in the same order, and their scores."""
    texts = prompts(5)
    engine = Watched(model(name), num_blocks=num_blocks, max_num_seqs=12)
    search, single = Sampling(max_tokens=16, num_beams=4), Sampling(max_tokens=NEW, ignore_eos=True)
    answers = engine.generate(texts, [search, single, search, single, single])

    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 60)
    for text, found in ((texts[0], answers[0]), (texts[2], answers[2])):
        ids = torch.tensor([text])
        wanted = reference(name).generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=4, num_return_sequences=4, max_new_tokens=16, do_sample=False,
            length_penalty=1.0, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert [list(answer.tokens) for answer in found] == wanted.sequences[:, len(text) :].tolist()
        assert [answer.score for answer in found] == pytest.approx(wanted.sequences_scores.tolist(), abs=1e-4)
    assert list(answers[1][0].tokens) == greedy(tuple(texts[1]), name=name).tokens


# Ends


def test_an_answer_ends_with_what_ends_it():
    """The model's end of sequence, a stop token, the number of tokens; each the last token, or none."""
    (text,) = prompts(1)
    wanted = greedy(tuple(text)).tokens
    fifth = wanted[4]
    assert fifth not in wanted[:4]
    ending = model()
    ending = type(ending)(**{**vars(ending), "eos": frozenset({fifth})})
    (eos,), (stop,), (length,), (ignored,) = (
        Watched(served).generate([text], sampling)[0]
        for served, sampling in (
            (ending, Sampling(max_tokens=9)),
            (model(), Sampling(max_tokens=9, stop_token_ids=(fifth,))),
            (ending, Sampling(max_tokens=3)),
            (ending, Sampling(max_tokens=9, ignore_eos=True)),
        )
    )

    assert (list(eos.tokens), eos.finish) == (wanted[:5], "eos")
    assert (list(stop.tokens), stop.finish) == (wanted[:5], "stop")
    assert (list(length.tokens), length.finish) == (wanted[:3], "length")
    assert (list(ignored.tokens), ignored.finish) == (wanted[:9], "length")


def test_a_stream_yields_tokens_as_they_come():
    """One event a token; whoever stops listening aborts the request, and others go on."""
    first, second = prompts(2)
    engine = Watched(model())
    engine.submit(second, Sampling(max_tokens=6, ignore_eos=True), "other")
    stream = engine.stream(first, Sampling(max_tokens=8, ignore_eos=True), "r")
    head = [next(stream) for _ in range(3)]
    steps = engine.num_steps
    stream.close()
    rest = engine.finish()

    assert [event.token for event in head] == greedy(tuple(first)).tokens[:3]
    assert steps < 8
    assert set(rest) == {("other", 0)}
    assert list(engine.scheduler.groups) == []


def test_streams_side_by_side_lose_no_token():
    """Each is read in turn, and a generate() goes between: the steps that one asks for bring tokens of all."""
    texts = prompts(3)
    engine = Watched(model())
    streams = [engine.stream(text, Sampling(max_tokens=8, ignore_eos=True)) for text in texts[:2]]
    heard = [[next(stream).token for stream in streams] for _ in range(3)]
    engine.generate(texts[2:], Sampling(max_tokens=NEW, ignore_eos=True))
    rest = [[event.token for event in stream] for stream in streams]

    for index, text in enumerate(texts[:2]):
        assert [*(each[index] for each in heard), *rest[index]] == greedy(tuple(text)).tokens[:8]


def test_a_stream_tells_that_others_aborted_it():
    """And its request's id, used again, is another request's."""
    first, second = prompts(2)
    engine = Watched(model())
    stream = engine.stream(first, Sampling(max_tokens=8, ignore_eos=True), "r")
    next(stream)
    engine.abort("r")
    engine.submit(second, Sampling(max_tokens=4, ignore_eos=True), "r")
    engine.finish()

    assert [(event.token, event.finish) for event in stream] == [(None, "abort")]
    assert engine.is_idle


@pytest.mark.parametrize("sampling", [{}, {"n": 3, "temperature": 1.0}, {"num_beams": 3}])
def test_an_abort_disturbs_nobody(sampling):
    """In the middle of its tokens; its blocks are free at once, and the other request's answer is right."""
    first, second = prompts(2)
    engine = Watched(model())
    engine.submit(first, Sampling(max_tokens=30, **sampling), "gone")
    engine.submit(second, Sampling(max_tokens=NEW, ignore_eos=True), "stays")
    for _ in range(6):
        engine.step()
    live = engine.manager.num_live_blocks
    ends = engine.abort("gone")

    assert [event.finish for event in ends] == ["abort"] * len(ends)
    assert engine.manager.num_live_blocks < live
    assert engine.finish()["stays", 0][-20:] == greedy(tuple(second)).tokens[-20:]


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("what", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "where", ["scheduler._append", "scheduler._add_samples", "_launch", "manager.commit_tokens", "_land", "scheduler.collect"]
)
def test_a_step_that_breaks_off_ends_all_requests_and_loses_nothing(monkeypatch, where, what, at):
    """Whatever was under way, at first or later: no block is held, no place lost, who waits is told, and the engine goes on."""
    first, second = prompts(2)
    engine = Watched(model())
    engine.submit(second, Sampling(max_tokens=NEW), "other")
    place, _, name = where.rpartition(".")
    owner, calls = getattr(engine, place) if place else engine, itertools.count()
    does = getattr(owner, name)

    def breaks_off(*arguments):
        if next(calls) == at:
            raise what("a kernel died")
        return does(*arguments)

    listens = engine.stream(first, Sampling(max_tokens=NEW, n=4, temperature=1.0, ignore_eos=True))
    next(listens)
    monkeypatch.setattr(owner, name, breaks_off)
    with pytest.raises(what, match="a kernel died"):
        engine.generate([first], Sampling(max_tokens=NEW, n=2, temperature=1.0, ignore_eos=True))
    engine.manager.check_invariants()

    assert engine.is_idle
    assert engine.manager.num_live_blocks == 0
    assert sorted(engine.scheduler._states) == list(range(8))
    assert [event.finish for event in list(listens)[-4:]] == ["abort"] * 4
    assert tokens_of(engine, Sampling(max_tokens=NEW, ignore_eos=True), [second]) == [[tuple(greedy(tuple(second)).tokens)]]


def test_an_interrupted_generate_ends_its_requests_alone(monkeypatch):
    """Ctrl-C between two steps: others' requests go on."""
    first, second = prompts(2)
    engine = Watched(model())
    engine.submit(second, Sampling(max_tokens=NEW, ignore_eos=True), "other")
    step, steps = engine.step, itertools.count()

    def interrupted():
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([first], Sampling(max_tokens=NEW))
    monkeypatch.undo()

    assert list(engine.scheduler.groups) == ["other"]
    assert engine.finish()["other", 0][-20:] == greedy(tuple(second)).tokens[-20:]


def test_blocks_are_copied_on_write_once_answers_part():
    """An unfinished block of the prompt is shared until somebody writes into it."""
    engine = Watched(model())
    moved = []
    copy = engine._mover.copy
    engine._mover.copy = lambda pairs: (moved.append(len(pairs)), copy(pairs))
    engine.generate([prompts(1)[0][:6]], Sampling(max_tokens=5, n=3, temperature=1.0, ignore_eos=True))

    assert sum(moved) == 2


# What is refused


def test_a_model_serves_one_engine_at_a_time():
    """The caches are the later one's: the earlier one says so, and does not write into them."""
    tiny = model()
    earlier = Watched(tiny)
    earlier.submit([1, 2], Sampling(max_tokens=2))
    later = Watched(tiny)
    with pytest.raises(UsageError, match=r"Engine\.step: the model serves another engine"):
        earlier.step()
    with pytest.raises(UsageError, match=r"Engine\.submit: the model serves another engine"):
        earlier.submit([1, 2])
    earlier.close()

    assert len(later.generate([[1, 2]], Sampling(max_tokens=2, ignore_eos=True))[0][0].tokens) == 2


def test_more_beams_than_tokens_are_refused_and_others_go_on():
    """The first token of each is chosen among all tokens, and there are 512."""
    (text,) = prompts(1)
    engine = Watched(model(), num_blocks=6000, max_num_seqs=520, max_num_tokens=520)
    engine.submit(text, Sampling(max_tokens=NEW, ignore_eos=True), "r")
    with pytest.raises(InvalidRequest, match="num_beams must be at most 512"):
        engine.generate([text], Sampling(max_tokens=1, num_beams=513))

    assert engine.finish() == {("r", 0): greedy(tuple(text)).tokens}


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [
        ([], "empty"), ([512], "token ids are below 512"), ([1] * 159, "at most 160 together"), ("text", "integers"),
        (7, "not iterable"),
    ],
)
def test_a_bad_prompt_is_refused_and_others_go_on(prompt, rule):
    """generate() takes none of its prompts; what was submitted before is served."""
    (text,) = prompts(1)
    engine = Watched(model())
    engine.submit(text, Sampling(max_tokens=NEW, ignore_eos=True), "r")
    with pytest.raises(InvalidRequest, match=rule):
        engine.generate([text, prompt], Sampling(max_tokens=4))

    assert engine.finish() == {("r", 0): greedy(tuple(text)).tokens}


def test_an_id_that_the_engine_gives_is_nobodys():
    """Also where somebody has called a request as the engine would."""
    engine = Watched(model())
    engine.submit([1], Sampling(max_tokens=2), "request-0")

    assert engine.submit([1], Sampling(max_tokens=2)) == "request-1"
    with pytest.raises(InvalidRequest, match="one for each of 2 prompts"):
        engine.generate([[1], [2]], [Sampling(max_tokens=2)])


def test_a_closed_engine_says_so():
    """Closing it again is no error."""
    engine = Watched(model())
    engine.close()
    engine.close()

    for door in (engine.step, lambda: engine.submit([1]), lambda: engine.generate([[1]], Sampling(max_tokens=1))):
        with pytest.raises(UsageError, match="the engine is closed"):
            door()


def test_changes_are_made_to_given_settings():
    """Not forgotten; and what is no Sampling is refused."""
    engine = Engine(model(), Settings(num_blocks=8, max_num_seqs=2, max_model_len=32, max_num_tokens=16), num_blocks=5)

    assert (engine.manager.num_physical_blocks, engine.settings.max_num_seqs) == (5, 2)
    with pytest.raises(InvalidRequest, match=r"sampling must be a Sampling \(got a dict"):
        engine.submit([1], {"max_tokens": 2})


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"temperature": 1e-320}, "temperature must be a number, 0"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": 1, "top_p": float("nan")}, "top_p must be"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_a_sampling_that_cannot_be_meant_is_refused(changes, rule):
    """Under the name of the setting at fault."""
    with pytest.raises(InvalidRequest, match=rule):
        Sampling(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "rule"),
    [
        ({"block_size": 0}, UsageError, "block_size must be at least 1"),
        ({"max_num_tokens": 4}, UsageError, "max_num_tokens must be at least max_num_seqs"),
        ({"preempt_by": "wish"}, UsageError, "preempt_by must be"),
        ({"memory_share": "x"}, UsageError, r"memory_share must be above 0 and at most 1 \(got 'x'\)"),
        ({"graphs": "no"}, UsageError, r"graphs must be True or False \(got 'no'\)"),
        ({"impl": 5}, UsageError, r"impl must be a row's name, or None \(got 5\)"),
        ({"prefill": ""}, UsageError, "prefill must be a row's name, or None"),
        ({"num_blocks": 1 << 40}, UsageError, "num_blocks must be few enough for cpu, where .* GB are free for blocks of 3072"),
        ({"num_host_blocks": 1 << 40}, UsageError, "num_host_blocks must be few enough for cpu"),
        ({"impl": "torch.gathr"}, UsageError, "no implementation matches"),
        ({"impl": "cuda.per_token"}, Unsupported, "runs on cuda only"),
        ({"impl": "torch.gather[NHD]", "prefill": "torch.gather[HND]"}, Unsupported, "the cache is in NHD"),
        ({"impl": "torch.cache_write"}, Unsupported, "it implements cache_write"),
        ({"impl": "torch.contiguous"}, Unsupported, "not paged"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, error, rule):
    """By name and rule, before any cache is taken."""
    with pytest.raises(error, match=rule):
        Watched(model(), **changes)


def test_a_pool_of_no_stated_size_holds_all_sequences_at_once():
    """As many as may run, to their last token, and the watermark besides: nobody waits, nobody is preempted."""
    engine = Watched(model(), num_blocks=None, max_num_tokens=400, max_model_len=52)
    for text in range(8):
        engine.submit([text] * 50, Sampling(max_tokens=2, ignore_eos=True))
    engine.step()

    assert len(engine.scheduler.running) == 8
    assert 8 * 13 < engine.manager.num_physical_blocks <= 8 * 13 * 1.01 + 2
    engine.finish()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("qwen3-tiny.", "no folder with a config.json.*did you mean qwen3-tiny"),
        ("{folder}", "has no .safetensors"),
        ("{folder}/llama.json", "model_type must be one of qwen3, qwen3_moe .got 'llama'"),
        ("{folder}/sliding.json", "sliding windows are not supported"),
        ("{folder}/dynamic.json", "rope_type 'dynamic'"),
        ("{folder}/broken.json", "not JSON"),
        ("{folder}/heads.json", r"num_attention_heads must be a multiple of num_key_value_heads \(got 3, 2\)"),
        ("{folder}/negative.json", "transformers cannot make it: .*negative dimension"),
        ("{folder}/damaged", "transformers cannot make it: .*header"),
    ],
)
def test_a_model_that_cannot_be_served_says_so_at_load(tmp_path, name, rule):
    """Which model, which rule, what was got."""
    tiny = dict(CONFIGS["qwen3-tiny"])
    files = {
        "config": tiny,
        "llama": {**tiny, "model_type": "llama"},
        "heads": {**tiny, "num_attention_heads": 3},
        "negative": {**tiny, "hidden_size": -5},
        "sliding": {**tiny, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        "dynamic": {**tiny, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    }
    for file, fields in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(fields))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text(json.dumps(tiny))
    (tmp_path / "damaged" / "model.safetensors").write_text("no header is as large as this text says")

    with pytest.raises(UnsupportedModel, match=rule):
        load(name.format(folder=tmp_path), dtype="f32")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"device": "cuda:99"}, "--device cuda:99: torch .* sees . CUDA devices"),
        ({"device": "tpu"}, r"--device must be cpu, cuda or cuda:INDEX \(got 'tpu'\)"),
        ({"device": None}, r"--device must be cpu, cuda or cuda:INDEX \(got None\)"),
        ({"dtype": "int8"}, r"--dtype must be one of f32, f16, bf16 \(got 'int8'\)"),
        ({"dtype": torch.bfloat16}, r"--dtype must be one of f32, f16, bf16 \(got torch.bfloat16\)"),
    ],
    ids=str,
)
def test_a_device_or_type_that_is_not_there_is_refused(options, rule):
    """Before a weight is made."""
    with pytest.raises(UsageError, match=rule):
        load("qwen3-tiny", **options)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    """transformers would make them at random, and serve noise."""
    weights = reference().state_dict()
    for layer in (0, 1):
        del weights[f"model.layers.{layer}.self_attn.q_proj.weight"]
    reference().save_pretrained(tmp_path, state_dict=weights)

    with pytest.raises(UnsupportedModel, match=r"lack model.layers.0.self_attn.q_proj.weight and 1 more"):
        load(str(tmp_path), dtype="f32")


def test_a_checkpoint_is_loaded_from_its_folder(tmp_path):
    """Saved by transformers, served by us: the same tokens."""
    reference().save_pretrained(tmp_path)
    (text,) = prompts(1)
    engine = Watched(load(str(tmp_path), dtype="f32"))

    (answers,) = engine.generate([text], Sampling(max_tokens=10, ignore_eos=True))
    assert list(answers[0].tokens) == greedy(tuple(text)).tokens[:10]


def test_equal_seeds_give_equal_random_weights():
    """And leave torch's own generator where it was."""
    before = torch.get_rng_state()
    one, two, other = (load("qwen3-tiny", dtype="f32", seed=seed).module.lm_head.weight for seed in (1, 1, 2))

    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("most", [1, 7, 64, 100, 256, 1000])
def test_buckets_hold_every_batch_with_little_padding(most):
    """The largest is the largest batch; beyond 16 rows no bucket is twice its predecessor."""
    sizes = bucket_sizes(most)

    assert sizes[-1] == most
    assert all(after <= max(before * 1.51, before + 64) or before < 16 for before, after in itertools.pairwise(sizes))


# Graphs


class Replayed:
    """In the place of a CUDA graph: launches again, into the tensors of the capture."""

    def __init__(self, run):
        self._run, self.result, self.count = run, run(), 0

    def replay(self):
        self.count += 1
        again = self._run()
        self.result.logits.copy_(again.logits)
        self.result.best.copy_(again.best)


def test_graphs_of_buckets_are_captured_once_and_replayed(monkeypatch):
    """Padding is captured, which writes nowhere; what is replayed follows the buffers."""
    made = []

    def capture(run, pool=None):
        made.append(Replayed(run))
        return made[-1], made[-1].result

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(Watched, "_why_no_graphs", lambda self, *caches: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    texts = prompts(5)
    engine = Watched(model())
    engine.warm_up()
    found = tokens_of(engine, Sampling(max_tokens=NEW, ignore_eos=True), texts)

    assert [list(each[0]) for each in found] == [greedy(tuple(text)).tokens for text in texts]
    assert len(made) == len(engine.buckets.sizes)
    assert sum(graph.count for graph in made) > NEW - 10


def test_a_model_runs_eagerly_after_an_engine_that_compiled_it():
    """Its next engine's records say `compile` no, and it is so."""
    tiny = load("qwen3-tiny", dtype="f32")
    Engine(tiny, num_blocks=16, max_model_len=64, compile="layer").close()

    assert all(layer._compiled_call_impl is None for layer in tiny.module.model.layers)


def frozen(run, pool=None):
    """A capture that replays what it saw, and not what the buffers say."""
    result = run()
    kept = result.logits.clone()
    graph = Replayed(lambda: result)
    graph.replay = lambda: result.logits.copy_(kept)
    return graph, result


@pytest.mark.parametrize("max_num_seqs", [1, 8])
@torch.inference_mode()
def test_an_entry_whose_launches_cannot_be_replayed_is_found_out(monkeypatch, max_num_seqs):
    """Its steps are launched one by one, and the engine says why; the trial leaves zeros in the caches."""
    engine = Watched(model(), max_num_seqs=max_num_seqs)
    arguments = (engine.kernels, engine.runner.decode_buffers, *(caches[0] for caches in engine._mover._caches))
    assert "does not say that a replay follows" in graphs.why_no_replay(*arguments)  # nor is it tried
    entry = engine.kernels.decode
    engine.kernels.decode = dataclasses.replace(entry, impl=dataclasses.replace(entry.impl, replays=True))
    monkeypatch.setattr(graphs, "capture", lambda run, pool=None: (Replayed(run), run()))
    assert graphs.why_no_replay(*arguments) is None
    monkeypatch.setattr(graphs, "capture", frozen)
    assert "a replay does not follow lengths that have changed" in graphs.why_no_replay(*arguments)
    monkeypatch.setattr(graphs, "_replay_error", lambda *arguments: float("nan"))
    assert "a replay does not follow lengths that have changed" in graphs.why_no_replay(*arguments)
    monkeypatch.undo()
    monkeypatch.setattr(graphs, "capture", lambda run, pool=None: 1 / 0)
    assert "ZeroDivisionError" in graphs.why_no_replay(*arguments)
    assert not any(cache.any() for caches in engine._mover._caches for cache in caches)

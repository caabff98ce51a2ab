"""The scheduler against a pretended device: every answer is right whatever happens around it, and no block is lost."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.requests import InvalidRequest, Sampling
from tests.runtime.pretended import Pretended, answer, beams_of, next_token

LAYOUTS = {
    "roomy": {"num_blocks": 200},
    "tight": {},
    "swap": {"preempt_by": "swap", "num_host_blocks": 30},
    "little host memory": {"preempt_by": "swap", "num_host_blocks": 4},
    "block of one": {"block_size": 1, "num_blocks": 150},
    "one sequence": {"max_num_seqs": 1},
    "narrow": {"max_num_tokens": 6},
}


def tokens_of(events, name, index=0):
    return [event.token for event in events if (event.request_id, event.index) == (name, index) and event.token is not None]


def finishes(events, name, index=0):
    return [event.finish for event in events if (event.request_id, event.index) == (name, index) and event.finish]


def random_request(world, draw, name):
    """A request of some kind; prompts share beginnings."""
    start = [[1] * 9, [2, 3] * 4, []][draw.integers(3)]
    prompt = [*start, *draw.integers(0, 50, draw.integers(1, 14)).tolist()]
    kind, length = draw.integers(5), int(draw.integers(1, 16))
    width = int(draw.integers(2, 5)) if world.scheduler.max_num_seqs > 4 else 1
    if kind == 0 and width > 1:
        return world.submit(name, prompt, max_tokens=min(length, 8), num_beams=width)
    if kind == 1:
        return world.submit(name, prompt, max_tokens=length, n=width, stop_token_ids=(3, 7))
    return world.submit(name, prompt, max_tokens=length, ignore_eos=bool(kind == 2))


@pytest.mark.parametrize("num_blocks", range(14, 20))
@pytest.mark.parametrize("width", [1, 2])
def test_what_leaves_the_pool_is_kept_though_nobody_runs(num_blocks, width):
    """A step in which the only row is preempted, since a beam search in flight holds the rest, still moves its blocks."""
    world = Pretended(num_blocks=num_blocks, block_size=1, num_host_blocks=64, preempt_by="swap", max_num_seqs=4)
    world.submit("beams", [10], max_tokens=6, num_beams=width)
    request = world.submit("plain", [30], max_tokens=12, ignore_eos=True)
    while not world.is_idle:
        world.step()

    assert tokens_of(world.events, "plain") == answer(request, 0, frozenset())[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_answers_are_right_whatever_happens(layout, seed):
    """Requests of all kinds come at random and some are aborted; the pool is too small for them."""
    draw, eos = np.random.default_rng(seed), frozenset({11, 12})
    world = Pretended(eos=eos, **LAYOUTS[layout])
    requests, aborted = {}, set()
    for number in range(400):
        if len(requests) < 25 and draw.random() < 0.3:
            requests[f"r{number}"] = random_request(world, draw, f"r{number}")
        if world.scheduler.groups and draw.random() < 0.02:
            name = draw.choice(sorted(world.scheduler.groups))
            aborted.add(name)
            world.events += world.scheduler.abort(name)
        world.step()

    assert world.is_idle
    assert world.manager.num_live_blocks == 0
    assert len(world.scheduler._states) == world.scheduler.max_num_seqs
    for name, request in requests.items():
        beams = beams_of(request) if request.sampling.num_beams else None
        for index in range(request.sampling.width):
            found, ends = tokens_of(world.events, name, index), finishes(world.events, name, index)
            wanted, end = (beams[index], "length") if beams else answer(request, index, eos)
            if name in aborted:
                assert found == wanted[: len(found)]
                assert len(ends) == 1
            else:
                assert (found, ends) == (wanted, [end])


def test_the_tight_pool_preempts():
    """What the test above is for happens in it."""
    world = Pretended(num_blocks=16)
    for number in range(4):
        world.submit(number, [number] * 8, max_tokens=40, ignore_eos=True)
    while not world.is_idle:
        world.step()

    assert world.scheduler.num_preemptions > 0
    for number in range(4):
        assert len(tokens_of(world.events, number)) == 40


def test_a_step_decodes_and_takes_prompts_in_chunks():
    """A long prompt uses what the budget leaves beside the sequence that decodes, which misses no step."""
    world = Pretended(max_num_tokens=6, num_blocks=64)
    world.submit("short", [1], max_tokens=12)
    world.step()
    world.submit("long", list(range(2, 22)), max_tokens=2)
    batches = [world.step() for _ in range(5)]

    assert [batch.q_lens.tolist() for batch in batches] == [[1, 5], [1, 5], [1, 5], [1, 5], [1, 1]]


def test_admission_leaves_a_watermark():
    """The last blocks are kept for those that run, unless nobody does."""
    world = Pretended(num_blocks=200, block_size=1, max_num_tokens=200, max_model_len=200)
    world.submit("first", [1] * 100, max_tokens=5)
    world.step()
    world.submit("second", [2] * 97, max_tokens=2)  # with its next token it would leave one block of two
    world.step()
    assert len(world.scheduler.waiting) == 1

    world = Pretended(num_blocks=200, block_size=1, max_num_tokens=200, max_model_len=200)
    world.submit("alone", [2] * 198, max_tokens=2)
    world.step()
    assert not world.scheduler.waiting


def test_an_end_is_seen_one_step_late_and_rolled_back():
    """The step launched behind a stop token feeds it in vain: it is the last token, and no block keeps it."""
    prompt = [5, 6, 7]
    stop = next_token(prompt)
    world = Pretended(block_size=1)
    world.submit("r", prompt, max_tokens=9, stop_token_ids=(stop,))
    world.step()
    batch = world.step()

    assert [(batch.tokens[0], row.sequence_id) for row in batch.rows] == [(-1, 0)]
    assert [(event.token, event.finish) for event in world.events] == [(stop, "stop")]
    assert world.manager.num_live_blocks == 0
    world.step()
    assert len(world.events) == 1


def test_the_last_token_is_never_fed():
    """A length is known beforehand: no step is wasted on it."""
    world = Pretended()
    world.submit("r", [5, 6, 7], max_tokens=1)

    assert world.step() is not None
    assert world.step() is None
    assert finishes(world.events, "r") == ["length"]


@pytest.mark.parametrize(
    ("prompt", "sampling", "rule"),
    [
        ([], {}, "its prompt is empty"),
        ([-1], {}, "token ids are at least 0"),
        ([1.5], {}, "must be integers"),
        ([1] * 60, {"max_tokens": 8}, "prompt and new tokens must be at most 64 together"),
        ([1] * 20, {"max_tokens": 40, "n": 6}, "needs up to 90 blocks, and the pool has 40"),
        ([1], {"n": 7}, "n or num_beams must be at most 6"),
        ([1], {"max_tokens": 0}, "max_tokens must be at least 1"),
        ([1], {"temperature": -1}, "temperature must be a number"),
        ([1], {"temperature": float("nan")}, "temperature must be a number"),
        ([1], {"top_p": 0}, "top_p must be above 0"),
        ([1], {"num_beams": 2, "n": 2}, "num_beams goes without"),
    ],
)
def test_a_bad_request_is_refused_and_others_go_on(prompt, sampling, rule):
    """One clear error; nothing is taken, and who was there is served."""
    world = Pretended()
    good = world.submit("good", [4, 5], max_tokens=3, ignore_eos=True)
    with pytest.raises(InvalidRequest, match=rule):
        world.submit("bad", prompt, **sampling)
    while not world.is_idle:
        world.step()

    assert tokens_of(world.events, "good") == answer(good, 0, frozenset())[0]
    assert {event.request_id for event in world.events} == {"good"}


def test_an_id_is_free_again_when_its_request_has_ended():
    """Twice at once it is refused; so is an abort of what is not there."""
    world = Pretended()
    world.submit("r", [1], max_tokens=2)
    with pytest.raises(InvalidRequest, match="'r' is being served already"):
        world.submit("r", [2])
    with pytest.raises(InvalidRequest, match="'q' is not being served"):
        world.scheduler.abort("q")
    while not world.is_idle:
        world.step()
    world.submit("r", [2], max_tokens=1)


def test_an_abort_in_the_middle_of_a_step_gives_all_blocks_back():
    """With a step in flight, and with a beam search in flight."""
    for sampling in ({"n": 3}, {"num_beams": 3}):
        world = Pretended()
        world.submit("r", [1, 2, 3], max_tokens=9, **sampling)
        world.step()
        events = world.scheduler.abort("r")
        world.step()

        assert [(event.index, event.finish) for event in events] == [(0, "abort"), (1, "abort"), (2, "abort")]
        assert world.events == []
        assert (world.is_idle, world.manager.num_live_blocks) == (True, 0)


def test_a_budget_below_the_number_of_sequences_is_refused():
    """Every sequence that runs must be able to have its token."""
    with pytest.raises(InvalidRequest, match="at least max_num_seqs"):
        Pretended(max_num_tokens=5)


def test_salted_requests_share_with_their_own_kind_only():
    """A tenant does not find another one's prefix."""
    from runtime.requests import Request

    world = Pretended()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        world.scheduler.submit(Request.of(name, [1] * 9, Sampling(max_tokens=1), salt))
        while not world.is_idle:
            world.step()

    assert world.scheduler.num_cached_tokens == 8

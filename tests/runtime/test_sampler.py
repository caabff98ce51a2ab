"""Sampling: filters without a sort, noise that depends on the request alone, the distribution that was asked for."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from runtime.groups import Group, Sequence
from runtime.requests import Request, Sampling
from runtime.sampler import gumbel, gumbel_of, noise_keys, rank, sample, top_k, top_p


def logits(rows=5, columns=301, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 3


def keep_top_k(scores, counts):
    ranks = rank(scores)
    return scores.masked_fill(ranks < top_k(ranks, counts), -math.inf)


def keep_top_p(scores, shares):
    ranks = rank(scores)
    return scores.masked_fill(ranks < top_p(ranks, scores, shares), -math.inf)


def sorted_top_p(scores, shares):
    """By sorting: the fewest tokens that have the share together."""
    chances, order = torch.softmax(scores, -1).sort(descending=True, stable=True)
    before = chances.cumsum(-1) - chances
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, before < shares)
    return scores.masked_fill(~kept, -math.inf)


@pytest.mark.parametrize("count", [1, 2, 17, 300, 301])
def test_top_k_keeps_the_k_largest(count):
    """As topk does, by bisection of the bits; negative scores included."""
    scores = logits()
    wanted = scores.masked_fill(scores < scores.topk(count).values[:, -1:], -math.inf)

    assert torch.equal(keep_top_k(scores, torch.full((5, 1), count)), wanted)


@pytest.mark.parametrize("share", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_fewest_that_have_the_share(share):
    """As a sort and a running sum do."""
    scores = logits()

    assert torch.equal(keep_top_p(scores, torch.full((5, 1), share)), sorted_top_p(scores, share))


def test_top_p_after_top_k_weighs_what_is_left():
    """-inf, which top_k leaves behind, has no probability."""
    scores = keep_top_k(logits(), torch.full((5, 1), 4))

    assert torch.equal(keep_top_p(scores, torch.full((5, 1), 0.6)), sorted_top_p(scores, 0.6))


def test_equal_scores_stand_or_fall_together():
    """Neither filter chooses among ties."""
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0]])

    assert keep_top_k(scores, torch.tensor([[1]])).isfinite().tolist() == [[False, True, True, False]]
    assert keep_top_p(scores, torch.tensor([[0.1]])).isfinite().tolist() == [[False, True, True, False]]


def rows(*settings, prompt=4):
    made = []
    for index, setting in enumerate(settings):
        group = Group(Request.of(index, [1] * prompt, setting), frozenset())
        made.append(Sequence(index, group, [1] * prompt, index))
    return made


def test_a_row_gets_the_same_token_in_any_batch():
    """Each row alone, all together, and in another order."""
    settings = [Sampling(temperature=0.7 + i, seed=i, top_k=10 * i, top_p=1 - i / 10) for i in range(5)]
    sequences, scores = rows(*settings), logits()
    together = sample(scores, sequences)
    alone = torch.cat([sample(scores[i : i + 1], sequences[i : i + 1]) for i in range(5)])
    turned = sample(scores.flip(0), sequences[::-1]).flip(0)

    assert torch.equal(together, alone)
    assert torch.equal(together, turned)


def test_noise_differs_by_seed_answer_and_position():
    """No two of them share a key."""
    keys = noise_keys(*zip(*itertools.product(range(20), repeat=3), strict=True))

    assert len(set(keys.tolist())) == 8000


def test_noise_is_gumbels():
    """Mean and variance, over rows and over columns."""
    keys = noise_keys(range(300), [0] * 300, [0] * 300)
    noise = gumbel(torch.from_numpy(keys)[:, None], 1000).double()

    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert noise.mean(0).std().item() == pytest.approx(math.sqrt(math.pi**2 / 6 / 300), rel=0.1)
    assert noise.isfinite().all()


GOLDEN = 0x9E3779B97F4A7C15


def split_mix(key):
    """SplitMix64, as it was published: the state moves on, and is mixed."""
    key = (key + GOLDEN) % 2**64
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB % 2**64
    return key ^ (key >> 31)


def test_noise_is_made_of_splitmix64():
    """Of the first 40 bits of its numbers from the key on, a column each."""
    keys = noise_keys([3], [1], [4])
    numbers = [split_mix(int(keys[0]) + (column - 1) * GOLDEN) >> 24 for column in range(50)]
    wanted = [-math.log(-math.log1p(-(number + 0.5) / 2**40)) for number in numbers]

    assert gumbel(torch.from_numpy(keys)[:, None], 50)[0].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("seed", "index", "position"), [(0, 0, 0), (3, 1, 4), (2**63 - 1, 7, 40_959)])
def test_a_key_is_splitmix64s_number_of_seed_then_answer_then_position(seed, index, position):
    """In Python's own numbers."""
    wanted = split_mix(split_mix(seed ^ (index * GOLDEN)) ^ (position * GOLDEN))

    assert noise_keys([seed], [index], [position]).view("uint64").tolist() == [wanted]


def test_noise_is_a_number_at_both_ends():
    """Of infinity it would draw what is filtered, of minus infinity what a filter has left alone would not be drawn."""
    found = gumbel_of(torch.tensor([0.5 / 2**40, 1.5 / 2**40, 0.01, 0.5, 1 - 2**-24, 1.0]))

    assert found.tolist() == pytest.approx([28.419, 27.320, 4.6, 0.36651, -2.8113, -2.8113], abs=1e-3)


def key_that_gives(bits):
    """The key of which column 0 has these 64 bits: SplitMix64's finaliser backwards."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        found = bits
        for _ in range(64 // shift):
            found = bits ^ (found >> shift)
        bits = found * pow(factor, -1, 2**64) % 2**64
    return torch.tensor([[bits - 2**64 if bits >= 2**63 else bits]])


@pytest.mark.parametrize(("bits", "wanted"), [(0xABCDEF, 28.419), (1 << 24, 27.320), (2**64 - 1, -2.8113), (1 << 63, 0.36651)])
def test_noise_has_40_bits(bits, wanted):
    """So that tokens of a chance of 1e-9 are drawn as often as they should be; of 24 bits 16.6 would be the largest."""
    assert gumbel(key_that_gives(bits), 1).item() == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
def test_equal_logits_are_drawn_equally_often_at_any_temperature(temperature):
    """Where all scores were large, noise would be rounded away and the first of them drawn."""
    count = 1500
    scores = torch.tensor([[10.0, 20.0, 20.0, 20.0]]).expand(count, -1)
    drawn = sample(scores, rows(*(Sampling(temperature=temperature, seed=seed) for seed in range(count))))
    found = torch.bincount(drawn, minlength=4)

    assert found[0] == 0
    assert (found[1:] - count / 3).abs().max() <= 4 * math.sqrt(count * 2 / 9)


@pytest.mark.parametrize("largest", [math.inf, -math.inf])
def test_infinite_logits_leave_a_token(largest):
    """The one that is infinite, or any of a row in which nothing may be drawn."""
    scores = torch.full((1, 8), -math.inf)
    scores[0, 5] = largest
    (token,) = sample(scores, rows(Sampling(temperature=0.5, top_k=3, top_p=0.5))).tolist()

    assert token == 5 if largest > 0 else 0 <= token < 8


def test_samples_follow_the_chances():
    """4,000 seeds at a temperature of 2, top-k 4: each token as often as it should be, within four standard deviations."""
    scores = torch.tensor([[3.0, 1.0, 0.0, 2.0, -1.0, 0.5]])
    count = 4000
    drawn = sample(scores.expand(count, -1), rows(*(Sampling(temperature=2.0, top_k=4, seed=seed) for seed in range(count))))
    wanted = torch.softmax(keep_top_k(scores / 2, torch.tensor([[4]])), -1)[0]
    found = torch.bincount(drawn, minlength=6) / count

    assert ((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / count).sqrt()).all()

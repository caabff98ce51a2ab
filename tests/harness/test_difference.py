"""Ratios of two times with their uncertainty: against tables, and by simulation with fixed seeds."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from harness.difference import APART, Apart, geometric_mean, holm, paired, unpaired
from harness.student import quantile, tail

#: Two processes that are no further apart than their visits say.
EXACT = Apart(alone=0.0, crossed=0.0, freedom=1)
#: exceeded with probability 0.025 and 0.0005 (any printed table)
TABLE = ((1, 12.706, 636.619), (4, 2.776, 8.610), (8, 2.306, 5.041), (30, 2.042, 3.646), (120, 1.980, 3.373))


@pytest.mark.parametrize(("freedom", "common", "rare"), TABLE, ids=str)
def test_students_t_is_that_of_the_tables(freedom, common, rare):
    """To the digits that tables print, in the tails as well."""
    assert quantile(0.025, freedom) == pytest.approx(common, abs=6e-4)
    assert quantile(0.0005, freedom) == pytest.approx(rare, abs=6e-4)
    assert tail(-common, freedom) == pytest.approx(0.975, abs=1e-4)


def test_students_t_has_its_closed_forms():
    """With 1 and 2 degrees of freedom the tail is an elementary function, also between the whole numbers' tables."""
    for t in (-30.0, -1.0, 0.0, 0.3, 2.0, 500.0):
        assert tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-9)
        assert tail(t, 2) == pytest.approx((1 - t / math.sqrt(2 + t * t)) / 2, rel=1e-9)
    assert (tail(math.inf, 3), tail(-math.inf, 3)) == (0.0, 1.0)
    assert tail(2.0, 4) > tail(2.0, 4.5) > tail(2.0, 5)


def visits(chance, seconds, noise, count):
    return [seconds * math.exp(chance.gauss(0, noise)) for _ in range(count)]


@pytest.mark.parametrize(("old", "new"), [(5, 5), (5, 15), (3, 8), (16, 16)], ids=str)
def test_an_interval_holds_the_true_ratio_as_often_as_it_says(old, new):
    """95 of 100, also where one run is three times as noisy as the other and few visits were kept."""
    chance = random.Random(1)
    held = 0
    for _ in range(1000):
        found = unpaired(visits(chance, 1e-4, 0.002, old), visits(chance, 1.03e-4, 0.006, new))
        low, high = found.interval(0.95)
        held += low < 1.03 < high

    assert 930 <= held <= 985


def test_pairs_cancel_drift_that_two_runs_cannot():
    """Both visits of a pair share the device's clock: 2% of slower drift leaves no trace in their ratio."""
    chance = random.Random(2)
    drift = [1 + 0.02 * i / 15 for i in range(16)]
    pairs = [(a * d, b * d) for a, b, d in zip(*(visits(chance, 1e-4, 0.001, 16) for _ in range(2)), drift, strict=True)]
    apart = unpaired(*([pair[i] for pair in pairs] for i in (0, 1)))

    assert paired([pairs], EXACT).error < apart.error / 4
    low, high = paired([pairs], EXACT).interval(0.95)
    assert low < 1 < high


def test_what_changes_sides_with_the_arm_that_starts_first_cancels():
    """Rounds 3% slower, then 3% faster, each quiet in itself: the mean is as good as that of rounds that agree."""
    there, back, agreed = (a_round(shift, seed) for seed, shift in enumerate((1.03, 1 / 1.03, 1.0)))

    assert paired([there, back], APART["cuda"]).ratio == pytest.approx(1, abs=2e-4)
    assert paired([there, back], APART["cuda"]).error == pytest.approx(paired([agreed, agreed], APART["cuda"]).error, rel=0.05)
    assert paired([there, []], APART["cuda"]).ratio == pytest.approx(1.03, abs=2e-4)


def test_no_round_is_known_better_than_two_processes_agree():
    """Quiet visits do not make up for rounds: one alone is known to 0.4%, one of either start to 0.15%, two of each better."""
    one = a_round(1.0, 4)

    assert paired([one], APART["cuda"]).error == pytest.approx(0.004, rel=0.01)
    assert paired([one, [], one], APART["cuda"]).error == pytest.approx(0.004, rel=0.01)
    assert paired([one, one], APART["cuda"]).error == pytest.approx(0.0015, rel=0.02)
    assert paired([one] * 4, APART["cuda"]).error == pytest.approx(0.0015 / math.sqrt(2), rel=0.02)


def test_rounds_of_one_start_that_disagree_widen_the_interval():
    """Four rounds, two of which the same arm started are 2% apart: no number of visits makes the difference known to less."""
    rounds = [a_round(shift, seed) for seed, shift in enumerate((1.0, 1.0, 1.02, 1.0))]
    found = paired(rounds, APART["cuda"])

    assert found.error == pytest.approx(math.log(1.02) / 4, rel=0.02)
    assert found.freedom < 2.5
    assert found.log_ratio == pytest.approx(math.log(1.02) / 4, abs=1e-4)


def test_without_known_sides_rounds_that_disagree_widen_the_interval():
    """On a CPU: 2.2 and 1.14 times as long, each quiet in itself, as two rounds of equal kernels were; that is no alarm."""
    found = paired([a_round(2.2, 0), a_round(1.14, 1)], APART.get("cpu"))

    assert found.error == pytest.approx(math.log(2.2 / 1.14) / 2, rel=0.02)
    assert found.p_above(1.05) > 0.05
    assert paired([a_round(1.0, 0), a_round(1.0, 1)], None).error < 1e-4


def a_round(shift, seed):
    return [(1e-4, sample) for sample in visits(random.Random(seed), 1e-4 * shift, 1e-4, 8)]


def test_a_visit_in_which_something_else_ran_hides_nothing():
    """One of 16 pairs three times as long: 2% is still seen, and the level does not move."""
    chance = random.Random(6)
    pairs = [(a, b) for a, b in zip(*(visits(chance, s, 0.002, 16) for s in (1e-4, 1.02e-4)), strict=True)]
    spoiled = [*pairs[:15], (pairs[15][0], 3 * pairs[15][1])]

    assert paired([spoiled], EXACT).ratio == pytest.approx(1.02, abs=0.002)
    assert paired([spoiled], EXACT).p_above(1.01) < 1e-4
    assert unpaired(*([pair[i] for pair in spoiled] for i in (0, 1))).p_above(1.01) < 1e-4


def test_visits_that_agree_to_the_digit_leave_some_doubt():
    """Event timers count in steps: five equal readings are no proof of a difference of a hundred-thousandth."""
    low, high = unpaired([1.0] * 5, [1.00001] * 5).interval(0.95)
    assert low < 1 < high
    low, high = paired([[(1.0, 1.00001)] * 8], EXACT).interval(0.95)
    assert low < 1 < high


def test_slower_and_faster_are_mirror_images():
    """Exchanging the runs turns the ratio over and exchanges the probabilities."""
    chance = random.Random(4)
    old, new = visits(chance, 1e-4, 0.002, 6), visits(chance, 1.02e-4, 0.002, 6)
    there, back = unpaired(old, new), unpaired(new, old)

    assert there.ratio * back.ratio == pytest.approx(1)
    assert there.p_above(1.01) == pytest.approx(back.p_below(1 / 1.01))


def test_a_geometric_mean_is_known_better_than_its_rows():
    """Four rows, all 2% slower: the mean says 2%, with half the error."""
    chance = random.Random(5)
    rows = [unpaired(visits(chance, 1e-4, 0.002, 6), visits(chance, 1.02e-4, 0.002, 6)) for _ in range(4)]
    mean = geometric_mean(rows)

    assert mean.ratio == pytest.approx(1.02, abs=0.003)
    assert mean.error < 0.7 * statistics.fmean(row.error for row in rows)
    assert mean.freedom > max(row.freedom for row in rows)


def test_holm_is_holm():
    """The worked example of the textbooks; order is kept, nothing exceeds 1, no test is none."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []

"""The interval over visits: it holds the median as often as it says, and says when it is narrow enough."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from harness.interval import COVERAGE, is_converged, summarise


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(1, 0, 0), (2, 0, 1), (3, 0, 2), (4, 0, 3), (5, 0, 4), (6, 0, 5), (7, 0, 6), (8, 1, 6), (10, 1, 8), (15, 3, 11)],
)
def test_the_interval_lies_between_order_statistics(count, low, high):
    """The ranks of a table of the sign test at 0.90; below five visits, the whole range."""
    shuffled = np.random.default_rng(count).permutation(count).astype(float)
    summary = summarise(shuffled)

    assert (summary.low, summary.high) == (low, high)
    assert summary.median == statistics.median(range(count))
    assert summary.samples == tuple(shuffled)


@pytest.mark.parametrize("count", [5, 6, 7, 8, 11, 15, 40])
@pytest.mark.parametrize("kind", ["normal", "skewed", "two-humped", "heavy-tailed"])
def test_the_interval_holds_the_median_as_often_as_promised(kind, count):
    """Four distributions, 4000 experiments each: never less often than 0.90 but for chance."""
    rng = np.random.default_rng([count, len(kind)])
    draw, median = {
        "normal": (lambda shape: rng.normal(1.0, 0.02, shape), 1.0),
        "skewed": (lambda shape: rng.exponential(1.0, shape), math.log(2)),
        "two-humped": (lambda shape: rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.0, shape), 0.0),
        "heavy-tailed": (lambda shape: rng.standard_cauchy(shape), 0.0),
    }[kind]
    summaries = [summarise(samples) for samples in draw((4000, count)).tolist()]
    held = sum(summary.low <= median <= summary.high for summary in summaries) / len(summaries)

    assert held > COVERAGE - 3 * math.sqrt(COVERAGE * (1 - COVERAGE) / len(summaries))


def test_more_visits_narrow_the_interval():
    """It is no promise kept by always giving the whole range."""
    rng = np.random.default_rng(0)
    widths = [
        np.mean([summary.high - summary.low for summary in map(summarise, rng.normal(1.0, 0.1, (300, count)).tolist())])
        for count in (5, 15, 60)
    ]

    assert widths[0] > 1.5 * widths[1] > 2.5 * widths[2]


@pytest.mark.parametrize(
    ("samples", "converged"),
    [
        ([1.0] * 5, True),
        ([1.0] * 4, False),
        ([0.991, 0.995, 1.0, 1.005, 1.009], True),
        ([0.991, 0.995, 1.0, 1.005, 1.02], False),
        ([0.98, 0.995, 1.0, 1.005, 1.009], False),
        ([0.5, 0.995, 0.997, 1.0, 1.0, 1.003, 1.005, 2.0], True),  # one outlier to each side is no matter of eight
    ],
    ids=str,
)
def test_convergence_wants_five_visits_and_a_narrow_interval(samples, converged):
    """Within one percent of the median to either side."""
    assert is_converged(summarise(samples), 0.01) is converged


def test_nothing_has_no_median():
    """No sample, no summary."""
    with pytest.raises(statistics.StatisticsError):
        summarise([])

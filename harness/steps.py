"""Where a row's time changed for good: steps in a series of runs, found with a stated rate of false alarms."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from harness.difference import RESOLUTION
from harness.student import tail

#: Runs on either side of a step, at least: one odd run is no step, the second one makes it one.
LEAST = 2
#: With which probability a history in which nothing changed shows any step at all.
FALSE_ALARMS = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A change for good: `at` is the index of the first run of the new level; `ratio` new level over old.

    probability    that the largest of all possible steps in a series without one would be as clear as this
    """

    at: int
    ratio: float
    probability: float


def find_steps(seconds: Sequence[float], level: float, least_change: float = 0.0) -> list[Step]:
    """The steps in a series of times, in order, by binary segmentation.

    First one step is looked for: of all places the one whose two sides are furthest apart for their lengths. Where there
    is none, a stretch that differs from all around it is looked for, since an up and a down hide each other. Either is
    believed if the probability of its Student's t, times twice the number of places looked at (Bonferroni), is at most
    `level`; then all parts are searched alike. So a series of independent runs without a step shows one with probability
    `level` at most. Steps of less than `least_change` are left out. A slow drift is no step and shows as some.
    """
    logs = [math.log(value) for value in seconds]
    found = _search(logs, 0, level)
    edges = [0, *(step.at for step in found), len(logs)]
    means = [statistics.fmean(logs[a:b]) for a, b in itertools.pairwise(edges)]
    steps = [
        dataclasses.replace(step, ratio=math.exp(after - before))
        for step, (before, after) in zip(found, itertools.pairwise(means), strict=True)
    ]
    return [step for step in steps if abs(math.log(step.ratio)) >= math.log1p(least_change)]


def _search(logs: Sequence[float], start: int, level: float) -> list[Step]:
    """Steps within one stretch, which begins at index `start` of the whole."""
    if len(logs) < 2 * LEAST:
        return []
    sums = [0.0, *itertools.accumulate(logs)]
    scatter, freedom = _scatter(logs)
    for stretches in (_tails(len(logs)), _middles(len(logs))):
        if not stretches:
            break
        distance, first, end = max((_distance(sums, *stretch), *stretch) for stretch in stretches)
        probability = min(1.0, 2 * 2 * len(stretches) * tail(distance / scatter, freedom))
        if probability <= level:
            edges = [edge for edge in (first, end) if 0 < edge < len(logs)]
            parts = itertools.pairwise([0, *edges, len(logs)])
            made = [Step(at=start + edge, ratio=1.0, probability=probability) for edge in edges]
            inner = [step for a, b in parts for step in _search(logs[a:b], start + a, level)]
            return sorted([*made, *inner], key=lambda step: step.at)
    return []


def _tails(count: int) -> list[tuple[int, int]]:
    """Stretches from one place to the end."""
    return [(first, count) for first in range(LEAST, count - LEAST + 1)]


def _middles(count: int) -> list[tuple[int, int]]:
    """Stretches between two places."""
    ends = range(2 * LEAST, count - LEAST + 1)
    return [(first, end) for end in ends for first in range(LEAST, end - LEAST + 1)]


def _scatter(logs: Sequence[float]) -> tuple[float, float]:
    """Standard deviation of single runs and its degrees of freedom, from the differences of runs next to each other.

    A few steps hardly touch it, whereas the scatter around one level grows with every step there is. It is worth two
    thirds of the runs (von Neumann, 1941).
    """
    count = len(logs)
    square = sum((b - a) ** 2 for a, b in itertools.pairwise(logs)) / (2 * (count - 1))
    return max(math.sqrt(square), RESOLUTION), 2 * (count - 1) ** 2 / (3 * count - 4)


def _distance(sums: Sequence[float], first: int, end: int) -> float:
    """How far the runs from `first` to `end` are from the others, over what one run's unit scatter leaves unknown."""
    count, inside, total = end - first, sums[end] - sums[first], sums[-1]
    outside = len(sums) - 1 - count
    return abs(inside / count - (total - inside) / outside) / math.sqrt(1 / count + 1 / outside)

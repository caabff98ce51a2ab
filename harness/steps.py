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
    believed if the probability of its Student's t, times the number of places looked at and of ways to look (Bonferroni), is at
    most `level`; then all parts are searched alike. So a series of independent runs without a step shows one with probability
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
    middle = statistics.fmean(logs)
    around = [log - middle for log in logs]
    for stretches in (_tails(len(logs)), _middles(len(logs))):
        if not stretches:
            break
        chance, first, end = min(_by_sides(around, stretches), _by_neighbours(around, stretches))
        probability = min(1.0, 2 * 2 * 2 * len(stretches) * chance)
        if probability <= level:
            edges = [edge for edge in (first, end) if 0 < edge < len(logs)]
            parts = itertools.pairwise([0, *edges, len(logs)])
            made = [Step(at=start + edge, ratio=1.0, probability=probability) for edge in edges]
            inner = [step for a, b in parts for step in _search(logs[a:b], start + a, level)]
            return sorted([*made, *inner], key=lambda step: step.at)
    return []


_Stretch = tuple[int, int]


def _tails(count: int) -> list[_Stretch]:
    """Stretches from one place to the end."""
    return [(first, count) for first in range(LEAST, count - LEAST + 1)]


def _middles(count: int) -> list[_Stretch]:
    """Stretches between two places."""
    ends = range(2 * LEAST, count - LEAST + 1)
    return [(first, end) for end in ends for first in range(LEAST, end - LEAST + 1)]


# Two estimates of a run's scatter, of which neither holds the step itself: where runs are few it would hide in it.


def _by_sides(around: Sequence[float], stretches: Sequence[_Stretch]) -> tuple[float, int, int]:
    """The stretch furthest from the others, and how likely its t is, by the scatter around the two levels.

    The sharpest where there is one step, as in a short history; a second one is scatter to it.
    """
    between, first, end = max((gap, *stretch) for gap, stretch in zip(_between(around, stretches), stretches, strict=True))
    freedom = len(around) - 2
    square = (sum(value * value for value in around) - between) / freedom
    return tail(math.sqrt(between / max(square, RESOLUTION**2)), freedom), first, end


def _by_neighbours(around: Sequence[float], stretches: Sequence[_Stretch]) -> tuple[float, int, int]:
    """The same by the differences of runs next to each other on one side, which other steps hardly touch.

    They are worth two thirds of the runs (von Neumann, 1941).
    """
    changes = [(b - a) ** 2 for a, b in itertools.pairwise(around)]
    count, total = len(around), sum(changes)
    across = [0.0, *changes, 0.0]  # into each run; none leads behind the last
    num_edges = 1 if stretches[0][1] == count else 2
    differences = count - 1 - num_edges
    squares = [(total - across[first] - across[end]) / (2 * differences) for first, end in stretches]
    largest, first, end = max(
        (between / max(square, RESOLUTION**2), *stretch)
        for between, square, stretch in zip(_between(around, stretches), squares, stretches, strict=True)
    )
    return tail(math.sqrt(largest), 2 * differences**2 / (3 * count - 4 * (1 + num_edges))), first, end


def _between(around: Sequence[float], stretches: Sequence[_Stretch]) -> list[float]:
    """Of each stretch the sum of squares between its runs and the others; all together have a mean of 0."""
    sums, count = [0.0, *itertools.accumulate(around)], len(around)
    return [(sums[end] - sums[first]) ** 2 * count / ((end - first) * (count - end + first)) for first, end in stretches]

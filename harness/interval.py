"""The median of a few visits and an interval that holds it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from harness.record import Samples

#: Least probability with which `low` to `high` holds the median of the population that visits come from.
COVERAGE = 0.90


def summarise(samples: Sequence[float]) -> Samples:
    """Return the median of at least one sample with its distribution-free interval.

    The interval runs between order statistics: the k-th smallest and k-th largest of n hold the median with probability
    1 - 2 * P(Binomial(n, 1/2) < k). Five visits give 0.94 from the whole range. Fewer than five reach no such
    probability; their whole range is given, and `is_converged` never holds.
    """
    ordered = sorted(samples)
    rank = _rank(len(ordered))
    return Samples(
        median=statistics.median(ordered), low=ordered[rank], high=ordered[len(ordered) - 1 - rank], samples=tuple(samples)
    )


def _rank(count: int) -> int:
    """The largest rank (from 0) whose order-statistic interval still has COVERAGE."""
    rank, outside = 0, 0.0
    for k in range(count // 2):
        outside += math.comb(count, k) * 0.5**count
        if 1.0 - 2.0 * outside < COVERAGE:
            break
        rank = k
    return rank


def half_width(summary: Samples) -> float | None:
    """Return the larger side of the interval over the median: 0.003 reads "±0.3%". None for one visit, which has none."""
    if len(summary.samples) < 2 or not summary.median:
        return None
    return max(summary.high - summary.median, summary.median - summary.low) / summary.median


def is_converged(summary: Samples, width: float) -> bool:
    """Whether there are five visits or more and the interval is at most `width` of the median wide, to either side."""
    half = half_width(summary)
    return len(summary.samples) >= 5 and half is not None and half <= width

"""How far apart two sets of visits are: an estimate of the ratio of two times, with what is not known of it.

Times are compared by their logarithms, so that a ratio and its inverse are judged alike and noise is a share. Visits are
few, 5 to 15, and each is a median of many launches already, which makes Student's t apt: rank and permutation tests of
5 against 5 visits cannot give a probability below 1/252, and none would survive a correction for a run of 200 rows.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from harness.student import quantile, tail

#: No visit is known better than this share, however well a few agree: event timers count in steps.
RESOLUTION = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The estimated logarithm of new / old, its standard error, and the degrees of freedom of that error."""

    log_ratio: float
    error: float
    freedom: float

    @property
    def ratio(self) -> float:
        """New over old: 1.02 is 2% slower."""
        return math.exp(self.log_ratio)

    def interval(self, confidence: float) -> tuple[float, float]:
        """The ratio's confidence interval, taken alone."""
        reach = quantile((1.0 - confidence) / 2, self.freedom) * self.error
        return math.exp(self.log_ratio - reach), math.exp(self.log_ratio + reach)

    def p_above(self, ratio: float) -> float:
        """Probability of an estimate as high as this if the ratio were `ratio` or less."""
        return tail((self.log_ratio - math.log(ratio)) / self.error, self.freedom)

    def p_below(self, ratio: float) -> float:
        """Probability of an estimate as low as this if the ratio were `ratio` or more."""
        return tail((math.log(ratio) - self.log_ratio) / self.error, self.freedom)


def unpaired(old: Sequence[float], new: Sequence[float]) -> Difference:
    """Compare two runs' visits of one row by Welch's t; two visits at least on both sides, all above 0.

    Welch's, since one of the runs may have been the noisier one.
    """
    sides = [[math.log(sample) for sample in samples] for samples in (old, new)]
    squares = [max(statistics.variance(side), RESOLUTION**2) / len(side) for side in sides]
    freedom = sum(squares) ** 2 / sum(square**2 / (len(side) - 1) for square, side in zip(squares, sides, strict=True))
    return Difference(
        log_ratio=statistics.fmean(sides[1]) - statistics.fmean(sides[0]), error=math.sqrt(sum(squares)), freedom=freedom
    )


def paired(rounds: Sequence[Sequence[tuple[float, float]]]) -> Difference:
    """Compare visits taken in turn: of each round of fresh processes its (old, new) pairs, two pairs in all at least.

    Drift hits both of a pair and cancels. What sets rounds apart (where memory came to lie) does not show within one, so
    the error is the larger of that over all pairs and that over the rounds' means.
    """
    logs = [[math.log(new / old) for old, new in pairs] for pairs in rounds if pairs]
    every = [log for of_round in logs for log in of_round]
    square = max(statistics.variance(every), 2 * RESOLUTION**2) / len(every)
    if len(logs) > 1:
        square = max(square, statistics.variance(map(statistics.fmean, logs)) / len(logs))
    return Difference(log_ratio=statistics.fmean(every), error=math.sqrt(square), freedom=len(every) - 1)


def geometric_mean(differences: Sequence[Difference]) -> Difference:
    """The ratio's geometric mean over rows whose errors have nothing to do with each other (Welch and Satterthwaite)."""
    squares = [difference.error**2 for difference in differences]
    freedom = sum(squares) ** 2 / sum(square**2 / d.freedom for square, d in zip(squares, differences, strict=True))
    return Difference(
        log_ratio=statistics.fmean(d.log_ratio for d in differences),
        error=math.sqrt(sum(squares)) / len(differences),
        freedom=freedom,
    )


def holm(probabilities: Sequence[float]) -> list[float]:
    """Adjust probabilities of many tests so that rejecting those below a level errs anywhere with that level at most."""
    adjusted = [0.0] * len(probabilities)
    floor = 0.0
    for rank, index in enumerate(sorted(range(len(probabilities)), key=probabilities.__getitem__)):
        floor = max(floor, min(1.0, (len(probabilities) - rank) * probabilities[index]))
        adjusted[index] = floor
    return adjusted

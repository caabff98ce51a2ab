"""How far apart two sets of visits are: an estimate of the ratio of two times, with what is not known of it.

Times are compared by their logarithms, so that a ratio and its inverse are judged alike and noise is a share. Visits are
few, 5 to 15, and each is a median of many launches already, which makes Student's t apt: rank and permutation tests of
5 against 5 visits cannot give a probability below 1/252, and none would survive a correction for a run of 200 rows. Where
visits are many enough, the outermost are set aside.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from harness.student import quantile, tail

#: Of this many samples or more the TRIMMED share on either side is set aside: one visit in which something else ran says
#: nothing about the row. Of fewer, what is left would be too few to tell their scatter by.
TRIM_FROM, TRIMMED = 8, 0.2
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


@dataclasses.dataclass(frozen=True)
class _Level:
    """Where samples lie: their (trimmed) mean, the square of its standard error, and that error's degrees of freedom."""

    mean: float
    square: float
    freedom: int


def _level(samples: Sequence[float], resolution: float = RESOLUTION) -> _Level:
    """The level of two samples at least; of TRIM_FROM or more the trimmed mean, with Yuen's error (Biometrika, 1974)."""
    ordered, count = sorted(samples), len(samples)
    cut = int(TRIMMED * count) if count >= TRIM_FROM else 0
    kept = ordered[cut : count - cut]
    drawn_in = [kept[0]] * cut + kept + [kept[-1]] * cut
    scatter = (count - 1) * max(statistics.variance(drawn_in), resolution**2)
    return _Level(statistics.fmean(kept), scatter / (len(kept) * (len(kept) - 1)), len(kept) - 1)


def unpaired(old: Sequence[float], new: Sequence[float]) -> Difference:
    """Compare two runs' visits of one row by Welch's t; two visits at least on both sides, all above 0.

    Welch's, since one of the runs may have been the noisier one.
    """
    before, now = (_level([math.log(sample) for sample in samples]) for samples in (old, new))
    square = before.square + now.square
    freedom = square**2 / sum(level.square**2 / level.freedom for level in (before, now))
    return Difference(log_ratio=now.mean - before.mean, error=math.sqrt(square), freedom=freedom)


def paired(rounds: Sequence[Sequence[tuple[float, float]]]) -> Difference:
    """Compare visits taken in turn: of each round of fresh processes its (old, new) pairs, two pairs in all at least.

    Drift hits both of a pair and cancels. What sets rounds apart (where memory came to lie) does not show within one, so
    the error is the larger of that over all pairs and that over the rounds.
    """
    logs = [[math.log(new / old) for old, new in pairs] for pairs in rounds if pairs]
    level = _level([log for of_round in logs for log in of_round], 2**0.5 * RESOLUTION)
    square = level.square
    if len(logs) > 1:
        means = [_level(of_round).mean if len(of_round) > 1 else of_round[0] for of_round in logs]
        square = max(square, statistics.variance(means) / len(means))
    return Difference(log_ratio=level.mean, error=math.sqrt(square), freedom=level.freedom)


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

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
from collections.abc import Mapping, Sequence

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apart:
    """How far two processes that do the same are apart, as standard deviations of the logarithm of their ratio.

    alone      in one round: mostly by where memory came to lie, which changes sides with the arm that is started first
    crossed    in the mean of two rounds, one started by either arm
    freedom    degrees of freedom of both: the pairs of rounds in which they were measured
    """

    alone: float
    crossed: float
    freedom: int

    def square(self, counts: Sequence[int]) -> float:
        """The square of what is left after so many rounds started by the one arm, and so many by the other."""
        return self.crossed**2 / min(counts) if all(counts) else self.alone**2


#: By device kind, from A/A arms of `pagedbench calibrate` (docs/regressions.md). On a CPU it makes no difference who starts:
#: there rounds are samples of one kind.
APART: Mapping[str, Apart] = {"cuda": Apart(alone=0.004, crossed=0.0015, freedom=234)}


def paired(rounds: Sequence[Sequence[tuple[float, float]]], apart: Apart | None) -> Difference:
    """Compare visits taken in turn: of each round of fresh processes its (old, new) pairs, two or more in one at least.

    Drift hits both of a pair and cancels. What sets the processes of a round apart does not show within it. Where `apart`
    is known, it has one sign in rounds 0, 2, ... and mostly the other in rounds 1, 3, ..., which the other arm starts: the
    mean of both kinds is nearly free of it, and what is left is `apart`, or what rounds of a kind show if that is more.
    Else the error is that of the visits or that of the rounds, whichever is larger. Rounds of less than two pairs are left
    out; they keep their places.
    """
    levels = [_level([math.log(new / old) for old, new in pairs], 2**0.5 * RESOLUTION) if len(pairs) > 1 else None
              for pairs in rounds]  # fmt: skip
    kinds = [[level for level in levels[start::2] if level] for start in (0, 1)] if apart else [[x for x in levels if x]]
    found = [kind for kind in kinds if kind]
    means = [statistics.fmean(level.mean for level in kind) for kind in found]
    within = sum(level.square / len(kind) ** 2 for kind in found for level in kind) / len(found) ** 2
    free, more = sum(level.freedom for kind in found for level in kind), sum(len(kind) - 1 for kind in found)
    seen = 0.0
    if more:
        off = sum((level.mean - mean) ** 2 for kind, mean in zip(found, means, strict=True) for level in kind) / more
        seen = off * sum(1 / len(kind) for kind in found) / len(found) ** 2
    if apart is None:
        # The scatter of two rounds would have one degree of freedom, with which nothing is ever told.
        return Difference(log_ratio=statistics.fmean(means), error=math.sqrt(max(within, seen)), freedom=free)
    between, known = max((apart.square([len(kind) for kind in kinds]), apart.freedom), (seen, more))
    square = within + between
    return Difference(
        log_ratio=statistics.fmean(means),
        error=math.sqrt(square),
        freedom=square**2 / (within**2 / free + between**2 / known),
    )


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

"""The gate, measured: how often it cries when nothing changed, and how often it sleeps when something did.

Two arms run the same kernels. Both spin for a while after every launch; the new arm spins longer by a known share of
what a launch with its spin takes. At a share of 0 nothing differs, and SLOWER or FASTER is a false alarm; at any other,
what is not SLOWER is a miss. A trial is judged as `pagedbench ab` judges a row: the same rounds, visits and corrections,
a slowed row as the only one of all that changed.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from harness.compare import Judged, Measure, judge
from harness.duel import NEW, OLD, Duel, Numbers, Pairs, difference_of
from harness.interval import summarise
from harness.match import Pair
from harness.record import Record

SHARES = (0.0, 0.01, 0.02, 0.05, 0.10)
#: Seconds for which both arms spin, by device kind: no shorter spin can be told to last.
SPIN_S: Mapping[str, float] = {"cuda": 2e-6, "cpu": 20e-6}
#: Pairs of visits by which a row's time is found before its spin is set.
SCOUTS = 3
#: The part of slowed trials that must be caught for a share to count as shown.
CAUGHT = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """What the gate is to reach on a kind of device.

    alarms    false alarms by trial, at most
    long_s    from so many seconds a launch on slowdowns of `long` must be caught, below that those of `short`
    """

    alarms: float
    long_s: float
    long: float
    short: float


GOALS: Mapping[str, Goal] = {
    "cuda": Goal(alarms=1 / 500, long_s=20e-6, long=0.02, short=0.05),
    "cpu": Goal(alarms=1 / 100, long_s=1e-3, long=0.10, short=0.10),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One verdict: of a row slowed by `share`, whose launch took `launch_s` seconds with its spin; each round's ratio."""

    record: Record
    share: float
    launch_s: float
    judged: Judged
    rounds: Sequence[float]


class Calibration:
    """Collects the pairs of all rounds; `rounds` of them make a trial.

    To be played by a Duel: `duel.run(repeats * rounds, calibration.play)`.
    """

    def __init__(self, shares: Sequence[float], rounds: int, visits: int) -> None:
        self.shares, self.rounds, self.visits = shares, rounds, visits
        self._pairs: dict[tuple[int, float], dict[int, list[Pairs]]] = {}
        self._seconds: dict[int, list[float]] = collections.defaultdict(list)

    def play(self, duel: Duel, turn: int, numbers: Numbers) -> None:
        """One case of one round: find each row's time with its spin, then visit it at every share."""
        spin_s = SPIN_S[duel.facts[OLD]["device"]["kind"]]
        for side in (OLD, NEW):
            duel.spin(side, dict.fromkeys(numbers, spin_s))
        found = {n: pairs for n, pairs in duel.alternate(numbers, SCOUTS).items() if pairs}
        seconds = {n: statistics.median([second for pair in pairs for second in pair]) for n, pairs in found.items()}
        for number, second in seconds.items():
            self._seconds[number].append(second)
        for share in self.shares:
            if share > 0:
                duel.spin(NEW, {number: spin_s + share * second for number, second in seconds.items()})
            of_repeat = self._pairs.setdefault((turn // self.rounds, share), {})
            for number, pairs in duel.alternate(list(seconds), self.visits).items():
                of_repeat.setdefault(number, [[] for _ in range(self.rounds)])[turn % self.rounds] = pairs

    def missing(self, duel: Duel, repeats: int) -> int:
        """How many of the trials of so many repeats have not had all their rounds."""
        rows = sum(not self._is_over(duel, number, repeat) for number in duel.records for repeat in range(repeats))
        return rows * len(self.shares)

    def _is_over(self, duel: Duel, number: int, repeat: int) -> bool:
        """Whether a row has had all rounds of a repeat."""
        return duel.num_rounds(number) >= (repeat + 1) * self.rounds

    def trials(self, duel: Duel, threshold: float | None = None) -> list[Trial]:
        """Judge everything that was collected, each repeat and share as a run of its own.

        Rows that failed, or whose every visit was throttled, are left out, and those that are not through with a repeat.
        """
        made = []
        for (repeat, share), rows in self._pairs.items():
            pairs, rounds = {}, {}
            for number, found in rows.items():
                if not self._is_over(duel, number, repeat):
                    continue
                old, new = (duel.records[number][side][repeat * self.rounds] for side in (OLD, NEW))
                if (old.status, new.status) == ("ok", "ok") and any(found):
                    pairs[number], rounds[number] = _pair(old, new, found), found
            num_tests = len(pairs) if share > 0 else None
            judged = judge(list(pairs.values()), threshold, _measure(pairs, rounds), num_tests)
            made += [
                Trial(
                    record=item.record,
                    share=share,
                    launch_s=statistics.median(self._seconds[number]),
                    judged=item,
                    rounds=[statistics.median(new / old for old, new in visited) for visited in rounds[number] if visited],
                )
                for number, item in zip(pairs, judged, strict=True)
            ]
        return made


def _pair(old: Record, new: Record, rounds: Sequence[Pairs]) -> Pair:
    """Both records with the visits of one trial."""
    visits = zip(*(pair for pairs in rounds for pair in pairs), strict=True)
    sides = [dataclasses.replace(r, launch_s=summarise(times)) for r, times in zip((old, new), visits, strict=True)]
    return Pair(old=sides[OLD], new=sides[NEW])


def _measure(pairs: Mapping[int, Pair], rounds: Mapping[int, list[Pairs]]) -> Measure:
    """The measure of pairs visited in turn, for `judge`."""
    numbers = {id(pair): number for number, pair in pairs.items()}
    return lambda pair: difference_of(rounds[numbers[id(pair)]], pair.record.device_kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """What came of some trials.

    alarms, quiet     false alarms, and trials in which nothing differed
    caught, slowed    by share: slowdowns called SLOWER, and all of them
    measured          by share: the median of the measured ratios, less 1
    """

    alarms: int
    quiet: int
    caught: Mapping[float, int]
    slowed: Mapping[float, int]
    measured: Mapping[float, float]

    @property
    def shown(self) -> float | None:
        """The smallest share from which on slowdowns are caught; None where none of those tried was."""
        smallest = None
        for share in sorted(self.slowed, reverse=True):
            if self.caught[share] < CAUGHT * self.slowed[share]:
                break
            smallest = share
        return smallest


def score(trials: Sequence[Trial]) -> Score:
    """Count alarms, catches and misses."""
    quiet = [trial for trial in trials if trial.share == 0]
    slowed = [trial for trial in trials if trial.share > 0]
    ratios: dict[float, list[float]] = collections.defaultdict(list)
    for trial in trials:
        if trial.judged.difference:
            ratios[trial.share].append(trial.judged.difference.ratio - 1)
    shares = dict.fromkeys(trial.share for trial in slowed)
    return Score(
        alarms=sum(trial.judged.verdict in ("SLOWER", "FASTER") for trial in quiet),
        quiet=len(quiet),
        caught={share: sum(t.judged.verdict == "SLOWER" for t in slowed if t.share == share) for share in shares},
        slowed={share: sum(t.share == share for t in slowed) for share in shares},
        measured={share: statistics.median(found) for share, found in ratios.items()},
    )


def held(trials: Sequence[Trial], goal: Goal) -> list[tuple[str, bool | None]]:
    """Each part of a goal as a sentence, and whether it was reached; None where no trial tells."""
    whole = score(trials)
    allowed = max(1.0, goal.alarms * whole.quiet)
    quiet = f"{whole.alarms} false alarms in {whole.quiet} unchanged rows (goal: at most 1 in {1 / goal.alarms:.0f})"
    found: list[tuple[str, bool | None]] = [(quiet, whole.alarms <= allowed if whole.quiet else None)]
    limit = f"{1e6 * goal.long_s:g} us"
    for share, which, some in (
        (goal.long, f"of {limit} and more", [trial for trial in trials if trial.launch_s >= goal.long_s]),
        (goal.short, f"below {limit}", [trial for trial in trials if trial.launch_s < goal.long_s]),
    ):
        of_size = score(some)
        caught, slowed = of_size.caught.get(share, 0), of_size.slowed.get(share, 0)
        words = f"{caught} of {slowed} slowdowns of {100 * share:g}% caught in rows {which} (goal: {100 * CAUGHT:g} of 100)"
        found.append((words, caught >= CAUGHT * slowed if slowed else None))
    return found

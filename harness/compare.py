"""Two sets of records -> verdicts. Which rows meet is in match.py, how times are held together in difference.py.

WRONG      the new row is wrong, failed or timed out
SLOWER     longer by more than the threshold, beyond doubt: all such verdicts of a comparison together err with 2.5%
UNSURE     the samples allow more than one answer; `pagedbench compare --rerun-unsure` takes more
MISSING    the old run has a time of it and the new one has none
NEW        the new run has a time of it and the old one has none
FASTER     as SLOWER, the other way
SAME       the whole interval lies within the threshold
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from harness.difference import Difference, holm, unpaired
from harness.match import Pair
from harness.record import TIMERS_DISAGREE, Record

if TYPE_CHECKING:
    from harness.groups import Group

#: Worst first.
VERDICTS = ("WRONG", "SLOWER", "UNSURE", "MISSING", "NEW", "FASTER", "SAME")
#: By device kind, the share of a time within which a difference is none.
THRESHOLD: Mapping[str, float] = {"cuda": 0.01, "cpu": 0.05}
#: The same where two GPUs of a kind took the times: as far as unchanged kernels on them have differed, docs/regressions.md.
ACROSS_GPUS = 0.08
#: Of a row's interval, taken alone.
CONFIDENCE = 0.95
#: Rows from which on a change that all have in common is told.
MANY = 8

Measure = Callable[[Pair], Difference | str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """One row of a comparison: its verdict with the reason, and remarks on what else changed.

    is_denied    whether its times differ by one of two timers only, so that no mean may hold them
    """

    pair: Pair
    verdict: str
    reason: str
    difference: Difference | None = None
    labels: tuple[str, ...] = ()
    is_denied: bool = False

    @property
    def record(self) -> Record:
        return self.pair.record


def visits(pair: Pair) -> Difference | str:
    """Compare the visits of two runs, or say why that cannot be."""
    sides = [record.launch_s.samples if record and record.launch_s else () for record in (pair.old, pair.new)]
    for samples, whose in zip(sides, ("old", "new"), strict=True):
        if len(samples) < 2:
            return f"the {whose} run has {len(samples)} samples of it; an interval needs two"
        if min(samples) <= 0:
            return f"the {whose} run has a sample that is no time: {min(samples)} s"
    return unpaired(*sides)


def judge(
    pairs: Sequence[Pair], threshold: float | None = None, measure: Measure = visits, num_tests: int | None = None
) -> list[Judged]:
    """Judge every pair that can be; rows that have no time on either side, and are not wrong, are left to `unjudged`.

    threshold    in place of THRESHOLD of the device's kind, and of ACROSS_GPUS
    num_tests    judge each row as the one that changed among so many, instead of by what the others show
    """
    settled: list[Judged | tuple[Pair, Difference]] = [_weigh(pair, measure) for pair in pairs if not _is_untimed(pair)]
    measured = [item for item in settled if isinstance(item, tuple)]
    bounds = [bound_of(pair, threshold) for pair, _ in measured]
    single = [min(d.p_above(bound), d.p_below(1 / bound)) for (_, d), bound in zip(measured, bounds, strict=True)]
    adjusted = holm(single) if num_tests is None else [min(1.0, num_tests * p) for p in single]
    ruled = iter(
        _denied(Judged(pair=pair, verdict=verdict, reason=reason, difference=difference, labels=_labels(pair, verdict)), bound)
        for (pair, difference), bound, p in zip(measured, bounds, adjusted, strict=True)
        for verdict, reason in [rule(difference, bound, p, num_tests or len(measured))]
    )
    return [next(ruled) if isinstance(item, tuple) else item for item in settled]


def unjudged(pairs: Sequence[Pair]) -> dict[str, int]:
    """How many rows `judge` leaves out, by why."""
    return dict(collections.Counter(_is_untimed(pair) for pair in pairs if _is_untimed(pair)))


def _is_untimed(pair: Pair) -> str:
    """Why a pair has nothing to be judged by, or ""."""
    old, new = pair.old, pair.new
    if (new and new.status in ("wrong", "failed", "timeout")) or any(record and record.launch_s for record in (old, new)):
        return ""
    statuses = dict.fromkeys(f"{record.status}, not timed" if record.status == "ok" else record.status
                             for record in (old, new) if record)  # fmt: skip
    return " before, then ".join(statuses)


def _weigh(pair: Pair, measure: Measure) -> Judged | tuple[Pair, Difference]:
    """What a pair's statuses settle, or how far its times are apart."""
    old, new = pair.old, pair.new
    if new is not None and new.status in ("wrong", "failed", "timeout"):
        before = f"; it was {old.status} before, too" if old and old.status == new.status else ""
        said = new.reason if new.status == "wrong" else f"{new.status}: {new.reason}"
        return Judged(pair=pair, verdict="WRONG", reason=f"{said}{before}")
    if old is None or old.launch_s is None:
        return Judged(pair=pair, verdict="NEW", reason=pair.why or f"before: {_state(old)}")
    if new is None or new.launch_s is None:
        return Judged(pair=pair, verdict="MISSING", reason=pair.why or f"now: {_state(new)}")
    found = measure(pair)
    if isinstance(found, str):
        return Judged(pair=pair, verdict="UNSURE", reason=found, labels=_labels(pair, "UNSURE"))
    return pair, found


def _state(record: Record | None) -> str:
    if record is None:
        return "no row"
    return "not timed" if record.status == "ok" else f"{record.status}: {record.reason}"


def is_across_gpus(pair: Pair) -> bool:
    """Whether two GPUs took a pair's times, as far as their records say which."""
    gpus = {record.unit.get("uuid") for record in (pair.old, pair.new) if record}
    return len(gpus) == 2 and all(gpus)


def bound_of(pair: Pair, threshold: float | None) -> float:
    """The ratio up to which a difference is none."""
    if threshold is not None:
        return 1.0 + threshold
    return 1.0 + (ACROSS_GPUS if is_across_gpus(pair) else THRESHOLD.get(pair.record.device_kind, THRESHOLD["cpu"]))


def rule(difference: Difference, bound: float, adjusted: float, num_tests: int) -> tuple[str, str]:
    """Return the verdict and its reason; `adjusted` is the corrected probability of the likelier side's being chance."""
    low, high = difference.interval(CONFIDENCE)
    share = f"{100 * (bound - 1):.3g}%"
    outside = (1.0 - CONFIDENCE) / 2
    if adjusted <= outside:
        verdict = "SLOWER" if difference.log_ratio > 0 else "FASTER"
        return verdict, f"the whole interval is beyond {share}, also with {num_tests} rows looked at (p = {adjusted:.1g})"
    if 1 / bound < low and high < bound:
        return "SAME", f"the whole interval is within {share}"
    if low >= bound or high <= 1 / bound:
        return "UNSURE", f"beyond {share} taken alone; of {num_tests} rows one may well look like this (p = {adjusted:.1g})"
    which = "SAME or FASTER" if high < bound else "SAME or SLOWER" if low > 1 / bound else "either way"
    return "UNSURE", f"{which}: the interval reaches across {share}; too few samples for their noise, or too near to it"


def _denied(row: Judged, bound: float) -> Judged:
    """No alarm rests on a time of one run alone that a second timer denies. Where timers disagree in both, like meets like."""
    old, new = row.pair.old, row.pair.new
    if row.verdict not in ("SLOWER", "FASTER") or not (old and old.launch_s and new and new.launch_s):
        return row
    before, after = _second_opinion(old), _second_opinion(new)
    if (before is None) == (after is None):
        return row
    ratio = (new.launch_s.median if after is None else after) / (old.launch_s.median if before is None else before)
    is_confirmed = ratio > bound if row.verdict == "SLOWER" else ratio * bound < 1
    if is_confirmed:
        return row
    reason = f"{row.verdict} by its visits, which the second timer of the {'new' if before is None else 'old'} run denies"
    return dataclasses.replace(row, verdict="UNSURE", reason=reason, is_denied=True)


def _second_opinion(record: Record) -> float | None:
    """Seconds that the second timer says, NaN where they cannot be read; None where the timers agree."""
    flag = next((flag for flag in record.flags if flag.startswith(TIMERS_DISAGREE)), None)
    if flag is None:
        return None
    said = re.search(r"second opinion ([0-9.e+-]+) s", flag)
    try:
        return float(said[1]) if said else math.nan
    except ValueError:
        return math.nan


def _labels(pair: Pair, verdict: str) -> tuple[str, ...]:
    """What else changed between the two, and doubts about the new row's time."""
    old, new = pair.old, pair.new
    if old is None or new is None:
        return ()
    labels = []
    before, now = _digests(old), _digests(new)
    if before and now:
        if before != now:
            labels.append("kernel changed")
        elif verdict in ("SLOWER", "FASTER"):
            labels.append("environment: the kernel's binary is the same")
    if verdict != "SAME" and is_across_gpus(pair):
        labels.append("another GPU of the kind")
    labels += [f"{name} {_shown(a)} -> {_shown(b)}" for name, a, b in changes(old.params, new.params)]
    labels += [flag for flag in new.flags if flag not in old.flags and not flag.startswith(("workspace", "energy"))]
    return tuple(labels)


def _digests(record: Record) -> list[str]:
    """Digests of a row's binaries; [] where one of them is unknown."""
    found = [kernel.get("digest") for kernel in record.kernels]
    return sorted(str(digest) for digest in found) if all(found) else []


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Names whose values differ, with both values; None where a side lacks the name."""
    names = [*old, *(name for name in new if name not in old)]
    return [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def toolchain_changes(judged: Sequence[Judged]) -> list[tuple[str, str, str]]:
    """What built and ran the two runs and is not the same, the revision included; once each."""
    found = [
        change
        for row in judged
        if row.pair.old and row.pair.new
        for change in changes(row.pair.old.toolchain, row.pair.new.toolchain)
    ]
    return [(name, _shown(a), _shown(b)) for name, a, b in dict.fromkeys(found)]


def common_shift(judged: Sequence[Judged], threshold: float | None = None) -> float | None:
    """The ratio that half of many rows exceed, where it is beyond half the threshold: the device changed, not a kernel."""
    compared = [row for row in judged if row.difference]
    if len(compared) < MANY:
        return None
    shift = statistics.median(row.difference.log_ratio for row in compared if row.difference)
    least = min(bound_of(row.pair, threshold) for row in compared)
    return math.exp(shift) if abs(shift) > math.log(least) / 2 else None


def exit_code(judged: Sequence[Judged], grouped: Sequence[Group] | None = None, strict_peers: bool = False) -> int:
    """1 where something is SLOWER or WRONG, 3 where something is UNSURE or MISSING, else 0. Peers count when told so.

    Groups, where there are any, stand for their rows; a row that is wrong or missing counts all the same.
    """

    def counts(row: str) -> bool:
        return strict_peers or not row.startswith("peer.")

    verdicts = {item.verdict for item in judged if counts(item.record.row)}
    if grouped is not None:
        verdicts = {group.verdict for group in grouped if counts(group.row)} | (verdicts & {"WRONG", "MISSING"})
    if verdicts & {"WRONG", "SLOWER"}:
        return 1
    return 3 if verdicts & {"UNSURE", "MISSING"} else 0

"""One line an implementation over all cases: geometric means against the ceiling and against the best of each case."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence

from harness.record import Record
from harness.report import rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """A row's standing over the timed cases of one operator, device and run. Means are geometric, over cases it has a time of.

    num_timed, num_cases    cases in which it has a time, and in which any row has one
    share                   mean share of the ceiling, over cases that have one; None where none has
    to_best                 mean of its time over the best time
    worst, worst_in         the largest of those, and the index of its case
    num_best                cases in which it is the fastest
    num_doubted             of its times, those in doubt
    """

    label: str
    side: str
    num_timed: int
    num_cases: int
    share: float | None
    to_best: float
    worst: float
    worst_in: int
    num_best: int
    num_doubted: int


def standings(groups: Sequence[rows.CaseRows]) -> dict[str, list[Standing]]:
    """Return the standings of each place (`rows.by_place`) that has times, the nearest to the best first."""
    found = {}
    for place, cases in rows.by_place(groups).items():
        timed = [(index, group) for index, group in cases if group.best_s]
        by_label: dict[str, list[tuple[int, rows.CaseRows, Record]]] = collections.defaultdict(list)
        for index, group in timed:
            for record in group.timed:
                if record.role == "implementation":
                    by_label[group.label(record)].append((index, group, record))
        if by_label:
            made = [_standing(label, rows_of, len(timed)) for label, rows_of in by_label.items()]
            found[place] = sorted(made, key=lambda one: one.to_best)
    return found


def _standing(label: str, found: Sequence[tuple[int, rows.CaseRows, Record]], num_cases: int) -> Standing:
    ratios = [(group.to_best(record) or 1.0, index) for index, group, record in found]
    shares = [share for _, _, record in found if (share := rows.share(record) or 0.0) > 0]
    worst, worst_in = max(ratios)
    return Standing(
        label=label, side=rows.side(found[0][2]), num_timed=len(found), num_cases=num_cases,
        share=_mean(shares) if shares else None, to_best=_mean([ratio for ratio, _ in ratios]), worst=worst, worst_in=worst_in,
        num_best=sum(rows.time_s(record) == group.best_s for _, group, record in found),
        num_doubted=sum(bool(rows.doubts(record)) for _, _, record in found),
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))

"""A run beside the runs it is held against: a line a row, and for each of the others its time, ratio, interval, verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from harness.compare import CONFIDENCE, VERDICTS, Judged
from harness.match import Key, settings
from harness.record import Record
from harness.report import units, verdicts
from harness.report.verdicts import Comparison

#: Shares of a time that the ends of the drawn scale may stand for, at least and at most.
NARROWEST, WIDEST = 0.02, 0.5
#: Verdicts that say: look here.
LOUD = ("WRONG", "SLOWER")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One row against one other run. start, end: where its interval lies on the drawn scale, in percent of its width."""

    verdict: str
    then: str
    change: str
    interval: str
    why: str
    start: float | None = None
    end: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A row of the table; cells are None where a comparison has no verdict of it."""

    row: str
    case: str
    now: str
    cells: Sequence[Cell | None]

    @property
    def is_calm(self) -> bool:
        """Whether nothing but SAME was found of it."""
        return all(cell is None or cell.verdict == "SAME" for cell in self.cells)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The table: lines with the worst verdict first. reach: the share of a time for which either end of the scale stands."""

    lines: Sequence[Line]
    reach: float


def alarms(comparison: Comparison) -> str:
    """Return "2 SLOWER, 1 WRONG against OLD", or nothing where there is none."""
    found = [f"{comparison.counts[verdict]} {verdict}" for verdict in LOUD if comparison.counts[verdict]]
    return f"{', '.join(found)} against {comparison.old}" if found else ""


def loud(comparison: Comparison) -> list[str]:
    """Return a line for each row that is slower or wrong, the worst first."""
    found = [row for row in verdicts.worst_first(comparison.judged) if row.verdict in LOUD]
    return [f"{row.verdict} {verdicts.label(row.record)} on {row.record.case}: {_said(row)}" for row in found]


def _said(row: Judged) -> str:
    if row.difference is None:
        return verdicts.reason_of(row)
    return f"{verdicts.change(row.difference.ratio)} ({verdicts.spread(row.difference)})"


def change_of_share(share: float) -> str:
    """Return a share of a time as a change, as "+5%"."""
    return f"{100 * share:+.2g}%"


def beside(comparisons: Sequence[Comparison]) -> Table:
    """Set the rows of all comparisons of one run side by side."""
    found: dict[tuple[Key, str], dict[int, Judged]] = {}
    for number, comparison in enumerate(comparisons):
        for row in comparison.judged:
            found.setdefault((row.record.key, settings(row.record)), {})[number] = row
    reach = _reach([row for rows in found.values() for row in rows.values()])
    ordered = sorted(found.values(), key=lambda rows: min(map(_badness, rows.values())))
    return Table(lines=[_line(rows, len(comparisons), reach) for rows in ordered], reach=reach)


def _badness(row: Judged) -> tuple[int, float]:
    return VERDICTS.index(row.verdict), -abs(row.difference.log_ratio) if row.difference else 0.0


def _reach(rows: Sequence[Judged]) -> float:
    """What nine of ten intervals reach, so that one that is far off does not make points of all others."""
    ends = sorted(max(abs(end - 1) for end in row.difference.interval(CONFIDENCE)) for row in rows if row.difference)
    return min(max(ends[int(0.9 * (len(ends) - 1))], NARROWEST), WIDEST) if ends else NARROWEST


def _line(rows: Mapping[int, Judged], count: int, reach: float) -> Line:
    some = next(iter(rows.values()))
    new = next((row.pair.new for row in rows.values() if row.pair.new), None)
    cells = [_cell(rows[number], reach) if number in rows else None for number in range(count)]
    return Line(row=verdicts.label(some.record), case=some.record.case, now=_time(new), cells=cells)


def _time(record: Record | None) -> str:
    if record is None or record.launch_s is None:
        return units.MISSING if record is None or record.status == "ok" else record.status
    seconds = record.launch_s.median
    scale = units.time_scale(record.device_kind, [seconds])
    return f"{scale.show(seconds)} {scale.unit}"


def _cell(row: Judged, reach: float) -> Cell:
    start = end = None
    if row.difference is not None:
        start, end = (_place(value, reach) for value in row.difference.interval(CONFIDENCE))
    ratio = units.MISSING if row.difference is None else verdicts.change(row.difference.ratio)
    return Cell(
        verdict=row.verdict, then=_time(row.pair.old), change=ratio, interval=verdicts.spread(row.difference),
        why=verdicts.reason_of(row), start=start, end=end,
    )  # fmt: skip


def _place(ratio: float, reach: float) -> float:
    """Where a ratio lies between -reach (0) and +reach (100); what is beyond lies at the end."""
    share = math.log(ratio) / math.log1p(reach)
    return round(50 + 50 * min(max(share, -1.0), 1.0), 1)

"""The heat map: implementation by case, each cell a share of the ceiling; of the fastest row in cases that have none."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from harness.record import Record
from harness.report import reasons, rows, tables, units

#: what a cell shows of a row that has no share of the ceiling
MARKS = {"ok": "ok", "wrong": "W", "failed": "F", "timeout": "T", "unsupported": "·", "skipped": "s"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Shares in percent, cases down and rows across, the best first.

    columns    (implementation, layout and whatever tells rows apart)
    lines      (index of the case, its name, whether its shares are of the fastest row, cells); a cell is (text, class, title)
    """

    title: str
    columns: Sequence[tuple[str, str]]
    lines: Sequence[tuple[int, str, bool, Sequence[tuple[str, str, str]]]]


def heat_maps(groups: Sequence[rows.CaseRows]) -> list[HeatMap]:
    """Return a map for each operator, device and run: what may be compared."""
    return [_heat_map(place, found) for place, found in rows.by_place(groups).items()]


def _heat_map(name: str, groups: Sequence[tuple[int, rows.CaseRows]]) -> HeatMap:
    """Of the ceiling; of the fastest row in cases that have none."""
    totals: dict[str, float] = collections.defaultdict(float)
    shown = []
    for index, group in groups:
        shares: dict[str, tuple[Record, float | None]] = {}
        for record in (*group.timed, *group.untimed):
            if record.role == "implementation" and (label := group.label(record)) not in shares:
                share = rows.share(record) if group.ceiling else _of_fastest(group, record)
                shares[label] = (record, share)
                totals[label] += share or 0.0
        shown.append((index, group, shares))
    columns = sorted(totals, key=lambda label: -totals[label])
    with_ceiling = [group for _, group, _ in shown if group.ceiling]
    lines = [
        (index, group.first.case, bool(with_ceiling and group.timed and not group.ceiling),
         [_cell(*shares[label], not group.ceiling) if label in shares else ("", "", "") for label in columns])
        for index, group, shares in shown
    ]  # fmt: skip
    of = "percent of the fastest, for want of a ceiling" if any(group.timed for _, group in groups) else "no times"
    of = "percent of the measured ceiling" if with_ceiling else of
    of += "; of the fastest where it says so" if any(relative for _, _, relative, _ in lines) else ""
    return HeatMap(title=f"{name}: {of}", columns=[_head(label) for label in columns], lines=lines)


def _head(label: str) -> tuple[str, str]:
    impl, bracket, rest = label.partition("[")
    return impl, bracket + rest


def _of_fastest(group: rows.CaseRows, record: Record) -> float | None:
    ratio = group.to_best(record)
    return 1 / ratio if ratio else None


def _cell(record: Record, share: float | None, relative: bool) -> tuple[str, str, str]:
    if share is None or record.status != "ok":
        return MARKS[record.status], record.status, f"{record.status}: {reasons.said(record)}"
    rate = tables.rate_scale(record)
    look = f"h{min(max(int(10 * share), 0), 10)}" + (" relative" if relative else "")
    title = f"{rate.show(rows.rate(record), 3)} {rate.unit}" + (f"; {units.flags(record.flags)}" if record.flags else "")
    return f"{100 * share:.0f}{rows.mark(record)}", look, title

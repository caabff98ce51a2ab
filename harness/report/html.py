"""report.html: one file that needs nothing else. This page chooses what is shown; report.html.j2 says how it is set."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from harness.record import Record
from harness.report import figures, reasons, rows, tables, units

_HERE = Path(__file__).parent

#: what a heat map's cell shows of a row that has no share of the ceiling
MARKS = {"ok": "ok", "wrong": "W", "failed": "F", "timeout": "T", "unsupported": "·", "skipped": "s"}


def html(records: Sequence[Record]) -> str:
    """Return the whole report. Every text of a record is escaped; nothing is fetched when it is opened."""
    loader = jinja2.FileSystemLoader(_HERE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"breakable": _breakable, "id": id}
    left_out = set(map(id, rows.nowhere(records)))
    groups = rows.by_case(record for record in records if id(record) not in left_out)
    verdict, good = reasons.verdict(records)
    counts = reasons.tally(records)
    return environment.get_template("report.html.j2").render(
        css=Markup((_HERE / "report.css").read_text(encoding="utf-8")),
        js=Markup((_HERE / "report.js").read_text(encoding="utf-8")),
        verdict=verdict, good=good,
        summary=reasons.summary_line(records), runs=list(dict.fromkeys((r.run, r.suite, r.device) for r in records)),
        statuses=[status for status in ("ok", *reasons.ORDER) if any(counter[status] for counter in counts.values())],
        tally=counts,
        reasons=reasons.reasons(records), bad=reasons.BAD, left_out=left_out,
        doubted=rows.DOUBTED, flagged=rows.FLAGGED,
        overview=[_overview(index, group) for index, group in enumerate(groups)], timed=any(group.timed for group in groups),
        arithmetic=any(rows.is_arithmetic(group.first) for group in groups),
        heat_maps=heat_maps(groups), marks=MARKS, curves=figures.curve_figures(records),
        memory=figures.memory_figure(records), cases=[_case(group) for group in groups],
        facts=list(tables.fact_tables(records)),
    )  # fmt: skip


def _breakable(name: str) -> Markup:
    """Let a long name break where people would: after "." and "_", before "["."""
    return Markup(re.sub(r"(?<=[._])(?=\w)|(?=\[)", "<wbr>", str(escape(name))))


def _overview(index: int, group: rows.CaseRows) -> dict[str, Any]:
    """One case in a line: the fastest of ours and of the peers, and how far the better is from the ceiling."""
    scale = units.time_scale(group.first.device_kind, map(rows.time_s, group.timed))
    ours, peer = group.best_of("implementations"), group.best_of("peers")
    best = min((r for r in (ours, peer) if r), key=lambda r: rows.time_s(r) or 0, default=None)
    return {
        "index": index, "case": group.first.case, "shape": rows.describe(group.first.shape), "faults": reasons.faults(group),
        "bytes": units.size(group.first.traffic_bytes), "gain": units.ratio(group.gain),
        "fastest": [_fastest(record, group, scale) for record in (ours, peer)],
        "share": rows.share(best) if best else None, "reached": tables.reached(best),
        "head": "speed" if rows.is_arithmetic(group.first) else "of ceiling",
    }  # fmt: skip


def _fastest(record: Record | None, group: rows.CaseRows, scale: units.Scale) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "name": record.row, "time": f"{scale.show(rows.time_s(record))} {scale.unit}", "best": group.is_crowned(record),
        "mark": rows.mark(record), "flags": _flags(record),
    }  # fmt: skip


def _flags(record: Record) -> str:
    return "; ".join(map(units.prose, record.flags))


def _case(group: rows.CaseRows) -> dict[str, Any]:
    """One case: its table's cells with what is drawn beside them, then the rows that have no time."""
    table = tables.case_table(group)
    heads = [head for head in table.heads if head != "flags"]  # flags stand below the name, where they are seen
    share = heads.index("of ceiling") if "of ceiling" in heads else -1
    timed = [
        {"cells": cells[: len(heads)], "share": rows.share(record), "best": group.is_crowned(record),
         "role": record.role, "command": rows.command(record), "flags": list(map(units.prose, record.flags))}
        for record, cells in zip(group.timed, table.lines, strict=True)
    ]
    untimed = [
        {"name": group.label(record), "status": record.status, "role": record.role, "said": _said(record),
         "command": rows.command(record), "flags": list(map(units.prose, record.flags))}
        for record in group.untimed
    ]
    return {
        "name": group.first.case, "op": group.first.op, "digest": group.first.case_digest, "run": group.first.run,
        "device": group.first.device, "shape": rows.describe(group.first.shape), "ceiling": tables.ceiling_line(group),
        "heads": heads, "share": share, "timed": timed, "untimed": untimed,
    }  # fmt: skip


def _said(record: Record) -> str:
    """What stands in place of a time: the reason in brief, or how near a right row came to what is allowed."""
    if record.reason:
        return reasons.brief(record.reason)
    error = rows.worst_error(record)
    return "not timed" if error is None else f"not timed; largest error {units.of_allowed(error)} of what is allowed"


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
    places: dict[tuple[str, str, str], list[tuple[int, rows.CaseRows]]] = collections.defaultdict(list)
    for index, group in enumerate(groups):
        places[group.first.op, group.first.device, group.first.run].append((index, group))
    is_plain = len(places) == len({op for op, _, _ in places})
    return [_heat_map(place[0] if is_plain else ", ".join(place), found) for place, found in places.items()]


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
        return MARKS[record.status], record.status, f"{record.status}: {_said(record)}"
    rate = tables.rate_scale(record)
    look = f"h{min(max(int(10 * share), 0), 10)}" + (" relative" if relative else "")
    title = f"{rate.show(rows.rate(record), 3)} {rate.unit}" + (f"; {_flags(record)}" if record.flags else "")
    return f"{100 * share:.0f}{rows.mark(record)}", look, title

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

from harness.record import STATUSES, Record
from harness.report import figures, rows, tables, units

_HERE = Path(__file__).parent

#: what a heat map's cell shows of a row that has no share of the ceiling
MARKS = {"ok": "ok", "wrong": "W", "failed": "F", "timeout": "T", "unsupported": "·", "skipped": "s"}


def html(records: Sequence[Record]) -> str:
    """Return the whole report. Every text of a record is escaped; nothing is fetched when it is opened."""
    loader = jinja2.FileSystemLoader(_HERE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["breakable"] = _breakable
    groups = rows.by_case(records)
    verdict, good = rows.verdict(records)
    return environment.get_template("report.html.j2").render(
        css=Markup((_HERE / "report.css").read_text(encoding="utf-8")),
        js=Markup((_HERE / "report.js").read_text(encoding="utf-8")),
        verdict=verdict, good=good,
        summary=rows.summary_line(records), runs=list(dict.fromkeys((r.run, r.suite, r.device) for r in records)),
        statuses=STATUSES, tally=rows.tally(records), reasons=[_reason(reason) for reason in rows.reasons(records)],
        overview=[_overview(index, group) for index, group in enumerate(groups)],
        heat_maps=heat_maps(groups), marks=MARKS, curves=figures.curve_figures(records),
        memory=figures.memory_figure(records), cases=[_case(group) for group in groups],
        facts=list(tables.fact_tables(records)),
    )  # fmt: skip


def _breakable(name: str) -> Markup:
    """Let a long name break where people would: after "." and "_", before "["."""
    return Markup(re.sub(r"(?<=[._])(?=\w)|(?=\[)", "<wbr>", str(escape(name))))


def _reason(reason: rows.Reason) -> dict[str, Any]:
    cases = list(dict.fromkeys(record.case for record in reason.rows))
    count = units.count(len(reason.rows), "row")
    return {
        "status": reason.status, "bad": reason.status in rows.BAD, "text": reason.reason, "names": reason.names,
        "cases": cases, "count": count,
    }  # fmt: skip


def _overview(index: int, group: rows.CaseRows) -> dict[str, Any]:
    """One case in a line: the fastest of ours and of the peers, and how far the better is from the ceiling."""
    scale = units.time_scale(group.first.device_kind, map(rows.time_s, group.timed))
    ours, peer = group.best_of("implementations"), group.best_of("peers")
    best = min((r for r in (ours, peer) if r), key=lambda r: rows.time_s(r) or 0, default=None)
    gain = (rows.time_s(peer) or 0) / (rows.time_s(ours) or 1) if ours and peer else None
    return {
        "index": index, "case": group.first.case, "shape": rows.describe(group.first.shape),
        "bytes": units.size(group.first.traffic_bytes), "gain": units.ratio(gain),
        "fastest": [_fastest(record, best, scale) for record in (ours, peer)],
        "share": best.ceiling_share if best else None, "percent": units.percent(best.ceiling_share if best else None),
    }  # fmt: skip


def _fastest(record: Record | None, best: Record | None, scale: units.Scale) -> dict[str, Any] | None:
    if record is None:
        return None
    return {"name": record.row, "time": f"{scale.show(rows.time_s(record))} {scale.unit}", "best": record is best}


def _case(group: rows.CaseRows) -> dict[str, Any]:
    """One case: its table's cells with what is drawn beside them, then the rows that have no time."""
    table = tables.case_table(group)
    heads = [head for head in table.heads if head != "flags"]  # flags stand below the name, where they are seen
    share = heads.index("of ceiling") if "of ceiling" in heads else -1
    timed = [
        {"cells": cells[: len(heads)], "share": record.ceiling_share, "best": rows.time_s(record) == group.best_s,
         "role": record.role, "command": rows.command(record), "flags": record.flags}
        for record, cells in zip(group.timed, table.lines, strict=True)
    ]
    untimed = [
        {"name": group.label(record), "status": record.status, "role": record.role, "said": _said(record),
         "command": rows.command(record), "flags": record.flags}
        for record in group.untimed
    ]
    return {
        "name": group.first.case, "op": group.first.op, "digest": group.first.case_digest, "run": group.first.run,
        "device": group.first.device, "shape": rows.describe(group.first.shape), "ceiling": tables.ceiling_line(group),
        "heads": heads, "share": share, "timed": timed, "untimed": untimed,
    }  # fmt: skip


def _said(record: Record) -> str:
    """What stands in place of a time: the first line of the reason, or how near a right row came to what is allowed."""
    if record.reason:
        return record.reason.splitlines()[0]
    error = rows.worst_error(record)
    return "not timed" if error is None else f"not timed; largest error {units.percent(error)} of what is allowed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Shares in percent, cases down and rows across, the best first. A cell is (text, class, title)."""

    title: str
    columns: Sequence[str]
    lines: Sequence[tuple[int, str, Sequence[tuple[str, str, str]]]]


def heat_maps(groups: Sequence[rows.CaseRows]) -> list[HeatMap]:
    """Return a map for each operator, device and run: what may be compared."""
    places: dict[tuple[str, str, str], list[tuple[int, rows.CaseRows]]] = collections.defaultdict(list)
    for index, group in enumerate(groups):
        places[group.first.op, group.first.device, group.first.run].append((index, group))
    is_plain = len(places) == len({op for op, _, _ in places})
    return [_heat_map(place[0] if is_plain else ", ".join(place), found) for place, found in places.items()]


def _heat_map(name: str, groups: Sequence[tuple[int, rows.CaseRows]]) -> HeatMap:
    """Of the ceiling, or of the fastest row where no case has a ceiling."""
    has_ceiling = any(group.ceiling for _, group in groups)
    totals: dict[str, float] = collections.defaultdict(float)
    shown = []
    for index, group in groups:
        shares = {}
        for record in (*group.timed, *group.untimed):
            if record.role == "implementation" and (label := group.label(record)) not in shares:
                share = record.ceiling_share if has_ceiling else _of_fastest(group, record)
                shares[label] = (record, share)
                totals[label] += share or 0.0
        shown.append((index, group.first.case, shares))
    columns = sorted(totals, key=lambda label: -totals[label])
    lines = [(index, case, [_cell(*shares.get(label, (None, None))) for label in columns]) for index, case, shares in shown]
    of = "percent of the measured ceiling" if has_ceiling else "percent of the fastest, since no ceiling was measured"
    return HeatMap(title=f"{name}: {of}", columns=columns, lines=lines)


def _of_fastest(group: rows.CaseRows, record: Record) -> float | None:
    ratio = group.to_best(record)
    return 1 / ratio if ratio else None


def _cell(record: Record | None, share: float | None) -> tuple[str, str, str]:
    if record is None:
        return "", "", ""
    if share is None or record.status != "ok":
        return MARKS[record.status], record.status, f"{record.status}: {_said(record)}"
    rate = units.rate_scale(record.device_kind)
    return f"{100 * share:.0f}", f"h{min(max(int(10 * share), 0), 10)}", f"{rate.show(rows.rate(record), 3)} {rate.unit}"

"""report.html: one file that needs nothing else. This page chooses what is shown; the templates say how it is set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from harness.audit import audit
from harness.record import Record
from harness.report import against, figures, heat, kills, pool, reasons, rows, standing, tables, trends, units, verdicts
from harness.report.again import command
from harness.report.beside import Beside
from harness.report.packed import packed

_HERE = Path(__file__).parent
_SCRIPTS = ("packed.js", "tables.js", "marks.js", "page.js")


def html(records: Sequence[Record], beside: Beside | None = None) -> str:
    """Return the whole report. Every text of a record is escaped; nothing is fetched when it is opened."""
    beside = beside or Beside()
    left_out = set(map(id, rows.nowhere(records)))
    groups = rows.by_case(record for record in records if id(record) not in left_out)
    verdict, good = _verdict(records, beside)
    counts = reasons.tally(records)
    found = trends.find_trends(beside.history, records)
    return _environment().get_template("report.html.j2").render(
        css=Markup((_HERE / "report.css").read_text(encoding="utf-8")),
        js=Markup("\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)),
        verdict=verdict, good=good,
        summary=reasons.summary_line(records), runs=list(dict.fromkeys((r.run, r.suite, r.device) for r in records)),
        statuses=[status for status in ("ok", *reasons.ORDER) if any(counter[status] for counter in counts.values())],
        tally=counts,
        reasons=reasons.reasons(records), bad=reasons.BAD, left_out=left_out,
        doubted=rows.DOUBTED, flagged=rows.FLAGGED,
        overview=[_overview(index, group) for index, group in enumerate(groups)
                  if group.timed or reasons.faults(group)],
        timed=any(group.timed for group in groups), arithmetic=any(rows.is_arithmetic(group.first) for group in groups),
        standings=standing.standings(groups), case_names=[group.first.case for group in groups],
        comparisons=beside.comparisons, against=against.beside(beside.comparisons), loud=against.loud,
        heat_maps=heat.heat_maps(groups), marks=heat.MARKS, curves=figures.curve_figures(records),
        trends=found, step_table=trends.step_table(found), trend_table=trends.trend_table(found),
        trend_figures=trends.trend_figures(found), num_steps=sum(len(trend.steps) for trend in found),
        memory=figures.memory_figure(records), pool=beside.pool, pools=pool.pool_figures(beside.pool) if beside.pool else [],
        pool_pictures=pool.embedded(beside.pool) if beside.pool else [],
        cases=[_case(group, beside) for group in groups],
        matrix=_matrix(records, beside), facts=list(tables.fact_tables(records, beside.facts)),
    )  # fmt: skip


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    made.filters |= {
        "breakable": _breakable, "id": id, "percent": units.percent, "ratio": units.ratio, "count": units.count,
        "change": against.change_of_share, "headline": verdicts.headline, "moved": verdicts.change, "spread": verdicts.spread,
        "cost": verdicts.cost_line, "packed": packed,
    }  # fmt: skip
    return made


def _breakable(name: str) -> Markup:
    """Let a long name break where people would: after "." and "_", before "["."""
    return Markup(re.sub(r"(?<=[._])(?=\w)|(?=\[)", "<wbr>", str(escape(name))))


def _verdict(records: Sequence[Record], beside: Beside) -> tuple[str, bool]:
    """The page's first line, and whether it is good news: what is wrong, then what is slower than other runs."""
    text, good = reasons.verdict(records)
    alarms = [alarm for comparison in beside.comparisons if (alarm := against.alarms(comparison))]
    return "; ".join([text, *alarms]), good and not alarms


def _matrix(records: Sequence[Record], beside: Beside) -> kills.Grid | None:
    """The kill matrix of the audit that was given, else of the records' own controls."""
    found = beside.audit or (audit(records) if any(record.role == "control" for record in records) else None)
    return kills.grid(found, beside.faults) if found else None


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
        "mark": rows.mark(record), "flags": units.flags(record.flags),
    }  # fmt: skip


def _case(group: rows.CaseRows, beside: Beside) -> dict[str, Any]:
    """One case: its table's cells with what is drawn beside them, then the rows that have no time."""
    table = tables.case_table(group)
    heads = [head for head in table.heads if head != "flags"]  # flags stand below the name, where they are seen
    has_ceiling = "of ceiling" in heads
    barred = next((heads.index(head) for head in ("of ceiling", "to best") if head in heads), -1)
    timed = [
        {"cells": cells[: len(heads)], "share": _drawn(group, record, has_ceiling), "best": group.is_crowned(record),
         "role": record.role, "command": command(record, beside.facts), "flags": list(map(units.prose, record.flags))}
        for record, cells in zip(group.timed, table.lines, strict=True)
    ]
    untimed = [
        {"name": group.label(record), "status": record.status, "role": record.role, "said": reasons.said(record),
         "command": command(record, beside.facts), "flags": list(map(units.prose, record.flags))}
        for record in group.untimed
    ]
    return {
        "name": group.first.case, "op": group.first.op, "digest": group.first.case_digest, "run": group.first.run,
        "device": group.first.device, "shape": rows.describe(group.first.shape), "ceiling": tables.ceiling_line(group),
        "heads": heads, "barred": barred, "relative": not has_ceiling, "timed": timed, "untimed": untimed,
        "fold": "" if timed else f"{units.count(len(untimed), 'row')} without a time: {reasons.counted(group.untimed)}",
        "is_bad": bool(reasons.faults(group)),
    }  # fmt: skip


def _drawn(group: rows.CaseRows, record: Record, has_ceiling: bool) -> float | None:
    """The length of a row's bar: its share of the ceiling; in a case that has none, of the fastest row's speed."""
    if has_ceiling:
        return rows.share(record)
    ratio = group.to_best(record)
    return 1 / ratio if ratio else None

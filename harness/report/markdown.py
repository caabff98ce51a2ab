"""report.md: the verdict, a table over all cases, a table a case, and every row without a number with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import tabulate

from harness.record import Record
from harness.report import reasons, rows, tables, units
from harness.report.again import command

Cells = list[str]


def markdown(records: Sequence[Record]) -> str:
    """Return the whole report as GitHub-flavoured Markdown."""
    groups = rows.by_case(records)
    timed = [group for group in groups if group.timed]
    summary = escape(reasons.summary_line(records)) + "."
    parts = [f"# {reasons.verdict(records)[0]}", *_where(records), summary, _tally_table(records)]
    if timed:
        parts += ["## Fastest by case", _overview(timed), *_legend(timed), "## Cases"]
        for group in timed:
            parts += _case(group)
    parts += ["## Rows without a number", *_others(records)]
    parts += _facts(records)
    return "\n\n".join(parts) + "\n"


def _where(records: Sequence[Record]) -> list[str]:
    runs = dict.fromkeys((r.run, r.suite, r.device) for r in records)
    return [f"Run {code(run)}, suite {code(suite)}, on {code(device)}." for run, suite, device in runs]


def _tally_table(records: Sequence[Record]) -> str:
    counts = reasons.tally(records)
    statuses = ("ok", *reasons.ORDER)
    lines = [(escape(whose), *(str(found[status] or units.MISSING) for status in statuses)) for whose, found in counts.items()]
    return _filled(("rows", *statuses), lines)


def _legend(groups: Sequence[rows.CaseRows]) -> list[str]:
    """What the marks beside times mean, as far as there are any."""
    found = {rows.mark(record) for group in groups for record in group.timed}
    words = {rows.DOUBTED: "the time is in doubt and not to be quoted", rows.FLAGGED: "the row has another flag"}
    said = [f"{escape(mark)} {text}: its case tells why." for mark, text in words.items() if mark in found]
    if any(rows.is_arithmetic(group.first) for group in groups):
        said.append("A case bound by arithmetic shows how fast it computes in place of a share of what could be read.")
    return [" ".join(said)] if said else []


def overview(records: Sequence[Record]) -> str:
    """Return the table of the fastest by case alone, with what its marks mean; "" where no row has a time."""
    timed = [group for group in rows.by_case(records) if group.timed]
    return "\n\n".join([_overview(timed), *_legend(timed)]) if timed else ""


def _overview(groups: Sequence[rows.CaseRows]) -> str:
    """One line a case: the fastest of ours and of the peers, and how far the best is from the ceiling."""
    lines = []
    for group in groups:
        scale = units.time_scale(group.first.device_kind, map(rows.time_s, group.timed))
        ours, peer = group.best_of("implementations"), group.best_of("peers")
        best = min((r for r in (ours, peer) if r), key=lambda r: rows.time_s(r) or 0, default=None)
        name = " / ".join([code(group.first.case), escape(rows.describe(group.first.shape))])
        cells = [_best(record, group, scale) for record in (ours, peer)]
        faults = escape(reasons.faults(group)) or units.MISSING
        moved = units.size(group.first.traffic_bytes)
        lines.append((name, moved, *cells, units.ratio(group.gain), tables.reached(best), faults))
    return _filled(("case", "bytes", "fastest of ours", "fastest peer", "peer / ours", "best of ceiling", "faults"), lines)


def _best(record: Record | None, group: rows.CaseRows, scale: units.Scale) -> str:
    if record is None:
        return units.MISSING
    text = f"{scale.show(rows.time_s(record))} {scale.unit}{_mark(record)} {code(record.row)}"
    return f"**{text}**" if group.is_crowned(record) else text


def _mark(record: Record) -> str:
    return escape(rows.mark(record))


def _case(group: rows.CaseRows) -> Iterator[str]:
    first = group.first
    yield f"### {escape(first.case)}"
    yield escape(f"{rows.describe(first.shape)}. {tables.ceiling_line(group)}")
    table_of = tables.case_table(group)
    lines = []
    for record, cells in zip(group.timed, table_of.lines, strict=True):
        shown = [code(cells[0]), *(escape(cell) for cell in cells[1:])]
        shown[1] += _mark(record)
        lines.append([f"**{cell}**" for cell in shown[:2]] + shown[2:] if group.is_crowned(record) else shown)
    yield table(table_of.heads, lines, words=1)
    yield "The fastest again: " + code(command(group.timed[0]))


def _others(records: Sequence[Record]) -> Iterator[str]:
    found = reasons.reasons(records)
    if not found:
        yield "None: every row has a number."
    for reason in found:
        cases = reason.cases
        shown = ", ".join(map(code, cases)) if len(cases) <= 6 else f"{units.count(len(cases), 'case')}"
        text = _quoted(reason.ends if reason.is_long else reason.text)
        yield f"- **{reason.status}**: {code(reason.names)} on {shown}; {reason.count}\n\n{text}"
        if reason.is_long:
            yield f"  <details><summary>The whole reason</summary>\n\n{_quoted(reason.text)}\n\n  </details>"


def _quoted(text: str) -> str:
    """An indented block inside a list item: shown as it is, whatever it holds."""
    return "\n".join(f"      {line}" for line in text.splitlines())


def _facts(records: Sequence[Record]) -> Iterator[str]:
    for title, found in tables.fact_tables(records):
        yield f"## {title}"
        for one in found:
            text = table(one.heads, [[escape(cell) for cell in line] for line in one.lines], words=one.words)
            yield f"<details><summary>{escape(one.fold)}</summary>\n\n{text}\n\n</details>" if one.fold else text


def _filled(heads: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """Set a Markdown table of which the first column is text, without the columns that hold nothing."""
    found = tables.Table(heads=heads, lines=tuple(lines)).filled()
    return table(found.heads, [list(line) for line in found.lines], words=1)


def table(heads: Sequence[str], lines: Sequence[Cells], words: int) -> str:
    """Set a Markdown table; the first `words` columns are text and go left, the others right."""
    align = ["left" if i < words else "right" for i in range(len(heads))]
    text: str = tabulate.tabulate(lines, heads, tablefmt="pipe", disable_numparse=True, colalign=align)
    return text


def escape(text: str) -> str:
    """Return text that Markdown shows as it is, in a table as well."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~]|\b_|_\b)", r"\\\1", text)
    return " ".join(text.split())


def code(text: str) -> str:
    """Return text as code; a pipe is escaped for tables, a backtick and a line break become a space."""
    return "`" + " ".join(text.replace("`", " ").split()).replace("|", "\\|") + "`"

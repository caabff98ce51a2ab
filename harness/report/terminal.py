"""Tables for a terminal, at most 100 columns wide, of the records that are there: verdicts, and times where any were taken."""

from __future__ import annotations

import collections
import textwrap
from collections.abc import Iterator, Sequence

import tabulate

from harness.record import STATUSES, Record
from harness.report import reasons, rows, tables, units

WIDTH = 100
_LISTED = 40  # verdicts up to which each is a line of its own

Cells = list[str]


def terminal_table(records: Sequence[Record]) -> str:
    """Return what `pagedbench check`, `bench` and `run` print: a table a case, then every row that has no number, and why.

    Records without any time give a table of verdicts instead. It ends with `summary_line`. A character that would steer
    the terminal becomes "?".
    """
    if not records:
        return "no rows"
    groups = rows.by_case(records)
    timed = [group for group in groups if group.timed]
    parts = [_case_table(group) for group in timed] or [_verdicts(records)]
    parts += _other_rows(records)
    text = "\n\n".join([*parts, _wrapped(reasons.summary_line(records), "")])
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def _case_table(group: rows.CaseRows) -> str:
    """One case: heading, then its timed rows, fastest first."""
    time = units.time_scale(group.first.device_kind, map(rows.time_s, group.timed))
    rate = tables.rate_scale(group.first)
    heads = ["implementation", f"{time.unit}", "±", rate.unit, "ceiling", f"plan {time.unit}", "workspace", "flags"]
    lines = [
        [
            group.label(record),
            time.show(rows.time_s(record)),
            units.percent(rows.spread(record)),
            rate.show(rows.rate(record), 3),
            units.percent(rows.share(record)),
            time.show(record.plan_s.median if record.plan_s else None, 3),
            units.size(record.workspace_bytes),
            ", ".join(map(units.prose, record.flags)),
        ]
        for record in group.timed
    ]
    return f"{_heading(group, rate)}\n{_table(heads, lines, words={0, 7})}"


def _heading(group: rows.CaseRows, rate: units.Scale) -> str:
    """Name, shape, bytes and ceiling of a case, wrapped."""
    known = group.ceiling
    parts = [f"{group.first.case}: {rows.describe(group.first.shape)}", *_traffic(group)]
    if known and known.ceiling_s and known.traffic_bytes:
        by = f" by {known.ceiling_by}" if known.ceiling_by else ""
        parts.append(f"ceiling {rate.show(known.traffic_bytes / known.ceiling_s, 3)} {rate.unit}{by}")
    return textwrap.fill("; ".join([*parts, *tables.floor_of(group)]), WIDTH, subsequent_indent="  ")


def _traffic(group: rows.CaseRows) -> list[str]:
    moved, flops = group.first.traffic_bytes, group.first.flops
    parts = [] if moved is None else [units.size(moved)]
    return [*parts, f"{units.flops(flops)}, by which it is bound"] if flops and rows.is_arithmetic(group.first) else parts


def _verdicts(records: Sequence[Record]) -> str:
    """One line a row where they are few, else one line an implementation; errors are shares of what was allowed."""
    if len(records) <= _LISTED:
        lines = [[record.row, record.case, record.status, units.of_allowed(rows.told_error([record]))] for record in records]
        return _table(["implementation", "case", "verdict", "of allowed"], lines, words={0, 1, 2})
    groups: dict[str, list[Record]] = collections.defaultdict(list)
    for record in records:
        groups[record.row].append(record)
    statuses = [status for status in STATUSES if any(record.status == status for record in records)]
    lines = []
    for name, group in groups.items():
        counts = collections.Counter(record.status for record in group)
        error = units.of_allowed(rows.told_error(group))
        lines.append([name, *(str(counts[status] or units.MISSING) for status in statuses), error])
    return _table(["implementation", *statuses, "worst error"], lines, words={0})


def _other_rows(records: Sequence[Record]) -> Iterator[str]:
    """Rows gathered by reason, with the whole of it; what is to be acted on comes last, where it stays in sight."""
    for reason in reversed(reasons.reasons(records)):
        head = f"{reason.status}: {reason.names}; {reason.count}"
        body = "\n".join(_wrapped(line, "    ") for line in reason.text.splitlines())
        cases = reason.cases
        where = "\n" + _wrapped(f"on {', '.join(cases)}", "    ") if len(cases) <= 3 else ""
        yield f"{_wrapped(head, '')}{where}\n{body}"


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def _table(heads: Cells, lines: list[Cells], words: set[int]) -> str:
    """Set a table; columns not in `words` are numbers and go right, empty columns go, words wrap to fit WIDTH."""
    kept = [i for i in range(len(heads)) if any(line[i] not in ("", units.MISSING) for line in lines) or i == 0]
    heads, lines = [heads[i] for i in kept], [[line[i] for i in kept] for line in lines]
    wrap = [i for i, source in enumerate(kept) if source in words]
    natural = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    room = WIDTH - sum(width for i, width in enumerate(natural) if i not in wrap) - 2 * (len(kept) - 1)
    for i, width in zip(wrap, _shares([natural[i] for i in wrap], room), strict=True):
        natural[i] = width
        lines = [[*line[:i], _fold(line[i], width), *line[i + 1 :]] for line in lines]
    rule = ["-" * width for width in natural]  # set here, since tabulate pads heads and the width counts
    align = ["left" if i in wrap else "right" for i in range(len(kept))]
    text: str = tabulate.tabulate([heads, rule, *lines], tablefmt="plain", disable_numparse=True, colalign=align)
    return text


def _shares(wanted: list[int], room: int) -> list[int]:
    """Divide `room` columns: what is wanted if it fits, else the last give way first, to 20, then the widest, to 12."""
    given = list(wanted)
    while sum(given) > room and max(given) > 12:
        wide = [i for i, width in enumerate(given) if i and width > 20]
        given[wide[-1] if wide else given.index(max(given))] -= 1
    return given


def _fold(cell: str, width: int) -> str:
    """Break a long cell over lines: at spaces, before a "[", else anywhere."""
    if len(cell) <= width:
        return cell
    head, bracket, tail = cell.partition("[")
    parts = [head, bracket + tail] if bracket and len(head) <= width else [cell]
    return "\n".join("\n".join(textwrap.wrap(part, width, break_on_hyphens=False)) for part in parts)

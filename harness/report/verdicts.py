"""A comparison as people read it: lines for a terminal, Markdown for a comment, and plain data for `--json`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tabulate

from harness import compare
from harness.compare import CONFIDENCE, VERDICTS, Judged
from harness.costs import Growth
from harness.difference import Difference
from harness.groups import Group
from harness.record import Record
from harness.report import units
from harness.report.markdown import code, escape

#: Rows that a comment shows before it says how many more there are.
MOST = 50
#: Rows that a line in the terminal names, and characters of a reason: records have the whole of both.
LISTED, LENGTH = 4, 200
_UNITS: Mapping[str, Callable[[float], str]] = {
    "bytes": units.size, "joules": units.joules, "seconds": units.seconds, "count": "{:g}".format,
}
#: Verdicts that nobody needs to look at row by row.
CALM = ("SAME", "FASTER", "NEW")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that a comparison found.

    old, new     what was compared, in words
    threshold    as asked for, or None for each device kind's own
    unjudged     rows without a time on either side, by why
    notes        remarks on the whole, each a sentence
    incomplete   what is not measured yet, or never will be where the run was broken off
    """

    old: str
    new: str
    judged: Sequence[Judged]
    growths: Sequence[Growth] = ()
    groups: Sequence[Group] | None = None
    unjudged: Mapping[str, int] = dataclasses.field(default_factory=dict)
    threshold: float | None = None
    strict_peers: bool = False
    notes: Sequence[str] = ()
    incomplete: str | None = None

    @property
    def exit_code(self) -> int:
        """As `compare` has it; 2, an error, where something is left to be measured."""
        return 2 if self.incomplete else compare.exit_code(self.judged, self.groups, self.strict_peers)

    @property
    def counts(self) -> dict[str, int]:
        """How many rows have each verdict, worst first; none is left out for being 0."""
        found = collections.Counter(row.verdict for row in self.judged)
        return {verdict: found[verdict] for verdict in VERDICTS}

    def all_notes(self) -> list[str]:
        """What changed beside the rows, and what is not among them."""
        made = [*self.notes, *([f"Incomplete: {self.incomplete}."] if self.incomplete else [])]
        changed = compare.toolchain_changes(self.judged)
        if changed:
            made.append("Changed between the two: " + ", ".join(f"{name} {a} -> {b}" for name, a, b in changed) + ".")
        across = sum(compare.is_across_gpus(row.pair) and row.difference is not None for row in self.judged)
        if across and self.threshold is None:
            made.append(
                f"Two GPUs of the kind took the times of {units.count(across, 'row')}, held to"
                f" {100 * compare.ACROSS_GPUS:g}%: unchanged kernels differ by as much. pagedbench ab on one GPU sees less."
            )
        shift = compare.common_shift(self.judged, self.threshold)
        if shift is not None:
            made.append(f"Half of all rows moved by {change(shift)} or more: look at the device and the toolchain first.")
        made += [f"Not judged: {units.count(number, 'row')} {why}." for why, number in self.unjudged.items()]
        return made


def headline(comparison: Comparison) -> str:
    """Return "2 SLOWER, 1 UNSURE, 208 SAME"; what decides stands first."""
    found = [f"{number} {verdict}" for verdict, number in comparison.counts.items() if number]
    return ("INCOMPLETE: " if comparison.incomplete else "") + (", ".join(found) or "nothing to judge")


def change(ratio: float) -> str:
    """Return a ratio of times as "+2.1%"; from twice on as "3.4 times"."""
    return f"{100 * (ratio - 1):+.2f}%" if ratio < 2 else f"{ratio:.2f} times"


def spread(difference: Difference | None) -> str:
    """Return a confidence interval as "+1.8% to +2.4%"."""
    if difference is None:
        return units.MISSING
    low, high = difference.interval(CONFIDENCE)
    return f"{change(low)} to {change(high)}"


def terminal(comparison: Comparison) -> str:
    """Return what `compare` and `ab` print: the verdict, rows that are not SAME, costs that grew, notes."""
    parts = [f"{headline(comparison)}: {comparison.new} against {comparison.old}"]
    if comparison.groups is not None:
        heads = ["verdict", "implementation", "rows", "change", "95% interval", "why"]
        parts.append(_plain(heads, [_group_cells(group) for group in comparison.groups]))
    rows = [row for row in worst_first(comparison.judged) if row.verdict != "SAME"]
    timed = [row for row in rows if row.difference is not None]
    if timed:
        heads = ["verdict", "row", "case", "old", "new", "change", "95% interval"]
        parts.append(_plain(heads, [_cells(row) for row in timed]))
    parts += _reasons(rows)
    parts += [cost_line(growth) for growth in comparison.growths]
    text = "\n".join([*parts, *comparison.all_notes()])
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def _reasons(rows: Sequence[Judged]) -> Iterator[str]:
    """A line for each verdict and reason, with the rows that it is of."""
    found: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for row in rows:
        found[row.verdict, reason_of(row)].append(f"{label(row.record)} on {row.record.case}")
    for (verdict, why), names in found.items():
        more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
        yield f"{verdict} {', '.join(names[:LISTED])}{more}: {why}"


def markdown(comparison: Comparison) -> str:
    """Return a page that fits a pull request's comment: the verdict first, then rows to look at, the rest folded away."""
    parts = [f"### {headline(comparison)}", f"{escape(comparison.new)} against {escape(comparison.old)}."]
    if comparison.groups is not None:
        cells = [[cell if i else f"**{cell}**" for i, cell in enumerate(_group_cells(g))] for g in comparison.groups]
        lines = [[line[0], code(line[1]), *map(escape, line[2:])] for line in cells]
        parts.append(_pipe(["verdict", "implementation", "rows", "change", "95% interval", "why"], lines))
    rows = worst_first(comparison.judged)
    loud = [row for row in rows if row.verdict not in CALM]
    parts += list(_row_table(loud))
    if comparison.growths:
        parts.append("Costs that grew:\n\n" + "\n".join(f"- {escape(cost_line(g))}" for g in comparison.growths[:MOST]))
        if len(comparison.growths) > MOST:
            parts.append(f"and {len(comparison.growths) - MOST} more costs.")
    parts += [escape(note) for note in comparison.all_notes()]
    calm = [row for row in rows if row.verdict in CALM]
    if calm:
        parts += [f"<details><summary>{units.count(len(calm), 'other row')}</summary>", *_row_table(calm), "</details>"]
    return "\n\n".join(parts) + "\n"


def _row_table(rows: Sequence[Judged]) -> Iterator[str]:
    if not rows:
        return
    lines = []
    for row in rows[:MOST]:
        cells = _cells(row)
        lines.append([f"**{cells[0]}**", code(cells[1]), code(cells[2]), *cells[3:], escape(reason_of(row))])
    yield _pipe(["verdict", "row", "case", "old", "new", "change", "95% interval", "why"], lines)
    if len(rows) > MOST:
        yield f"and {len(rows) - MOST} more rows; `records.jsonl` and `--json` have all."


def worst_first(rows: Sequence[Judged]) -> list[Judged]:
    """Order rows by verdict, then by how far they moved."""
    def badness(row: Judged) -> tuple[int, float]:
        return VERDICTS.index(row.verdict), -abs(row.difference.log_ratio) if row.difference else 0.0

    return sorted(rows, key=badness)


def label(record: Record) -> str:
    """The row with its parameters, as far as it has any."""
    return " ".join([record.row, *(f"{name}={value}" for name, value in record.params.items())])


def _cells(row: Judged) -> list[str]:
    sides = [side.launch_s.median if side and side.launch_s else None for side in (row.pair.old, row.pair.new)]
    scale = units.time_scale(row.record.device_kind, sides)
    times = [units.MISSING if side is None else f"{scale.show(side)} {scale.unit}" for side in sides]
    ratio = units.MISSING if row.difference is None else change(row.difference.ratio)
    return [row.verdict, label(row.record), row.record.case, *times, ratio, spread(row.difference)]


def _group_cells(group: Group) -> list[str]:
    ratio = units.MISSING if group.difference is None else change(group.difference.ratio)
    return [group.verdict, group.row, str(group.num_rows), ratio, spread(group.difference), _brief(group.reason)]


def reason_of(row: Judged) -> str:
    """The reason in brief, and what else changed."""
    return "; ".join([_brief(row.reason), *row.labels])


def _brief(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= LENGTH else f"{words[:LENGTH]} ..."


def cost_line(growth: Growth) -> str:
    """What grew of a row, from what to what."""
    show = _UNITS[growth.cost.unit]
    record = growth.record
    return f"COSTLIER {label(record)} on {record.case}: {growth.cost.name} {show(growth.old)} -> {show(growth.new)}"


#: Heads of columns that hold text and stand left; numbers stand right.
_WORDS = ("verdict", "row", "case", "implementation", "why")


def _plain(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return _table(heads, lines, "simple")


def _pipe(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return _table(heads, lines, "pipe")


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]], style: str) -> str:
    align = ["left" if head in _WORDS else "right" for head in heads]
    text: str = tabulate.tabulate(lines, heads, tablefmt=style, disable_numparse=True, colalign=align)
    return text


def plain_data(comparison: Comparison) -> dict[str, Any]:
    """Return the whole comparison as JSON has it; times in seconds, ratios new over old."""
    thresholds = {**compare.THRESHOLD, "across_gpus": compare.ACROSS_GPUS}
    return {
        "schema": 1,
        "old": comparison.old,
        "new": comparison.new,
        "exit_code": comparison.exit_code,
        "headline": headline(comparison),
        "counts": comparison.counts,
        "threshold": thresholds if comparison.threshold is None else comparison.threshold,
        "rows": [_row_data(row) for row in comparison.judged],
        "groups": None if comparison.groups is None else [_group_data(group) for group in comparison.groups],
        "costs": [
            {**_who(growth.record), "cost": growth.cost.name, "unit": growth.cost.unit, "old": growth.old, "new": growth.new}
            for growth in comparison.growths
        ],
        "unjudged": dict(comparison.unjudged),
        "notes": comparison.all_notes(),
    }


def _who(record: Record) -> dict[str, Any]:
    fields = ("case", "case_digest", "impl", "layout", "device")
    return {**{name: getattr(record, name) for name in fields}, "params": dict(record.params)}


def _numbers(difference: Difference | None) -> dict[str, Any]:
    if difference is None:
        return {"ratio": None, "low": None, "high": None}
    low, high = difference.interval(CONFIDENCE)
    return {"ratio": difference.ratio, "low": low, "high": high}


def _row_data(row: Judged) -> dict[str, Any]:
    sides = {
        f"{name}_s": side.launch_s.median if side and side.launch_s else None
        for name, side in (("old", row.pair.old), ("new", row.pair.new))
    }
    verdict = {"verdict": row.verdict, "reason": row.reason, "labels": list(row.labels)}
    return {**_who(row.record), **verdict, **sides, **_numbers(row.difference)}


def _group_data(group: Group) -> dict[str, Any]:
    fields = {"row": group.row, "num_rows": group.num_rows, "verdict": group.verdict, "reason": group.reason}
    return {**fields, **_numbers(group.difference)}

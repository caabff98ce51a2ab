"""The report's pictures with what belongs to them: a legend beside, a caption, and the same numbers as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from markupsafe import Markup

from harness.record import Record
from harness.report import plots, rows, units
from harness.report.curves import Curves, find_curves
from harness.report.tables import Table

NUM_DRAWN = 8  # more lines in colour than this nobody tells apart; the others are drawn in grey


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture. legend: (sample, name) in the order of the picture; table: its numbers."""

    title: str
    picture: Markup
    legend: Sequence[tuple[Markup, str]]
    caption: str
    table: Table


def styles(records: Iterable[Record]) -> dict[str, plots.Style]:
    """Give every row, by `record.row`, its look in the whole report: colour and dash by implementation, marker by layout.

    Neighbours differ in dash as well: not everybody sees eight colours.
    """
    impls: dict[str, int] = {}
    layouts: dict[str, int] = {}
    made = {}
    for record in records:
        if record.role == "implementation":
            impl, layout = impls.setdefault(record.impl, len(impls)), layouts.setdefault(record.layout, len(layouts))
            made[record.row] = plots.Style(
                colour=impl % plots.NUM_COLOURS, dash=impl % plots.NUM_DASHES,
                marker=layout % len(plots.MARKERS),
            )
    return made


def curve_figures(records: Sequence[Record]) -> list[Figure]:
    """Return a figure for every curve: rate against context, block size, batch, tokens, copies."""
    looks = styles(records)
    return [_curve_figure(curves, looks) for curves in find_curves(rows.by_case(records))]


def _curve_figure(curves: Curves, looks: Mapping[str, plots.Style]) -> Figure:
    rate = curves.rate
    ranked = curves.ranked()
    drawn = {label: looks[curves.points[label][0][1].row] for label in ranked[:NUM_DRAWN]}
    faint = {label: plots.Style(faint=True) for label in ranked[NUM_DRAWN:]}
    series = [
        plots.Series(name=label, style=style, points=[_point(x, r, label, curves.axis, rate) for x, r in curves.points[label]])
        for label, style in reversed((drawn | faint).items())
    ]
    ceiling = [(x, y / rate.size) for x, y in curves.ceiling]
    title = f"{rate.unit} against {curves.axis}"
    x_label = curves.axis + (" (tokens; k = 1024)" if curves.axis == "context" else "")
    picture = plots.lines(series, ceiling, x_label, rate.unit, f"{title}: {curves.fixed}")
    legend = [(plots.key(style), label) for label, style in drawn.items()]
    legend += [(plots.key(plots.Style(faint=True)), units.count(len(faint), "slower row"))] if faint else []
    legend += [(plots.CEILING_KEY, "measured ceiling")] if ceiling else []
    return Figure(title=title, picture=picture, legend=legend, caption=curves.fixed, table=_curve_table(curves, ranked, rate))


def _point(x: int, record: Record, label: str, axis: str, rate: units.Scale) -> plots.Point:
    done = rows.work(record)
    assert record.launch_s is not None
    assert done is not None
    ends = (time if time > 0 else record.launch_s.median for time in (record.launch_s.high, record.launch_s.low))
    low, high = (done / time / rate.size for time in ends)
    said = f"{label}, {axis} {x}: {rate.show(rows.rate(record), 3)} {rate.unit}"
    said += "" if rows.share(record) is None else f", {units.percent(rows.share(record))} of ceiling"
    return plots.Point(x=x, y=(rows.rate(record) or 0) / rate.size, low=low, high=high, title=said)


def _curve_table(curves: Curves, ranked: Sequence[str], rate: units.Scale) -> Table:
    xs = curves.xs
    lines = [
        (label, *(rate.show(rows.rate(at[x]), 3) if x in at else units.MISSING for x in xs))
        for label in ranked for at in [dict(curves.points[label])]
    ]
    known = dict(curves.ceiling)
    lines += [("measured ceiling", *(rate.show(known.get(x), 3) for x in xs))] if known else []
    return Table(heads=(f"{rate.unit} at {curves.axis}", *map(str, xs)), lines=tuple(lines))


#: what is shown of memory: what it is, and where a record has it
_MEMORY: Sequence[tuple[str, Callable[[Record], int | None]]] = (
    ("declared workspace", lambda r: r.workspace_bytes),
    ("allocator peak", rows.peak_bytes),
)


#: bytes and where: the row and the case
Held = tuple[float, str, str]


def memory_figure(records: Sequence[Record]) -> Figure | None:
    """Return the most memory held over all cases, a line an implementation, or None where nothing was held or measured."""
    by_row, by_impl = _most_held(records, lambda r: r.row), _most_held(records, lambda r: r.impl)
    values = [found[0] for held in by_impl.values() for found in held if found and found[0] > 0]
    if not values:
        return None
    order = sorted(by_impl, key=lambda impl: max(found[0] if found else 0 for found in by_impl[impl]))
    spans = [plots.Span(name=impl, marks=marks) for impl in order if (marks := _memory_marks(by_impl[impl]))]
    kinds = {kind for span in spans for _, kind, _ in span.marks}
    without = [impl for impl in order if not _memory_marks(by_impl[impl])]
    lines = tuple((row, *(cell for found in held for cell in _memory_cells(found))) for row, held in by_row.items())
    heads = ("implementation", *(head for name, _ in _MEMORY for head in (name, "in case")))
    title = "Most memory held over all cases and layouts"
    return Figure(
        title=title, picture=plots.spans(spans, _byte_ticks(min(values), max(values)), title),
        legend=[(plots.key(plots.Style(colour=kind, marker=kind)), _MEMORY[kind][0]) for kind in sorted(kinds)],
        caption=f"Held nothing: {', '.join(without)}." if without else "", table=Table(heads=heads, lines=lines),
    )


def _most_held(records: Iterable[Record], name: Callable[[Record], str]) -> dict[str, list[Held | None]]:
    """The most of each kind of memory, by what `name` makes of a record."""
    most: dict[str, list[Held | None]] = {}
    for record in records:
        if record.role == "implementation" and record.status == "ok":
            held = most.setdefault(name(record), [None] * len(_MEMORY))
            for kind, (_, of) in enumerate(_MEMORY):
                value, known = of(record), held[kind]
                if value is not None and (known is None or value > known[0]):
                    held[kind] = (value, record.row, record.case)
    return most


def _memory_marks(held: Sequence[Held | None]) -> list[tuple[float, int, str]]:
    return [
        (found[0], kind, f"{_MEMORY[kind][0]}: {units.size(found[0])}, {found[1]} in {found[2]}")
        for kind, found in enumerate(held) if found and found[0] > 0
    ]


def _memory_cells(found: Held | None) -> tuple[str, str]:
    return (units.size(found[0]), found[2] if found[0] else units.MISSING) if found else (units.MISSING, units.MISSING)


def _byte_ticks(least: float, most: float) -> list[tuple[float, str]]:
    """Powers of ten around all values; every third one where there are many."""
    first, last = math.floor(math.log10(least)), max(math.ceil(math.log10(most)), math.floor(math.log10(least)) + 1)
    step = 1 if last - first <= 5 else 3
    first -= first % step
    last += -(last - first) % step
    return [(10.0**n, units.round_size(10.0**n)) for n in range(first, last + 1, step)]

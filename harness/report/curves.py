"""Cases that differ in one thing only, found by their shapes: the curves of a report.

Two cases belong to one curve if everything in their shapes is equal but the one thing on the x axis (and their names).
A context or batch needs sequences of one length; ragged batches are on no such axis and stay in the tables.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.record import Record
from harness.report import rows, tables, units

MIN_POINTS = 3  # two points are a bar, no curve

Shape = Mapping[str, Any]
#: takes a shape; returns the value on the axis and all that must be equal, or None for a case that is not on this axis
Axis = Callable[[Shape], tuple[int, Shape] | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """One picture: several rows over one axis, and the ceiling. `fixed` says in words what all its cases share.

    points     label -> (x, record), x ascending
    rate       the unit of all rates
    ceiling    (x, bytes a second); none where arithmetic binds
    """

    axis: str
    fixed: str
    rate: units.Scale
    points: Mapping[str, tuple[tuple[int, Record], ...]]
    ceiling: tuple[tuple[int, float], ...]

    @property
    def xs(self) -> tuple[int, ...]:
        """Every value on the axis that some row reached, ascending."""
        return tuple(sorted({x for points in self.points.values() for x, _ in points}))

    def ranked(self) -> list[str]:
        """Labels, the best first: by the mean over all cases of the rate over the best rate; a missing case counts 0."""
        best: dict[int, float] = collections.defaultdict(float)
        for points in self.points.values():
            for x, record in points:
                best[x] = max(best[x], rows.rate(record) or 0)
        scores = {
            label: sum((rows.rate(record) or 0) / (best[x] or 1) for x, record in points)
            for label, points in self.points.items()
        }
        return sorted(scores, key=lambda label: -scores[label])


def _context(shape: Shape) -> tuple[int, Shape] | None:
    length = _uniform(shape)
    return (length, _without(shape, "seq_lens")) if length else None


def _batch(shape: Shape) -> tuple[int, Shape] | None:
    length = _uniform(shape)
    one = {"seq_lens": length, "q_lens": rows.whole_numbers(shape, "q_lens")[:1]}
    return (len(shape["seq_lens"]), {**_without(shape), **one}) if length else None


def _field(name: str) -> Axis:
    """The axis of a field that is one number of at least 1."""

    def place(shape: Shape) -> tuple[int, Shape] | None:
        value = shape.get(name)
        return (value, _without(shape, name)) if type(value) is int and value > 0 else None

    return place


def _uniform(shape: Shape) -> int | None:
    """The one length of all sequences, where they have one and equally many queries; None for 0 tokens."""
    lens, q_lens = set(rows.whole_numbers(shape, "seq_lens")), set(rows.whole_numbers(shape, "q_lens"))
    return max(0, *lens) or None if len(lens) == 1 and len(q_lens) <= 1 else None


def _without(shape: Shape, *fields: str) -> Shape:
    return {name: value for name, value in shape.items() if name not in ("name", *fields)}


AXES: Mapping[str, Axis] = {
    "context": _context,
    "block size": _field("block_size"),
    "batch": _batch,
    "tokens": _field("num_tokens"),
    "copies": _field("num_copies"),
}


def find_curves(groups: Sequence[rows.CaseRows]) -> list[Curves]:
    """Return every curve of at least MIN_POINTS cases, by axis."""
    found = []
    for axis, place in AXES.items():
        families: dict[str, dict[int, rows.CaseRows]] = collections.defaultdict(dict)
        for group in groups:
            placed = place(group.first.shape)
            if placed and group.timed:
                bound = rows.is_arithmetic(group.first)
                key = json.dumps([group.first.run, group.first.device, bound, placed[1]], sort_keys=True, default=str)
                families[key].setdefault(placed[0], group)  # one shape under two names: the first; both have tables
        made = [_curves(axis, family) for family in families.values() if len(family) >= MIN_POINTS]
        found += [curves for curves in made if len(curves.xs) >= MIN_POINTS]
    return found


def _curves(axis: str, family: Mapping[int, rows.CaseRows]) -> Curves:
    points: dict[str, list[tuple[int, Record]]] = collections.defaultdict(list)
    ceiling = []
    for x, group in sorted(family.items()):
        for record in group.timed:
            if record.role == "implementation" and rows.rate(record):
                points[group.label(record)].append((x, record))
        known = group.ceiling
        if known and known.ceiling_s and known.traffic_bytes:
            ceiling.append((x, known.traffic_bytes / known.ceiling_s))
    first = next(iter(family.values())).first
    return Curves(
        axis=axis, fixed=_fixed(axis, first.op, first.shape), rate=tables.rate_scale(first),
        points={label: tuple(of) for label, of in points.items()}, ceiling=tuple(ceiling),
    )


def _fixed(axis: str, op: str, shape: Shape) -> str:
    """Say what the cases share: the shape in words, without what varies."""
    drop = {"context": "seq_lens", "batch": "seq_lens", "block size": "block_size"}.get(axis, f"num_{axis}")
    words = [op, rows.describe(_without(shape, drop))]
    if axis == "context":
        words.insert(1, f"batch {len(shape['seq_lens'])}")
    if axis == "batch":
        words.insert(1, f"context {shape['seq_lens'][0]}")
    return ", ".join(words)

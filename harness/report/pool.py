"""What `pagedbench memory` found, as a report shows it: whose a pool's slots are, an allocator a bar, and its pictures."""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from harness.names import UsageError
from harness.report import charts, rows, units
from harness.report.figures import Figure
from harness.report.tables import Table

WASTE, SCHEMA = "waste.jsonl", 1
#: the parts of a pool: a line's field, and what it is
PARTS = (("tokens", "tokens"), ("internal", "internal fragmentation"), ("external", "external fragmentation"), ("free", "free"))
#: bytes of pictures that a report carries, at most: with them it must stay small enough to be mailed
MOST_BYTES = 500_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """A run of `pagedbench memory`: its lines, and its pictures as (name, PNG). notes: what was left out, and why."""

    lines: Sequence[Mapping[str, Any]]
    pictures: Sequence[tuple[str, bytes]] = ()
    notes: Sequence[str] = ()


def read(folder: Path) -> Pool:
    """Read what `pagedbench memory --out` wrote; raises UsageError where there is none of it."""
    try:
        texts = (folder / WASTE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {folder / WASTE}: {error.strerror}; `pagedbench memory --out DIR` writes it") from error
    lines = [line for text in texts if (line := _line(text))]
    if not lines:
        raise UsageError(f"{folder / WASTE} has no line of schema {SCHEMA} that says whose a pool's slots were")
    left_out = len([text for text in texts if text.strip()]) - len(lines)
    notes = [f"{units.count(left_out, 'line')} of {WASTE} could not be read"] if left_out else []
    pictures, total = [], 0
    for file in sorted(folder.glob("*.png")):
        data = file.read_bytes()
        total += len(data)
        if total > MOST_BYTES or not data.startswith(b"\x89PNG"):
            notes.append(f"{file.name} is not shown: {'no PNG' if total <= MOST_BYTES else 'the pictures are too large'}")
        else:
            pictures.append((file.stem, data))
    return Pool(lines=lines, pictures=pictures, notes=notes)


def _line(text: str) -> Mapping[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_known = isinstance(line, dict) and line.get("schema") == SCHEMA and line.get("kind") == "memory"
    return line if is_known and all(rows.is_number(line.get(field)) for field, _ in PARTS) else None


def pool_figures(pool: Pool) -> list[Figure]:
    """Return a figure for each trace: a bar an allocator, in the order of the file."""
    traces: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for line in pool.lines:
        traces[str(line.get("trace"))].append(line)
    return [_figure(trace, lines) for trace, lines in traces.items()]


def _figure(trace: str, lines: Sequence[Mapping[str, Any]]) -> Figure:
    bars = [
        charts.Bar(name=str(line.get("allocator")), parts=[
            (line[field], f"{line.get('allocator')}: {units.percent(line[field])} {what}") for field, what in PARTS
        ])
        for line in lines
    ]  # fmt: skip
    title = f"Whose the slots of a pool are: {trace}"
    cells = tuple(
        (str(line.get("allocator")), *(units.percent(line[field]) for field, _ in PARTS), _plain(line, "mean_running"),
         _plain(line, "num_preemptions"), _plain(line, "copied_tokens"))
        for line in lines
    )  # fmt: skip
    heads = ("allocator", *(what for _, what in PARTS), "sequences at once", "preemptions", "tokens copied")
    return Figure(
        title=title, picture=charts.shares(bars, title), table=Table(heads=heads, lines=cells),
        legend=[(charts.part_key(number), what) for number, (_, what) in enumerate(PARTS)],
        caption=f"Share of all slots, over all steps of {_plain(lines[0], 'num_requests')} requests.",
    )  # fmt: skip


def _plain(line: Mapping[str, Any], field: str) -> str:
    return units.plain(line[field]) if rows.is_number(line.get(field)) else units.MISSING


def embedded(pool: Pool) -> list[tuple[str, Markup]]:
    """Return each picture's name, and its data as an address that needs no network."""
    return [(name, Markup("data:image/png;base64,") + base64.b64encode(data).decode()) for name, data in pool.pictures]

"""The speed of light: in how many seconds the best reader at hand reads a case's own blocks, and does nothing else.

Readers are entries of the registry with the role "reader". Each is tried in each of its layouts with each combination
of its declared parameters, on the timed inputs; its checksum proves that it read every byte. The best two are then
visited between the rows they are the ceiling of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from harness.ops.case import Case
from harness.ops.layouts import Layout
from harness.ops.contract import Staged
from harness.registry import Entry, Registry
from harness.row import Row

NUM_BEST = 2


def best_readers(
    registry: Registry, case: Case, make_row: Callable[[Entry, dict[str, Any]], Row], stage: Callable[[Layout], Staged]
) -> list[Row]:
    """Return the rows of the fastest readers of `case`, verified and ready to be visited; [] where none can run."""
    tried: list[tuple[float, Row]] = []
    for entry in registry.entries(roles=("reader",)):
        for params in combinations(entry):
            row = make_row(entry, params)
            if row.entry.impl.why_not(case, row.device.kind) is None and _try(row, stage(entry.layout)):
                tried.append((row.samples.pop(), row))
    tried.sort(key=lambda pair: pair[0])
    for _, row in tried[NUM_BEST:]:
        row.release()
    return [row for _, row in tried[:NUM_BEST]]


def combinations(entry: Entry) -> list[dict[str, Any]]:
    """Every combination of an entry's declared parameters, defaults first."""
    names = list(entry.impl.params)
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*entry.impl.params.values())]


def _try(row: Row, staged: Staged) -> bool:
    """Prepare, verify by checksum, take one visit."""
    return row.prepare() and row.check(staged, "timed") and row.make_timer(staged) and row.visit() and bool(row.samples)

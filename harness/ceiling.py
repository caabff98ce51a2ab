"""The speed of light: in how many seconds the best reader at hand reads a case's own blocks, and does nothing else.

Readers are entries of the registry with the role "reader". Each is tried in each of its layouts with each combination
of its declared parameters, on the timed inputs; its checksum proves that it read every byte. The best two are then
visited between the rows they are the ceiling of. A launch that does nothing (role "floor") is visited there, too: it bounds
rows so small that reading is not what takes their time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from harness import checks
from harness.ops.contract import Staged
from harness.ops.layouts import Layout
from harness.row import Row, Stage

NUM_BEST = 2


def fastest(readers: Sequence[Row], stage: Callable[[Layout], Staged]) -> list[Row]:
    """Return the fastest of these rows, verified and ready to be visited; [] where none can run."""
    tried: list[tuple[float, Row]] = []
    for row in readers:
        layout = row.entry.layout
        if row.entry.impl.why_not(row.case, row.device.kind) is None and _try(row, functools.partial(stage, layout)):
            tried.append((row.samples.pop(), row))
    tried.sort(key=lambda pair: pair[0])
    for _, row in tried[NUM_BEST:]:
        row.release()
    return [row for _, row in tried[:NUM_BEST]]


def floor(rows: Sequence[Row], stage: Callable[[Layout], Staged]) -> list[Row]:
    """Return those of `rows` that can be launched, ready to be visited. They do nothing, so that nothing is verified."""
    ready = []
    for row in rows:
        of_layout = functools.partial(stage, row.entry.layout)
        if row.entry.impl.why_not(row.case, row.device.kind) is None and row.prepare() and row.make_timer(of_layout):
            ready.append(row)
    return ready


def _try(row: Row, stage: Stage) -> bool:
    """Prepare, verify by checksum, take one visit."""
    verified = row.prepare() and checks.family(row, stage, "timed", sets=1)
    return verified and row.make_timer(stage) and row.visit() and bool(row.samples)

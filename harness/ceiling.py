"""The speed of light: in how many seconds the best reader at hand reads a case's own blocks, and does nothing else.

Readers are entries of the registry with the role "reader". Each is tried with each combination of its declared parameters, on
the timed inputs; its checksum proves that it read every byte. The best two are then visited between the rows they are the
ceiling of, or by themselves in a sweep (commands/ceiling.py). A launch that does nothing (role "floor") is visited there, too:
it bounds rows so small that reading is not what takes their time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from harness import checks
from harness.ops.contract import Staged
from harness.ops.layouts import Layout
from harness.row import Row, Stage

NUM_BEST = 2
#: Visits by which a reader is tried, at most: one with the clock held down says nothing.
TRIES = 3


def fastest(readers: Sequence[Row], stage: Callable[[Layout], Staged], tell: Callable[[Row], object]) -> list[Row]:
    """Return the fastest of these rows, verified and ready to be visited; [] where none can run. `tell` is told of each tried.

    Those left behind are released, and say in their ledger by what time they were.
    """
    tried: list[tuple[float, Row]] = []
    for row in readers:
        tell(row)
        layout = row.entry.layout
        if row.entry.impl.why_not(row.case, row.device.kind) is None and _try(row, functools.partial(stage, layout)):
            tried.append((row.samples.pop(), row))
        else:
            row.release()
    tried.sort(key=lambda pair: pair[0])
    for seconds, row in tried[NUM_BEST:]:
        row.remark("timed", f"not timed: {NUM_BEST} readers were faster in one visit each (this one: {seconds:.4g} s)")
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
    """Prepare, verify by checksum, take one visit. Inputs first: a reader that is there before them would seem to hold them."""
    ready = row.attempt(stage, "inputs") and row.prepare()
    if not (ready and checks.family(row, stage, "timed", sets=1) and row.make_timer(stage)):
        return False
    while row.status == "ok" and not row.samples and row.discarded < TRIES:
        row.visit()
    if row.status == "ok" and not row.samples:
        row.flags.append(f"no time: every one of {row.discarded} visits was throttled")
    return row.status == "ok" and bool(row.samples)

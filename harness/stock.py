"""What the rows of a case read and write: inputs made once a family, converted once a layout, for all rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.guards import restore
from harness.hazards import NEEDLES, PLAIN, Hazards, as_asked
from harness.ops import operator
from harness.ops.case import Case
from harness.ops.contract import Inputs, Staged
from harness.ops.layouts import LAYOUTS, Layout
from harness.registry import TAILS
from harness.relations import Shelf
from harness.row import Row

if TYPE_CHECKING:
    from harness.session import Session

#: Rotated inputs hold at least so many times the last-level cache: at 4 times a warm remainder still shows (FACTS).
CACHES = {"cuda": 16, "cpu": 2}
#: Bytes of one layout's input sets, at most, where a case has small traffic and a large pool.
ROTATION_BYTES = {"cuda": 8 << 30, "cpu": 256 << 20}
#: Bytes of outputs, at most, that rows have to themselves while they are timed. A row that has waits for late changes to them
#: with all others, and not alone.
OUTPUT_BYTES = {"cuda": 4 << 30, "cpu": 128 << 20}


class Stock:
    """The tensors of one case; `shelf` holds those that relations vary."""

    def __init__(self, session: Session, case: Case) -> None:
        self._session, self._case, self._device = session, case, session.device
        self._inputs: dict[str, Inputs] = {}
        self._staged: dict[tuple[str, str], Staged] = {}
        self.shelf: Shelf = {}
        self._left_for_outputs = min(OUTPUT_BYTES[session.device.kind], session.device.memory_bytes // 32)

    @property
    def num_sets(self) -> int:
        """Sets of inputs to rotate over."""
        case, kind = self._case, self._device.kind
        wanted = math.ceil(CACHES[kind] * self._device.cache_bytes / max(case.traffic_bytes, 1))
        affordable: int = min(ROTATION_BYTES[kind], self._device.memory_bytes // 16) // max(case.cache_bytes, 1)
        return max(2, min(wanted, affordable, 256))

    def needed_bytes(self, row: Row, rows: Sequence[Row]) -> int:
        """What the tensors take while `row` of `rows` is worked: in its layout, and in those of the rows before it."""
        sets = self.num_sets if self._session.options.bench else 2
        order = list(dict.fromkeys(other.entry.layout for other in rows))
        kinds = len({for_entry(other, PLAIN).name for other in rows})  # each has inputs of its own
        return kinds * self._case.staged_bytes(sets, order[: order.index(row.entry.layout) + 1])

    def stage(self, family: Hazards, layout: Layout, layers: int | None = None) -> Staged:
        """The tensors of a family in a layout, `layers` sets of them; None is as many as a check takes."""
        key = (family.name, layout.name)
        with self._session.phase("inputs"):
            if family.name not in self._inputs:
                op = operator(self._case.op)
                layers = op.rounds(self._case, family) if layers is None else layers
                self._inputs[family.name] = op.build(self._case, family, layers=layers, device=self._device.name)
            if key not in self._staged:
                self._staged[key] = self._inputs[family.name].stage(layout)
            self._device.synchronize()
        return self._staged[key]

    def restore(self, row: Row, *families: Hazards) -> None:
        """Make inputs again that a row has changed: others are still to read them."""
        if row.trial is None or not row.trial.damaged:
            return
        self.shelf.clear()
        for family in (for_entry(row, family) for family in families):
            layers = self._inputs[family.name].num_layers
            fresh = operator(self._case.op).build(self._case, family, layers=layers, device=self._device.name)
            for (name, layout), staged in self._staged.items():
                if name == family.name:
                    restore(staged.read, fresh.stage(LAYOUTS[layout]).read)

    def give_outputs(self, row: Row) -> None:
        """Let a row's timed launches have outputs of their own, as far as the budget for them goes."""
        assert row.timed_on is not None
        own = copy.copy(row.timed_on())
        size = sum(guarded.size for guarded in own.written)
        if size <= self._left_for_outputs and own.renew():
            self._left_for_outputs -= size
            row.timed_on, row.owns_outputs = lambda: own, True

    def forget_checked(self) -> None:
        """Free what the check used, so that timed inputs lie elsewhere."""
        self.shelf.clear()
        names = {as_asked(family, tails, True).name for family in (PLAIN, NEEDLES) for tails in TAILS}
        self._inputs = {name: inputs for name, inputs in self._inputs.items() if name not in names}
        self._staged = {key: staged for key, staged in self._staged.items() if key[0] not in names}


def for_entry(row: Row, family: Hazards) -> Hazards:
    """The family as the row's entry takes it."""
    return as_asked(family, row.entry.impl.tails, bool(getattr(row.case, "window", None)))

"""The whole flow: case -> inputs -> prepare -> launch -> check -> time -> record.

A wrong answer stops at check: it is recorded, never timed. Whatever cannot be run is a record with its reason.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from harness import checks
from harness.alive import telling
from harness.ceiling import fastest, floor
from harness.conclusion import conclude
from harness.hazards import NEEDLES, PLAIN, TIMED
from harness.ops.case import Case
from harness.patience import why_too_long
from harness.row import Row
from harness.stock import Stock, for_entry
from harness.words import of_error

if TYPE_CHECKING:
    from harness.session import Session

Progress = Callable[[str, int | None], None]


class CaseRun:
    """All rows of one case."""

    def __init__(self, session: Session, case: Case, rows: Sequence[Row], progress: Progress) -> None:
        self.session, self.case, self.rows, self._tell = session, case, rows, progress
        self._doing: tuple[str, int | None] = (f"inputs {case}", None)
        self.device = session.device
        self._stock = Stock(session, case)

    def settled(self) -> Iterator[Row]:
        """Yield refused rows first, then wrong and failed ones as they come, then what was right."""
        admitted = []
        for row in self.rows:
            refusal = self._refuse(row)
            if refusal:
                row.end(*refusal)
                yield row
            else:
                admitted.append(row)
        if self.session.options.sweep:
            yield from self._swept(admitted)
            return
        right = []
        for row in admitted:
            with self._alive("check"):
                passed = self._check(row)
            if passed:
                right.append(row)
            else:
                row.release()
                yield row
        checked, right = right, []
        for row in checked:
            with self._alive("check"):
                passed = checks.late(row)
            if passed:
                right.append(row)
            else:
                row.release()
                yield row
        if self.session.options.bench:
            self._stock.forget_checked()
            with self._alive("time"):
                self._time([row for row in right if self._is_timed(row)])
        for row in right:
            yield row

    def progress(self, doing: str, row: int | None) -> None:
        """Tell what is done, and to which row."""
        self._doing = (doing, row)
        self._tell(doing, row)

    @contextlib.contextmanager
    def _alive(self, phase: str) -> Iterator[None]:
        """Within a phase, tell it again and again while inputs are made and truth is computed."""
        with self.session.phase(phase), telling(lambda: self._tell(*self._doing)):
            yield

    def _is_timed(self, row: Row) -> bool:
        if self.case.name in self.session.options.untimed:
            row.remark("timed", "not timed: in this suite the case asks for right or wrong; --case NAME times it")
            return False
        impl, q_len = row.entry.impl, getattr(self.case, "max_q_len", None)
        if self.device.kind not in impl.timed:
            row.remark("timed", f"not timed: the entry says that its time on a {self.device.kind} says nothing")
            return False
        if q_len is not None and q_len < impl.timed_from and not self.session.options.patient:
            least = f"{impl.timed_from} query tokens and more"
            row.remark("timed", f"not timed: it is for {least} (got {q_len}; --patient times it)")
            return False
        return True

    def _refuse(self, row: Row) -> tuple[str, str] | None:
        """Why a row does not run: (status, reason)."""
        try:
            why_not = row.entry.impl.why_not(self.case, self.device.kind) or row.entry.layout.why_not(self.case)
        except Exception as error:
            return "failed", f"whether it can run here: {of_error(error)}"
        if why_not:
            return "unsupported", why_not
        if row.entry.impl.role == "floor":
            return "skipped", "does nothing, so that nothing of it could be right; other rows' records tell its time as floor_s"
        needed, free = self._stock.needed_bytes(row, self.rows), self.device.free_bytes()
        if needed > 0.9 * free:
            return "skipped", (
                f"needs about {needed / 1e9:.1f} GB on {self.device.name} with the layouts before it, "
                f"{free / 1e9:.1f} GB are free (a run of this layout alone needs less)"
            )
        too_long = None if self.session.options.patient else why_too_long(self.case, row.entry.impl, self.device.kind)
        return ("skipped", too_long) if too_long else None

    def _check(self, row: Row) -> bool:
        """Prepare and judge a row on both families of inputs."""
        self.progress(f"check {self.case} {row.entry}", row.number)
        # Tensors first, so that what is measured between is the implementation's own memory.
        stages = {
            family: functools.partial(self._stock.stage, for_entry(row, family), row.entry.layout)
            for family in (PLAIN, NEEDLES)
        }
        if not all(row.attempt(stage, "inputs") for stage in stages.values()) or not row.prepare():
            return False
        passed = all(checks.family(row, stage, family.name) for family, stage in stages.items())
        if passed and row.entry.impl.role != "reader":
            passed = checks.relations(row, stages[PLAIN], self._stock.shelf, self.session.options.relations)
        if passed and self.session.isolated:
            self.progress(f"check {self.case} {row.entry} with wild block ids", row.number)
            passed = checks.wild(row, stages[PLAIN])
        elif passed and self.case.op == "attention":
            row.remark("wild block ids", "not tried: one that is looked up ends the process, which is not a worker")
        self._stock.restore(row, PLAIN, NEEDLES)
        # Outputs of its own let a row wait for late changes while the next one is checked, and spare that one the changes.
        renewed = [stage().renew() for stage in stages.values()]
        if passed and not all(renewed):
            passed = checks.late(row)
        return passed

    def _time(self, rows: Sequence[Row]) -> None:
        """Visit rows in shuffled order, again and again, until each has converged or had its share."""
        if not rows:
            return
        layers, wants_ceiling = self._stock.num_sets, self.session.options.ceiling
        readers = self._readers(layers) if wants_ceiling and any(row.entry.impl.role != "reader" for row in rows) else []
        timed = [row for row in rows if self.make_timer(row)]
        floors = self._floors(timed, layers) if wants_ceiling else []
        self._visit(timed, readers, floors)
        for row in [*rows, *readers, *floors]:
            row.release()

    def _swept(self, readers: Sequence[Row]) -> Iterator[Row]:
        """Yield readers that are wrong or failed; then visit the fastest, beside an empty launch, and yield the rest."""
        layers = self._stock.num_sets
        with self._alive("time"):
            best = self._fastest(readers, layers)
        right = [row for row in readers if row.status == "ok"]
        yield from (row for row in readers if row.status != "ok")
        with self._alive("time"):
            floors = self._floors(best, layers)
            self._visit(best, [], floors)
        for row in [*best, *floors]:
            row.release()
        yield from right

    def _visit(self, timed: Sequence[Row], readers: Sequence[Row], floors: Sequence[Row]) -> None:
        """Take the visits of rows and of what stands beside them, judge what was timed, and say what came of it."""
        self.session.visit(self, [*timed, *readers, *floors])
        medians = [summary.median for row in timed if (summary := row.summary()) is not None]
        with self.session.phase("finish"):
            for row in timed:
                self._judge_timed(row, checks.timed)
            for row in timed:
                self._judge_timed(row, checks.timed_late)
            for row in timed:
                self.progress(f"finish {self.case} {row.entry}", row.number)
                conclude(row, self.session, readers, floors, min(medians, default=0.0))

    def make_timer(self, row: Row) -> bool:
        """Get a right row ready to be visited; False where that failed."""
        self.progress(f"time {self.case} {row.entry}", row.number)
        if row.timed_on is None:
            row.timed_on = functools.partial(
                self._stock.stage, for_entry(row, TIMED), row.entry.layout, self._stock.num_sets
            )
            if row.entry.impl.role != "reader":
                row.attempt(lambda: self._stock.give_outputs(row), "outputs")
        made = row.status == "ok" and row.make_timer(row.timed_on)
        self._stock.restore(row, TIMED)
        return made

    def _readers(self, layers: int) -> list[Row]:
        """The fastest readers of this case's blocks, to be visited beside what they are the ceiling of."""
        # The same bytes whatever the layout: one is enough.
        entries = [entry for entry in self.session.registry.entries(roles=("reader",)) if entry.layout is entry.impl.layouts[0]]
        rows = [Row(self.case, variant, self.device, self.session.nvml) for entry in entries for variant in entry.variants()]
        return self._fastest(rows, layers)

    def _fastest(self, readers: Sequence[Row], layers: int) -> list[Row]:
        def tell(row: Row) -> None:
            self.progress(f"ceiling {self.case} {row.entry}", row.number)

        with self.session.phase("ceiling"):
            return fastest(readers, lambda layout: self._stock.stage(TIMED, layout, layers), tell)

    def _floors(self, rows: Sequence[Row], layers: int) -> list[Row]:
        """Launches that do nothing, in a layout that is staged already."""
        entries = self.session.registry.entries(roles=("floor",))
        wanted = [entry for entry in entries if any(entry.layout is row.entry.layout for row in rows[:1])]
        with self.session.phase("ceiling"):
            made = [Row(self.case, entry, self.device, self.session.nvml) for entry in wanted]
            return floor(made, lambda layout: self._stock.stage(TIMED, layout, layers))

    def _judge_timed(self, row: Row, check: Callable[[Row], bool]) -> None:
        self.progress(f"check {self.case} {row.entry} as it was timed", row.number)
        if row.status == "ok":
            check(row)
            self._stock.restore(row, TIMED)

"""The whole flow: case -> inputs -> prepare -> launch -> check -> time -> record.

A wrong answer stops at check: it is recorded, never timed. Whatever cannot be run is a record with its reason.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from harness import checks
from harness.alive import telling
from harness.ceiling import fastest, floor
from harness.guards import restore
from harness.hazards import NEEDLES, PLAIN, TIMED, Hazards, as_asked
from harness.interval import half_width, is_converged
from harness.ops import operator
from harness.ops.case import Case
from harness.ops.contract import Inputs, Staged
from harness.ops.layouts import LAYOUTS, Layout
from harness.patience import why_too_long
from harness.record import Samples
from harness.registry import TAILS
from harness.relations import Shelf
from harness.row import Row
from harness.words import of_error

if TYPE_CHECKING:
    from harness.session import Session

#: Rotated inputs hold at least so many times the last-level cache: at 4 times a warm remainder still shows (FACTS).
CACHES = {"cuda": 16, "cpu": 2}
#: Bytes of one layout's input sets, at most, where a case has small traffic and a large pool.
ROTATION_BYTES = {"cuda": 8 << 30, "cpu": 256 << 20}
#: Bytes of outputs, at most, that rows have to themselves while they are timed. A row that has waits for late changes to them
#: with all others, and not alone.
OUTPUT_BYTES = {"cuda": 4 << 30, "cpu": 128 << 20}
#: A row that takes so many times as long as the fastest of its case holds no window for power unless asked to.
POWER_TIMES = 2


Progress = Callable[[str, int | None], None]


class CaseRun:
    """All rows of one case. Inputs are made once a family and converted once a layout, for all rows."""

    def __init__(self, session: Session, case: Case, rows: Sequence[Row], progress: Progress) -> None:
        self.session, self.case, self.rows, self._tell = session, case, rows, progress
        self._doing: tuple[str, int | None] = (f"inputs {case}", None)
        self.device = session.device
        self._staged: dict[tuple[str, str], Staged] = {}
        self._inputs: dict[str, Inputs] = {}
        self._shelf: Shelf = {}
        self._left_for_outputs = min(OUTPUT_BYTES[session.device.kind], session.device.memory_bytes // 32)

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
            self._forget(*(as_asked(family, tails, True) for family in (PLAIN, NEEDLES) for tails in TAILS))
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
        needed, free = self._needed_bytes(row), self.device.free_bytes()
        if needed > 0.9 * free:
            return "skipped", (
                f"needs about {needed / 1e9:.1f} GB on {self.device.name} with the layouts before it, "
                f"{free / 1e9:.1f} GB are free (a run of this layout alone needs less)"
            )
        too_long = None if self.session.options.patient else why_too_long(self.case, row.entry.impl, self.device.kind)
        return ("skipped", too_long) if too_long else None

    def _needed_bytes(self, row: Row) -> int:
        """What the case's tensors take while this row is worked: in its layout, and in those of the rows before it."""
        sets = self._num_layers() if self.session.options.bench else 2
        order = list(dict.fromkeys(other.entry.layout for other in self.rows))
        kinds = len({_for_entry(other, PLAIN).name for other in self.rows})  # each has inputs of its own
        return kinds * self.case.staged_bytes(sets, order[: order.index(row.entry.layout) + 1])

    def _check(self, row: Row) -> bool:
        """Prepare and judge a row on both families of inputs."""
        self.progress(f"check {self.case} {row.entry}", row.number)
        # Tensors first, so that what is measured between is the implementation's own memory.
        stages = {
            family: functools.partial(self._stage, _for_entry(row, family), row.entry.layout) for family in (PLAIN, NEEDLES)
        }
        if not all(row.attempt(stage, "inputs") for stage in stages.values()) or not row.prepare():
            return False
        passed = all(checks.family(row, stage, family.name) for family, stage in stages.items())
        if passed and row.entry.impl.role != "reader":
            passed = checks.relations(row, stages[PLAIN], self._shelf, self.session.options.relations)
        if passed and self.session.isolated:
            self.progress(f"check {self.case} {row.entry} with wild block ids", row.number)
            passed = checks.wild(row, stages[PLAIN])
        elif passed and self.case.op == "attention":
            row.remark("wild block ids", "not tried: one that is looked up ends the process, which is not a worker")
        self._restore(row, PLAIN, NEEDLES)
        # Outputs of its own let a row wait for late changes while the next one is checked, and spare that one the changes.
        renewed = [stage().renew() for stage in stages.values()]
        if passed and not all(renewed):
            passed = checks.late(row)
        return passed

    def _restore(self, row: Row, *families: Hazards) -> None:
        """Make inputs again that a row has changed: others are still to read them."""
        if row.trial is None or not row.trial.damaged:
            return
        self._shelf.clear()
        for family in (_for_entry(row, family) for family in families):
            layers = self._inputs[family.name].num_layers
            fresh = operator(self.case.op).build(self.case, family, layers=layers, device=self.device.name)
            for (name, layout), staged in self._staged.items():
                if name == family.name:
                    restore(staged.read, fresh.stage(LAYOUTS[layout]).read)

    def _stage(self, family: Hazards, layout: Layout, layers: int | None = None) -> Staged:
        """The tensors of a family in a layout, `layers` sets of them; None is as many as a check takes."""
        key = (family.name, layout.name)
        with self.session.phase("inputs"):
            if family.name not in self._inputs:
                op = operator(self.case.op)
                layers = op.rounds(self.case, family) if layers is None else layers
                self._inputs[family.name] = op.build(self.case, family, layers=layers, device=self.device.name)
            if key not in self._staged:
                self._staged[key] = self._inputs[family.name].stage(layout)
            self.device.synchronize()
        return self._staged[key]

    def _forget(self, *families: Hazards) -> None:
        """Free what the check used, so that timed inputs lie elsewhere."""
        self._shelf.clear()
        names = {family.name for family in families}
        self._inputs = {name: inputs for name, inputs in self._inputs.items() if name not in names}
        self._staged = {key: staged for key, staged in self._staged.items() if key[0] not in names}

    def _num_layers(self) -> int:
        """Sets of inputs to rotate over."""
        case = self.case
        wanted = math.ceil(CACHES[self.device.kind] * self.device.cache_bytes / max(case.traffic_bytes, 1))
        affordable: int = min(ROTATION_BYTES[self.device.kind], self.device.memory_bytes // 16) // max(case.cache_bytes, 1)
        return max(2, min(wanted, affordable, 256))

    def _time(self, rows: Sequence[Row]) -> None:
        """Visit rows in shuffled order, again and again, until each has converged or had its share."""
        if not rows:
            return
        layers, wants_ceiling = self._num_layers(), self.session.options.ceiling
        readers = self._readers(layers) if wants_ceiling and any(row.entry.impl.role != "reader" for row in rows) else []
        timed = [row for row in rows if self.make_timer(row)]
        floors = self._floors(timed, layers) if wants_ceiling else []
        self.session.visit(self, [*timed, *readers, *floors])
        medians = [summary.median for row in timed if (summary := row.summary()) is not None]
        with self.session.phase("finish"):
            for row in timed:
                self._judge_timed(row, checks.timed)
            for row in timed:
                self._judge_timed(row, checks.timed_late)
            for row in timed:
                self._finish(row, readers, min(medians, default=0.0))
                _hold_against_floor(row, floors)
        for row in [*rows, *readers, *floors]:
            row.release()

    def make_timer(self, row: Row) -> bool:
        """Get a right row ready to be visited; False where that failed."""
        self.progress(f"time {self.case} {row.entry}", row.number)
        if row.timed_on is None:
            row.timed_on = functools.partial(self._stage, _for_entry(row, TIMED), row.entry.layout, self._num_layers())
            if row.entry.impl.role != "reader":
                row.attempt(lambda: self._give_outputs(row), "outputs")
        made = row.status == "ok" and row.make_timer(row.timed_on)
        self._restore(row, TIMED)
        return made

    def _give_outputs(self, row: Row) -> None:
        """Let a row's timed launches have outputs of their own, as far as the budget for them goes."""
        assert row.timed_on is not None
        own = copy.copy(row.timed_on())
        size = sum(guarded.size for guarded in own.written)
        if size <= self._left_for_outputs and own.renew():
            self._left_for_outputs -= size
            row.timed_on, row.owns_outputs = lambda: own, True

    def _readers(self, layers: int) -> list[Row]:
        """The fastest readers of this case's blocks, to be visited beside what they are the ceiling of."""
        # The same bytes whatever the layout: one is enough.
        entries = [entry for entry in self.session.registry.entries(roles=("reader",)) if entry.layout is entry.impl.layouts[0]]
        rows = [Row(self.case, variant, self.device, self.session.nvml) for entry in entries for variant in entry.variants()]
        self.progress(f"ceiling {self.case}", None)
        with self.session.phase("ceiling"):
            return fastest(rows, lambda layout: self._stage(TIMED, layout, layers))

    def _floors(self, rows: Sequence[Row], layers: int) -> list[Row]:
        """Launches that do nothing, in a layout that is staged already."""
        entries = self.session.registry.entries(roles=("floor",))
        wanted = [entry for entry in entries if any(entry.layout is row.entry.layout for row in rows[:1])]
        with self.session.phase("ceiling"):
            made = [Row(self.case, entry, self.device, self.session.nvml) for entry in wanted]
            return floor(made, lambda layout: self._stage(TIMED, layout, layers))

    def _judge_timed(self, row: Row, check: Callable[[Row], bool]) -> None:
        self.progress(f"check {self.case} {row.entry} as it was timed", row.number)
        if row.status == "ok":
            check(row)
            self._restore(row, TIMED)

    def _finish(self, row: Row, readers: Sequence[Row], fastest_s: float) -> None:
        """Everything about a timed row that needs its samples."""
        self.progress(f"finish {self.case} {row.entry}", row.number)
        summary = row.summary()
        if row.status == "ok" and summary is None:
            row.flags.append(f"no time: every one of {row.discarded} visits was throttled")
        if row.status != "ok" or summary is None:
            return
        if not is_converged(summary, self.session.options.width[self.device.kind]):
            row.flags.append(f"never converged: {_how_far(summary)}")
        if row.discarded:
            row.flags.append(f"throttled: {row.discarded} visits discarded")
        row.cross_examine()
        why_not = self._why_no_power(row, summary.median / fastest_s)
        if why_not is None:
            with self.session.phase("power"):
                row.measure_power()
        else:
            row.remark("power", f"not measured: {why_not}")
        self._hold_against_ceiling(row, readers)

    def _why_no_power(self, row: Row, times_fastest: float) -> str | None:
        """A window of a second a row adds up: by default it is held where it says most."""
        wanted = self.session.options.power
        if wanted == "none":
            return "--power none"
        if wanted == "first" and row.entry.layout is not row.entry.impl.layouts[0]:
            return "not the implementation's first layout (--power all)"
        if wanted == "first" and times_fastest > POWER_TIMES:
            return f"it takes more than {POWER_TIMES} times as long as the fastest (--power all)"
        if wanted == "first" and self.case.traffic_bytes < self.device.cache_bytes:
            return "the case moves less than the last-level cache holds (--power all)"
        return None

    def _hold_against_ceiling(self, row: Row, readers: Sequence[Row]) -> None:
        summary = row.summary()
        measured = [(found, reader) for reader in readers if (found := reader.summary()) is not None and reader.status == "ok"]
        if not measured or summary is None:
            return
        ceiling, reader = min(measured, key=lambda pair: pair[0].median)
        row.fields["ceiling_s"] = ceiling.median
        row.fields["ceiling_by"] = f"{reader.entry} {_settings(reader)}".strip()
        row.fields["ceiling_share"] = ceiling.median / summary.median
        if summary.high < ceiling.low:
            row.flags.append("above the ceiling: the measurement is wrong somewhere")


def _hold_against_floor(row: Row, floors: Sequence[Row]) -> None:
    measured = [found.median for other in floors if (found := other.summary()) is not None and other.status == "ok"]
    if measured and row.summary() is not None:
        row.fields["floor_s"] = min(measured)


def _for_entry(row: Row, family: Hazards) -> Hazards:
    """The family as the row's entry takes it."""
    return as_asked(family, row.entry.impl.tails, bool(getattr(row.case, "window", None)))


def _how_far(summary: Samples) -> str:
    share = half_width(summary)
    if share is None:
        return "one visit, which has no interval"
    return f"within {100 * share:.1f}% after {len(summary.samples)} visits"


def _settings(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in row.params.items())

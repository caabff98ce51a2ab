"""The whole flow: case -> inputs -> prepare -> launch -> check -> time -> record.

A wrong answer stops at check: it is recorded, never timed. Whatever cannot be run is a record with its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from harness import checks
from harness.ceiling import fastest
from harness.device import Device, find_device, toolchain
from harness.guards import restore
from harness.hazards import NEEDLES, PLAIN, TIMED, Hazards
from harness.interval import half_width, is_converged
from harness.nvml import Nvml, NvmlMissing
from harness.ops import operator
from harness.ops.case import Case
from harness.ops.contract import Inputs, Staged
from harness.ops.layouts import LAYOUTS, Layout
from harness.options import Options
from harness.record import Record, Samples
from harness.registry import Entry, Registry
from harness.row import Row
from harness.selftest import doubts, selftest

#: Rotated inputs hold at least so many times the last-level cache: at 4 times a warm remainder still shows (FACTS).
CACHES = {"cuda": 16, "cpu": 2}
#: Bytes of one layout's input sets, at most, where a case has small traffic and a large pool.
ROTATION_BYTES = {"cuda": 8 << 30, "cpu": 256 << 20}
#: What a CPU does in seconds and not minutes: bytes of one cache, and multiplications and additions.
CPU_CACHE_BYTES, CPU_FLOPS = 192 << 20, 4e9


Progress = Callable[[str, int | None], None]


class DeviceLost(Exception):
    """The device answers no more; the message says what lost it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One row to be worked: its number in the run, and what it is."""

    number: int
    case: Case
    entry: Entry


def tasks(cases: Sequence[Case], entries: Sequence[Entry]) -> list[Task]:
    """Every entry on every case of its operator, case by case."""
    pairs = [(case, entry) for case in cases for entry in entries if entry.impl.op == case.op]
    return [Task(number=number, case=case, entry=entry) for number, (case, entry) in enumerate(pairs)]


class Session:
    """One run on one device: holds what rows share."""

    def __init__(
        self, options: Options, registry: Registry, device: str | None = None, run: str = "unsaved", isolated: bool = False
    ) -> None:
        self.options, self.registry, self.run, self.isolated = options, registry, run, isolated
        self.spent_s: dict[str, float] = {}
        self.device: Device = find_device(device)
        self.nvml, self.nvml_missing = _find_nvml(self.device)
        _take_library_workspaces(self.device)
        self.selftest = selftest(self.device, self.nvml) if options.bench else {}
        self.doubt = doubts(self.selftest)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `spent_s[name]`; an inner phase's are not counted twice."""
        begin, inner = time.perf_counter(), sum(self.spent_s.values())
        try:
            yield
        finally:
            inside = sum(self.spent_s.values()) - inner
            self.spent_s[name] = self.spent_s.get(name, 0.0) + time.perf_counter() - begin - inside

    def facts(self) -> dict[str, Any]:
        """What the run's records share, as plain data: device, toolchain, self-test, and why there is no NVML."""
        return {
            "device": dataclasses.asdict(self.device),
            "toolchain": toolchain(),
            "selftest": self.selftest,
            "nvml_missing": self.nvml_missing,
        }

    def measure(
        self, cases: Sequence[Case], entries: Sequence[Entry], progress: Progress = lambda *_: None
    ) -> Iterator[Record]:
        """Check and, if the options say so, time every entry of a case's operator on it; a record each."""
        for _, record in self.run_tasks(tasks(cases, entries), progress):
            yield record

    def run_tasks(self, wanted: Sequence[Task], progress: Progress = lambda *_: None) -> Iterator[tuple[int | None, Record]]:
        """Work through tasks, which stand case by case; yield each one's number and record.

        Raises DeviceLost once the device answers no more; the record of the row that lost it has been yielded.
        """
        for _, of_case in itertools.groupby(wanted, key=lambda task: task.case.name):
            rows = [Row(task.case, task.entry, self.device, self.nvml, task.number) for task in of_case]
            for row in _CaseRun(self, rows[0].case, rows, progress).settled():
                yield row.number, self.record(row)
                if row.status == "failed":
                    self._require_device(row)
            gc.collect()
            if self.device.kind == "cuda":
                torch.cuda.empty_cache()

    def visit(self, run: _CaseRun, rows: Sequence[Row]) -> None:
        """Visit rows that are ready in shuffled order, again and again, until each has converged or had its share."""
        order, waiting = random.Random(run.case.digest), list(rows)
        for visit in range(self.options.max_visits):
            order.shuffle(waiting)
            for row in waiting:
                run.progress(f"time {run.case} {row.entry}, visit {visit + 1}", row.number)
                row.visit()
            waiting = [row for row in waiting if not self._is_done(row)]

    def _is_done(self, row: Row) -> bool:
        summary = row.summary()
        if row.status != "ok":
            return True
        if summary is None or len(summary.samples) < self.options.min_visits:
            return False
        return is_converged(summary, self.options.width[self.device.kind]) or row.spent_s > self.options.row_s

    def _require_device(self, row: Row) -> None:
        """An illegal access breaks the whole CUDA context: nothing else can run in this process."""
        try:
            self.device.synchronize()
        except Exception as error:
            raise DeviceLost(f"{row.entry} on {row.case} lost the device: {error}") from error

    def record(self, row: Row) -> Record:
        """Turn a settled row into its record."""
        summary = row.summary() if row.status == "ok" else None
        if summary is not None and self.doubt is not None:
            row.flags.append(self.doubt)
        return Record(
            run=self.run,
            suite=self.options.suite,
            started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            op=row.case.op,
            case=row.case.name,
            case_digest=row.case.digest,
            shape=row.case.to_json(),
            impl=row.entry.impl.name,
            layout=row.entry.layout.name,
            role=row.entry.impl.role,
            params=row.params,
            status=row.status,
            reason=row.reason,
            flags=tuple(row.flags),
            device=self.device.slug,
            device_kind=self.device.kind,
            toolchain=toolchain(),
            launch_s=summary,
            traffic_bytes=row.case.traffic_bytes,
            flops=row.case.flops,
            nvml=_nvml_summary(row),
            **row.fields,
        )


def _take_library_workspaces(device: Device) -> None:
    """Let torch's libraries take the workspace that they keep for good, which no row shall be charged with."""
    if device.kind == "cuda":
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            square = torch.ones((64, 64), dtype=dtype, device=device.name)
            torch.matmul(square, square)


def _find_nvml(device: Device) -> tuple[Nvml | None, str | None]:
    if device.kind != "cuda":
        return None, "there is no GPU"
    try:
        return Nvml(device.uuid), None
    except NvmlMissing as why:
        return None, str(why)


def _nvml_summary(row: Row) -> dict[str, Any]:
    if not row.readings:
        return {}

    def middle(field: str) -> int:
        return int(sorted(getattr(reading, field) for reading in row.readings)[len(row.readings) // 2])

    throttles = sorted({why for reading in row.readings for why in reading.throttles})
    fields = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c")
    return {**{field: middle(field) for field in fields}, "throttles": throttles, "discarded_visits": row.discarded}


class _CaseRun:
    """All rows of one case. Inputs are made once a family and converted once a layout, for all rows."""

    def __init__(self, session: Session, case: Case, rows: Sequence[Row], progress: Progress) -> None:
        self.session, self.case, self.rows, self.progress = session, case, rows, progress
        self.device = session.device
        self._staged: dict[tuple[str, str], Staged] = {}
        self._inputs: dict[str, Inputs] = {}

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
            with self.session.phase("check"):
                passed = self._check(row)
            if passed:
                right.append(row)
            else:
                row.release()
                yield row
        checked, right = right, []
        for row in checked:
            with self.session.phase("check"):
                passed = checks.late(row)
            if passed:
                right.append(row)
            else:
                row.release()
                yield row
        if self.session.options.bench:
            self._forget(PLAIN, NEEDLES)
            with self.session.phase("time"):
                self._time([row for row in right if self._is_timed(row)])
        for row in right:
            yield row

    def _is_timed(self, row: Row) -> bool:
        says_something = self.device.kind in row.entry.impl.timed
        if not says_something:
            row.remark("timed", f"not timed: the entry says that its time on a {self.device.kind} says nothing")
        return says_something

    def _refuse(self, row: Row) -> tuple[str, str] | None:
        """Why a row does not run: (status, reason)."""
        try:
            why_not = row.entry.impl.why_not(self.case, self.device.kind) or row.entry.layout.why_not(self.case)
        except Exception as error:
            return "failed", f"whether it can run here: {type(error).__name__}: {error}"
        if why_not:
            return "unsupported", why_not
        needed, free = self._needed_bytes(row), self.device.free_bytes()
        if needed > 0.9 * free:
            return "skipped", (
                f"needs about {needed / 1e9:.1f} GB on {self.device.name} with the layouts before it, "
                f"{free / 1e9:.1f} GB are free (a run of this layout alone needs less)"
            )
        return None if self.session.options.patient else self._too_long(row)

    def _too_long(self, row: Row) -> tuple[str, str] | None:
        case = self.case
        if self.device.kind == "cpu":
            if case.cache_bytes > CPU_CACHE_BYTES:
                return "skipped", (
                    f"would take minutes on a CPU: {case.cache_bytes / 1e6:.0f} MB of cache a layer "
                    f"(at most {CPU_CACHE_BYTES / 1e6:.0f}; --patient runs it)"
                )
            if case.flops > CPU_FLOPS:
                return "skipped", (
                    f"would take minutes on a CPU: {case.flops / 1e9:.1f} GFLOP "
                    f"(at most {CPU_FLOPS / 1e9:.0f}; --patient runs it)"
                )
        limit = row.entry.impl.max_work.get(self.device.kind, math.inf)
        work = max(case.flops, case.traffic_bytes)
        if work > limit:
            return "skipped", (
                f"would take minutes: {work / 1e6:.0f} million operations, {row.entry.impl.name} on {self.device.kind} "
                f"is given at most {limit / 1e6:.0f} million (--patient runs it)"
            )
        return None

    def _needed_bytes(self, row: Row) -> int:
        """What the case's tensors take while this row is worked: in its layout, and in those of the rows before it."""
        sets = self._num_layers() if self.session.options.bench else 2
        order = list(dict.fromkeys(other.entry.layout for other in self.rows))
        return self.case.staged_bytes(sets, order[: order.index(row.entry.layout) + 1])

    def _check(self, row: Row) -> bool:
        """Prepare and judge a row on both families of inputs."""
        self.progress(f"check {self.case} {row.entry}", row.number)
        # Tensors first, so that what is measured between is the implementation's own memory.
        stages = {family: functools.partial(self._stage, family, row.entry.layout) for family in (PLAIN, NEEDLES)}
        if not all(row.attempt(stage, "inputs") for stage in stages.values()) or not row.prepare():
            return False
        passed = all(checks.family(row, stage, family.name) for family, stage in stages.items())
        if passed and row.entry.impl.role != "reader":
            passed = checks.relations(row, stages[PLAIN], self.session.options.relations)
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
        for family in families:
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
        self.session.visit(self, [*timed, *readers])
        with self.session.phase("finish"):
            for row in timed:
                self._finish(row, readers)
        for row in [*rows, *readers]:
            row.release()

    def make_timer(self, row: Row) -> bool:
        """Get a right row ready to be visited; False where that failed."""
        self.progress(f"time {self.case} {row.entry}", row.number)
        made = row.make_timer(functools.partial(self._stage, TIMED, row.entry.layout, self._num_layers()))
        self._restore(row, TIMED)
        return made

    def _readers(self, layers: int) -> list[Row]:
        """The fastest readers of this case's blocks, to be visited beside what they are the ceiling of."""
        # The same bytes whatever the layout: one is enough.
        entries = [entry for entry in self.session.registry.entries(roles=("reader",)) if entry.layout is entry.impl.layouts[0]]
        rows = [Row(self.case, variant, self.device, self.session.nvml) for entry in entries for variant in entry.variants()]
        self.progress(f"ceiling {self.case}", None)
        with self.session.phase("ceiling"):
            return fastest(rows, lambda layout: self._stage(TIMED, layout, layers))

    def _finish(self, row: Row, readers: Sequence[Row]) -> None:
        """Everything about a timed row that needs its samples."""
        self.progress(f"finish {self.case} {row.entry}", row.number)
        checks.timed(row, functools.partial(self._stage, TIMED, row.entry.layout, 0))
        self._restore(row, TIMED)
        summary = row.summary()
        if row.status == "ok" and summary is None:
            row.end("failed", f"every one of {row.discarded} visits was throttled")
        if row.status != "ok" or summary is None:
            return
        if not is_converged(summary, self.session.options.width[self.device.kind]):
            row.flags.append(f"never converged: {_how_far(summary)}")
        if row.discarded:
            row.flags.append(f"throttled: {row.discarded} visits discarded")
        row.cross_examine()
        why_not = self._why_no_power(row)
        if why_not is None:
            with self.session.phase("power"):
                row.measure_power()
        else:
            row.remark("power", f"not measured: {why_not}")
        self._hold_against_ceiling(row, readers)

    def _why_no_power(self, row: Row) -> str | None:
        """A window of a second a row adds up: by default it is held where it says most."""
        wanted = self.session.options.power
        if wanted == "none":
            return "--power none"
        if wanted == "first" and row.entry.layout is not row.entry.impl.layouts[0]:
            return "not the implementation's first layout (--power all)"
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


def _how_far(summary: Samples) -> str:
    share = half_width(summary)
    if share is None:
        return "one visit, which has no interval"
    return f"within {100 * share:.1f}% after {len(summary.samples)} visits"


def _settings(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in row.params.items())

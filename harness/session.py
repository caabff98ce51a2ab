"""One run on one device: what rows share, and the way from a task to its record."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from harness.device import Device, find_device, toolchain
from harness.interval import is_converged
from harness.nvml import Nvml, NvmlMissing
from harness.ops.case import Case
from harness.options import Options
from harness.pipeline import CaseRun, Progress
from harness.record import Record, unit_of
from harness.registry import Entry, Registry
from harness.row import Row
from harness.selftest import doubts, selftest
from harness.tamper import Untouched
from harness.words import of_error


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
        self.device.make_current()
        self.nvml, self.nvml_missing = _find_nvml(self.device)
        _take_library_workspaces(self.device)
        self.selftest = selftest(self.device, self.nvml) if options.bench else {}
        self.doubt = doubts(self.selftest)
        self.untouched = Untouched()

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
            rows = [Row(task.case, task.entry, self.device, self.nvml, task.number, self.untouched) for task in of_case]
            for row in CaseRun(self, rows[0].case, rows, progress).settled():
                yield row.number, self.record(row)
                if row.status == "failed":
                    self._require_device(row)
            gc.collect()
            if self.device.kind == "cuda":
                torch.cuda.empty_cache()

    def visit(self, run: CaseRun, rows: Sequence[Row]) -> None:
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
            raise DeviceLost(f"{row.entry} on {row.case} lost the device: {of_error(error)}") from error

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
            unit=unit_of(dataclasses.asdict(self.device)),
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

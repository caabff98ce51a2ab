"""What --benchmark adds to pytest's door: samples for pytest-benchmark, facts about the device, and no false calm.

A row is timed by the pipeline, on the device; pytest-benchmark is then read the samples by a clock that knows them, so
that its table, its files and --benchmark-compare-fail speak of the device's seconds and not of the host's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from harness.matrix import Matrix
from harness.record import Record

#: what of a record stands in pytest-benchmark's files as extra_info
EXTRA = (
    "op", "impl", "layout", "case", "case_digest", "suite", "run", "device", "traffic_bytes", "ceiling_s", "ceiling_share",
    "workspace_bytes", "flags",
)  # fmt: skip


class DeviceClock:
    """A timer for pytest-benchmark that tells samples taken already; it is read before and after each round."""

    __name__ = "device_seconds"

    def __init__(self) -> None:
        self._reads: Iterator[float] = iter(())

    def load(self, samples: tuple[float, ...]) -> None:
        """Let the next rounds last these seconds; each starts at 0, so that its difference is exact."""
        self._reads = itertools.chain.from_iterable((0.0, sample) for sample in samples)

    def __call__(self) -> float:
        return next(self._reads)


class Timed:
    """The plugin that is registered under --benchmark, with this run's matrix."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self._saved: dict[str, str | None] = {}  # node id -> case digest, of the run that is compared with
        self._collected: set[str] = set()
        self._timed: set[str] = set()

    @pytest.fixture
    def paged_record(self, request: pytest.FixtureRequest, paged_measured: Record, benchmark: Any) -> Record:
        """The record of the item's row, checked and, if it is right, timed."""
        record = paged_measured
        saved = self._saved.get(request.node.nodeid, record.case_digest)
        if saved != record.case_digest:
            digests = f"digest {record.case_digest}, saved {saved}"
            reason = f"the case is another one than in the saved run ({digests}); save a new run"
            record = dataclasses.replace(record, status="failed", reason=reason, launch_s=None)
        self._hand_over(record, benchmark, request.node)
        return record

    def _hand_over(self, record: Record, benchmark: Any, node: pytest.Item) -> None:
        """Give a row's samples to pytest-benchmark; a row without any leaves no line there."""
        samples = record.launch_s.samples if record.launch_s else ()
        if samples:
            self._timed.add(node.nodeid)
        mark = node.get_closest_marker("benchmark")
        assert mark is not None, "pytest_generate_tests gives each row its clock"
        mark.kwargs["timer"].load(samples)
        benchmark.disabled = benchmark.disabled or not samples
        benchmark.extra_info.update({name: getattr(record, name) for name in EXTRA})
        benchmark.pedantic(lambda: None, rounds=max(len(samples), 1))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected = {item.nodeid for item in session.items}

    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Say which device is timed, and what built and ran the kernels."""
        machine_info["pagedbench"] = self._matrix.facts()

    def pytest_benchmark_compare_machine_info(
        self, machine_info: Mapping[str, Any], compared_benchmark: Mapping[str, Any]
    ) -> None:
        """Refuse to compare different devices; note the rows of the saved run."""
        now, saved = _device(machine_info), _device(compared_benchmark["machine_info"])
        if now != saved:
            raise pytest.UsageError(f"different devices are never compared: the saved run is of {saved}, this is {now}")
        for row in compared_benchmark["benchmarks"]:
            self._saved[row["fullname"]] = row["extra_info"].get("case_digest")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Do not let a run that timed nothing, or lost a row of the saved run, pass for good."""
        if session.exitstatus == pytest.ExitCode.OK and any(self._complaints()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _complaints(self) -> Iterator[str]:
        if self._matrix.records and not self._timed:
            yield "nothing was timed; -rs shows why each row was skipped"
        for name in sorted(self._saved.keys() & self._collected - self._timed):
            yield f"MISSING: {name} is in the saved run and was not timed in this one"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what came of the rows and where the records are."""
        from harness.report import summary_line

        terminalreporter.section("pagedbench")
        for line in self._complaints():
            terminalreporter.write_line(line, red=True)
        if self._matrix.records:
            terminalreporter.write_line(summary_line(self._matrix.records.values()))
        if self._matrix.folder:
            terminalreporter.write_line(f"records and report: {self._matrix.folder}")


def _device(machine_info: Mapping[str, Any]) -> str:
    slug: str = machine_info.get("pagedbench", {}).get("device", {}).get("slug", "no device of pagedbench's")
    return slug

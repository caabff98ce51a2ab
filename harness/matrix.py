"""What pytest runs: the rows chosen on its command line, measured by a worker in one go, and what came of them.

Rows are measured in the pipeline's own order, case by case, from the first that is asked for: inputs are made once a
case and its rows visited in turn. One row an item would time each in a stretch of its own, with whatever the clocks did
then.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.commands.engines import InProcess
from harness.commands.selection import cases_of, entries_of, registry_of, rows_of
from harness.record import Record
from harness.supervisor import Supervisor
from harness.work import Work

if TYPE_CHECKING:
    from harness.ops.case import Case
    from harness.registry import Entry

DEFAULT_SUITE = "smoke"

Names = tuple[str, str]


class Matrix:
    """The chosen rows and their records. Choosing raises UsageError for a name that nothing has; it loads no torch, unless
    a device is named.

    chosen     what `harness.commands.selection` reads, `device` and `in_process`
    out        where a run that is timed makes its folder; None checks only
    rows       chosen rows by their names, (case, implementation[LAYOUT]); `wanted` are those that will be measured
    records    by the same names, as they come
    """

    def __init__(self, chosen: argparse.Namespace, out: Path | None) -> None:
        self._chosen, self._out = chosen, out
        self._registry = registry_of(chosen)
        self._suite, cases = cases_of(chosen, DEFAULT_SUITE)
        self.rows: dict[Names, tuple[Case, Entry]] = {
            (case.name, str(entry)): (case, entry) for case, entry in rows_of(cases, entries_of(chosen, self._registry))
        }
        self.wanted: list[Names] = list(self.rows)
        self.records: dict[Names, Record] = {}
        self.folder: Path | None = None
        self._coming: Generator[Record, None, None] | None = None
        if chosen.device:
            self.facts()  # a device that is not there is found out now, not after collection

    def record(self, names: Names) -> Record:
        """Return the record of a wanted row, once it has come. UsageError and OSError are the caller's."""
        if self._coming is None:
            self._coming = self._measure()
        while names not in self.records:
            record = next(self._coming)
            self.records[record.case, record.row] = record
        return self.records[names]

    def _measure(self) -> Generator[Record, None, None]:
        """Measure what is wanted; records of a timed run are kept in `folder`/records.jsonl as they come."""
        from harness.options import Options
        from harness.store import Appender, new_run

        if self._out:
            self.folder = new_run(self._out)
        work = Work(
            options=Options(suite=self._suite, bench=self._out is not None),
            device=self._chosen.device,
            run=self.folder.name if self.folder else "unsaved",
            impl_files=self._chosen.impl_file,
            rows=[self.rows[names] for names in self.wanted],
        )
        source = InProcess(work, self._registry, lambda _: None) if self._chosen.in_process else Supervisor(work)
        keep = Appender(self.folder) if self.folder else None
        try:
            for record in source.records():
                if keep:
                    keep.append(record)
                yield record
        finally:
            if keep:
                keep.close()

    def close(self) -> None:
        """Let the worker go, and write the report of what was measured beside the records of a timed run."""
        from harness.report import write_report

        if self._coming is not None:
            self._coming.close()
        if self.folder and self.records:
            write_report(list(self.records.values()), self.folder)

    def facts(self) -> dict[str, Any]:
        """Return the device, its driver and the versions of what builds and runs the kernels, as plain data."""
        from harness.device import find_device, toolchain
        from harness.nvml import Nvml, NvmlMissing

        device = find_device(self._chosen.device)
        driver = None
        if device.kind == "cuda":
            try:
                driver = Nvml(device.uuid).driver()
            except NvmlMissing as why:
                driver = f"unknown: {why}"
        versions = {name: version for name, version in toolchain().items() if name != "revision"}
        return {"device": dataclasses.asdict(device), "driver": driver, "toolchain": versions}

"""What pytest runs: the rows chosen on its command line, measured a case at a time, and what came of them.

A case is measured as a whole when its first row is asked for, so that inputs are made once and rows are visited in
turn; one row an item would time each implementation in a stretch of its own, with whatever the clocks did then.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.commands.selection import cases_of, entries_of, registry_of
from harness.names import UsageError
from harness.record import Record

if TYPE_CHECKING:
    from harness.ops.case import Case
    from harness.pipeline import Session
    from harness.registry import Entry

DEFAULT_SUITE = "smoke"


class Matrix:
    """The chosen rows and their records. Choosing raises UsageError for a name that nothing has; it loads no torch, unless
    a device is named.

    chosen     what `harness.commands.selection` reads, and `device`
    out        where a run that is timed makes its folder; None checks only
    rows       (case, implementation[LAYOUT]) of all that is chosen; `wanted` those that are still to be run
    """

    def __init__(self, chosen: argparse.Namespace, out: Path | None) -> None:
        self._registry = registry_of(chosen)
        entries = entries_of(chosen, self._registry)
        self._suite, cases = cases_of(chosen, DEFAULT_SUITE)
        self._device, self._out = chosen.device, out
        if chosen.device:
            self.facts()  # a device that is not there is found out now, not after collection
        self._cases = {case.name: case for case in cases}
        self._entries = {str(entry): entry for entry in entries}
        self.rows = [(case.name, str(entry)) for case in cases for entry in entries if entry.impl.op == case.op]
        if not self.rows:
            raise UsageError("none of the chosen implementations has the operator of a chosen case")
        self.wanted = list(self.rows)
        self.records: dict[tuple[str, str], Record] = {}
        self.folder: Path | None = None
        self._session: Session | None = None

    def case(self, name: str) -> Case:
        return self._cases[name]

    def entry(self, name: str) -> Entry:
        return self._entries[name]

    def record(self, case: str, entry: str) -> Record:
        """Return the row's record; the first row asked for measures every wanted row of its case.

        Records of a timed run are appended to `folder`/records.jsonl as they come. UsageError and OSError are the caller's.
        """
        if (case, entry) not in self.records:
            wanted = dict.fromkeys([entry, *(other for of, other in self.wanted if of == case)])
            self._measure(self._cases[case], [self._entries[name] for name in self._entries if name in wanted])
        return self.records[case, entry]

    def _measure(self, case: Case, entries: Sequence[Entry]) -> None:
        from harness.store import Appender

        session = self._session = self._session or self._start()
        keep = Appender(self.folder) if self.folder else None
        try:
            for record in session.measure([case], entries):
                self.records[record.case, record.row] = record
                if keep:
                    keep.append(record)
        finally:
            if keep:
                keep.close()

    def _start(self) -> Session:
        from harness.options import Options  # loads torch, which choosing need not
        from harness.pipeline import Session
        from harness.store import new_run

        session = Session(Options(suite=self._suite, bench=self._out is not None), self._registry, self._device)
        if self._out:
            self.folder = new_run(self._out)
            session.run = self.folder.name
        return session

    def write_report(self) -> None:
        """Write the report of a timed run beside its records."""
        from harness.report import write_report

        if self.folder:
            write_report(list(self.records.values()), self.folder)

    def facts(self) -> dict[str, Any]:
        """Return the device, its driver and the versions of what builds and runs the kernels, as plain data."""
        from harness.device import find_device, toolchain
        from harness.nvml import Nvml, NvmlMissing

        device = find_device(self._device)
        driver = None
        if device.kind == "cuda":
            try:
                driver = Nvml(device.uuid).driver()
            except NvmlMissing as why:
                driver = f"unknown: {why}"
        versions = {name: version for name, version in toolchain().items() if name != "revision"}
        return {"device": dataclasses.asdict(device), "driver": driver, "toolchain": versions}

"""What a report shows beside the records: the run's own facts, other runs, the history, an audit, a pool's waste."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.audit import Audit
from harness.baseline import baseline_of
from harness.history import HISTORY, Point, history_of, read
from harness.names import UsageError
from harness.record import Record
from harness.report.pool import Pool
from harness.report.verdicts import Comparison
from harness.store import facts_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
    """All of it is optional: a report is made of records, and of what else there is.

    facts          what run.json says: command, arguments, device, selftest, ...
    comparisons    of the report's records, as the newer ones, with other runs
    history        points of the records' devices, in the order of runs
    audit          whose kill matrix is shown; faults: control -> what it does wrong
    pool           what `pagedbench memory` found
    """

    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    comparisons: Sequence[Comparison] = ()
    history: Sequence[Point] = ()
    audit: Audit | None = None
    faults: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pool: Pool | None = None


def of_run(folder: Path, records: Sequence[Record], history: Path = HISTORY) -> tuple[Beside, list[str]]:
    """Return what lies about a run, its run.json and its devices' histories, and a line for what of them cannot be read."""
    facts, problem = facts_of(folder)
    points: list[Point] = []
    problems = [] if problem is None else [problem]
    for device in sorted({record.device for record in records}):
        if file := _file_of(device, history):
            try:
                found, odd = read(file)
            except UsageError as error:  # a report is made all the same
                found, odd = [], [str(error)]
            points += found
            problems += odd
    return Beside(facts=facts, history=points), problems


def _file_of(device: str, history: Path) -> Path | None:
    """A device's history, if there is one; a record may say anything of its device."""
    try:
        baseline_of(device)  # refuses what is no device's name
        file = history_of(device, history)
        return file if file.is_file() else None
    except (UsageError, OSError):
        return None

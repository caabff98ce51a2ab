"""Rows that a comparison left open, measured again on the device at hand, with more visits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness.names import UsageError
from harness.ops import case_from_json
from harness.options import Options
from harness.record import Record
from harness.registry import Registry
from harness.supervisor import Supervisor
from harness.work import Work

#: Visits of a row that is measured again; a fixed number, so that when to stop is not chosen by what was seen.
VISITS = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OnDevice(Work):
    """Work for one device only, and of GPUs for the one whose rows are measured again: another's are held to less."""

    gpus: frozenset[str]

    def require_device(self, facts: Mapping[str, Any]) -> None:
        here = facts["device"]["slug"]
        if here != self.only_on:
            raise UsageError(f"--rerun-unsure: the rows are of {self.only_on}, this is {here}")
        gpu = facts["device"].get("uuid")
        if gpu and (others := sorted(self.gpus - {gpu})):
            raise UsageError(
                f"--rerun-unsure: the rows are of {', '.join(others)}, this is {gpu}, another GPU of the kind; run all here"
            )


def rerun(
    records: Sequence[Record],
    registry: Registry,
    run: str,
    device: str | None = None,
    impl_files: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Record]:
    """Measure the rows of `records`, all of one device, again, and yield their new records.

    Raises UsageError where this machine has another device or GPU, or no longer has an implementation.
    """
    rows = []
    for record in sorted(records, key=lambda record: record.case):
        (entry,) = registry.entries([record.row], roles=("implementation", "reader"))
        case = case_from_json(record.shape)
        rows.append((case, dataclasses.replace(entry, params=record.params)))
    options = Options(suite=records[0].suite, power="none", min_visits=VISITS, max_visits=VISITS + 5, row_s=60.0)
    gpus = frozenset(record.unit["uuid"] for record in records if record.unit.get("uuid"))
    work = _OnDevice(
        options=options, device=device, run=run, impl_files=impl_files, rows=rows, only_on=records[0].device, gpus=gpus
    )
    yield from Supervisor(work, progress).records()

"""What a run is to do, as data; what does it is an engine."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from harness.names import UsageError
from harness.ops import case_from_json
from harness.record import Record, unit_of

if TYPE_CHECKING:
    from harness.ops.case import Case
    from harness.options import Options
    from harness.registry import Entry, Registry

Rows = Sequence[tuple["Case", "Entry"]]

#: Seconds of silence after which a worker is taken for hung. A first compilation of a large library may take minutes.
STALL_S = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a run is to do, as data that a worker can be sent. `rows` stand case by case.

    only_on    slug of the device whose run this continues: on any other nothing is measured
    """

    options: Options
    device: str | None
    run: str
    impl_files: Sequence[str]
    rows: Rows
    stall_s: float = STALL_S
    only_on: str | None = None

    def require_device(self, facts: Mapping[str, Any]) -> None:
        """Raise UsageError where a session's device is not that of the run it would continue."""
        here = facts["device"]["slug"]
        if self.only_on not in (None, here):
            raise UsageError(f"--resume {self.run}: was begun on {self.only_on}, this is {here}; start a run of its own")

    def by_case(self) -> list[Rows]:
        """The rows of each case, which belong together: they are compared with each other and with one ceiling."""
        return [list(rows) for _, rows in itertools.groupby(self.rows, key=lambda row: row[0].name)]


class Engine(Protocol):
    """Does a run's work. `facts` holds the device, the toolchain and the self-test once they are known."""

    facts: dict[str, Any]

    def records(self) -> Iterator[Record]:
        """Yield a record for every row, as they come; raises UsageError where nothing can be measured."""


def rows_to_json(rows: Mapping[int, tuple[Case, Entry]]) -> dict[str, Any]:
    """Numbered rows as plain data: what crosses to another process names implementations and carries none."""
    return {
        "cases": {case.name: case.to_json() for case, _ in rows.values()},
        "rows": [
            {"number": number, "case": case.name, "entry": str(entry), "params": dict(entry.params)}
            for number, (case, entry) in rows.items()
        ],
    }


def rows_from_json(data: Mapping[str, Any], registry: Registry) -> dict[int, tuple[Case, Entry]]:
    """What `rows_to_json` was given, with the implementations of this process."""
    cases = {name: case_from_json(fields) for name, fields in data["cases"].items()}
    return {row["number"]: (cases[row["case"]], _entry(registry, row["entry"], row["params"])) for row in data["rows"]}


def _entry(registry: Registry, name: str, params: Mapping[str, Any]) -> Entry:
    (entry,) = registry.entries([name], roles=("implementation", "control", "reader"))
    return dataclasses.replace(entry, params=params)


def lost_record(work: Work, facts: Mapping[str, Any], status: str, reason: str, case: Case, entry: Entry) -> Record:
    """The record of a row whose process left none."""
    device = facts["device"]
    return Record(
        run=work.run,
        suite=work.options.suite,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        op=case.op,
        case=case.name,
        case_digest=case.digest,
        shape=case.to_json(),
        impl=entry.impl.name,
        layout=entry.layout.name,
        role=entry.impl.role,
        params=entry.impl.resolve_params(entry.params),
        status=status,
        reason=reason,
        device=device["slug"],
        device_kind=device["kind"],
        unit=unit_of(device),
        toolchain=facts["toolchain"],
        traffic_bytes=case.traffic_bytes,
        flops=case.flops,
    )

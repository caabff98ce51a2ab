"""`audit`: is the checker any good? Every case against every control that claims to apply, and against what is right."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.audit import Audit, audit
from harness.commands.engines import MakeEngine, engine_of
from harness.commands.run import Progress, add_how, keep
from harness.commands.selection import add_selection, cases_of, entries_of, registry_of, rows_of
from harness.names import UsageError
from harness.ops.case import Case
from harness.options import RELATIONS, Options
from harness.record import Record
from harness.registry import Entry
from harness.words import printable
from harness.work import Work

Rows = list[tuple[Case, Entry]]


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add_selection(parser)
    add_how(parser)
    parser.add_argument(
        "--relations", choices=RELATIONS, default="small",
        help="cases on which launches are held against each other; all: also where a launch takes long (default: small)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run controls and right implementations on the chosen cases, show the kill matrix; 1 where anything is amiss."""
    registry = registry_of(arguments)
    entries = entries_of(arguments, registry, roles=("control", "implementation"))
    if not any(entry.impl.role == "control" for entry in entries):
        raise UsageError("none of the chosen implementations is a control")
    suite, cases = cases_of(arguments)
    # Controls first: what they do to memory that others read would make what is right look wrong.
    entries.sort(key=lambda entry: entry.impl.role != "control")
    rows = rows_of(cases, entries)
    make_engine = engine_of(arguments, registry)
    timed, place = _names_timed(entries), {case.name: number for number, case in enumerate(cases)}

    def by_place(record: Record) -> tuple[bool, int]:
        return record.impl in timed, place[record.case]

    from harness.store import Appender, new_run

    folder = new_run(arguments.out)
    store = Appender(folder)
    with Progress(len(rows), quiet=arguments.json) as progress:
        records = keep(_records(arguments, make_engine, suite, folder, rows, progress), store, progress, by_place)
    found = audit(sorted(records, key=by_place))
    _tell(found, folder, entries, arguments)
    return int(not found.is_clean)


def _records(
    arguments: argparse.Namespace, make_engine: MakeEngine, suite: str, folder: Path, rows: Rows, progress: Progress
) -> Iterator[Record]:
    """Check all rows; only controls whose fault shows in timed launches alone are timed, once. Leaves run.json."""
    from harness.store import write_json

    names = _names_timed([entry for _, entry in rows])
    timed = [row for row in rows if row[1].impl.name in names]
    checked = [row for row in rows if row[1].impl.name not in names]
    for bench, some in ((False, checked), (True, timed)):
        if not some:
            continue
        work = Work(
            options=Options(
                suite=suite, bench=bench, patient=arguments.patient, power="none", ceiling=False, min_visits=3, max_visits=3,
                relations="none" if bench else arguments.relations,
            ),
            device=arguments.device,
            run=folder.name,
            impl_files=arguments.impl_file,
            rows=some,
            stall_s=arguments.stall,
        )
        engine = make_engine(work, progress.say)
        yield from engine.records()
        write_json(folder / "run.json", {"run": folder.name, "command": "audit", "arguments": arguments.words, **engine.facts})


def _names_timed(entries: Sequence[Entry]) -> set[str]:
    return {entry.impl.name for entry in entries if getattr(entry.impl, "only_timed", False)}


def _tell(found: Audit, folder: Path, entries: Sequence[Entry], arguments: argparse.Namespace) -> None:
    """Write audit.json and audit.md, and print the matrix, or the JSON."""
    import json

    from harness.report.kills import markdown_matrix, terminal_matrix
    from harness.store import write_json

    faults: dict[str, Any] = {entry.impl.name: getattr(entry.impl, "fault", entry.impl.note) for entry in entries}
    write_json(folder / "audit.json", found.to_json())
    (folder / "audit.md").write_text(markdown_matrix(found, faults), encoding="utf-8")
    if arguments.json:
        print(json.dumps(found.to_json()))
    else:
        print(terminal_matrix(found))
    print(f"audit:   {printable(folder / 'audit.md')}", file=sys.stderr if arguments.json else sys.stdout)

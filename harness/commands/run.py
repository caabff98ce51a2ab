"""`run`, `check`, `bench`: the main job and its halves."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.commands.selection import (
    add_device, add_selection, apply_settings, cases_of, entries_of, parse_settings, registry_of,
)  # fmt: skip
from harness.names import UsageError
from harness.ops.case import Case
from harness.record import Record
from harness.registry import Entry, Registry

if TYPE_CHECKING:
    from harness.pipeline import Session

RUNS = Path("results/runs")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add_selection(parser)
    add_device(parser)
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="an entry's declared parameter")
    add("--out", type=Path, default=RUNS, metavar="DIR", help=f"where the run's folder is made (default: {RUNS})")
    add("--json", action="store_true", help="print records as lines of JSON instead of tables")
    add("--patient", action="store_true", help="also run what would take minutes on this device")
    add("--strict-peers", action="store_true", help="a peer that is wrong or fails counts for the exit code, too")
    if command != "check":
        add("--no-power", action="store_true", help="skip the window of a second a row for power and energy")


def main(arguments: argparse.Namespace) -> int:
    """Check and, unless the command is check, time what was chosen; returns the exit code."""
    registry = registry_of(arguments)
    entries = apply_settings(parse_settings(arguments.set), entries_of(arguments, registry))
    suite, cases = cases_of(arguments)
    return execute(arguments, registry, suite, cases, entries, _print_tables)


def execute(
    arguments: argparse.Namespace, registry: Registry, suite: str, cases: Sequence[Case], entries: Sequence[Entry],
    show: Callable[[Sequence[Record]], None],
) -> int:
    """Measure `entries` on `cases` into a new run's folder, show the records, and return the exit code."""
    if not any(case.op == entry.impl.op for case in cases for entry in entries):
        raise UsageError("none of the chosen implementations has the operator of a chosen case")
    # torch takes a second to import: only now, when nothing can be wrong with the command any more.
    from harness.options import Options
    from harness.pipeline import Session
    from harness.store import Appender, new_run

    options = Options(
        suite=suite, bench=arguments.command != "check", patient=arguments.patient,
        power=not getattr(arguments, "no_power", True),
    )  # fmt: skip
    session = Session(options, registry, arguments.device)
    folder = new_run(arguments.out)
    session.run = folder.name
    store = Appender(folder)
    _write_run(folder, session, arguments.command)
    records: list[Record] = []
    total = sum(1 for case in cases for entry in entries if entry.impl.op == case.op)
    with Progress(total, quiet=arguments.json) as progress:
        try:
            for record in session.measure(cases, entries, progress.say):
                store.append(record)
                records.append(record)
                progress.step()
        except KeyboardInterrupt:
            raise UsageError(f"interrupted; {store.count} records are kept in {store.path}") from None
    _tell(records, folder, arguments, show)
    return exit_code(records, arguments.strict_peers)


def _tell(
    records: Sequence[Record], folder: Path, arguments: argparse.Namespace, show: Callable[[Sequence[Record]], None]
) -> None:
    from harness.report import write_report

    # With --json, standard output is for records alone.
    stream = sys.stderr if arguments.json else sys.stdout
    if arguments.json:
        for record in records:
            print(record.to_line())
    else:
        show(records)
    print(f"records: {folder / 'records.jsonl'}", file=stream)
    if arguments.command == "run":
        for path in write_report(records, folder):
            print(f"report:  {path}", file=stream)


def _print_tables(records: Sequence[Record]) -> None:
    from harness.report import terminal_table

    print(terminal_table(records))


def exit_code(records: Sequence[Record], strict_peers: bool = False) -> int:
    """1 where something of ours is wrong, failed or timed out; peers count only when told so, controls never."""
    bad = [record for record in records if record.status in ("wrong", "failed", "timeout") and record.role == "implementation"]
    return int(any(strict_peers or not record.impl.startswith("peer.") for record in bad))


def _write_run(folder: Path, session: Session, command: str) -> None:
    """run.json: what a record does not repeat."""
    from harness.device import toolchain
    from harness.store import write_json

    write_json(folder / "run.json", {
        "run": folder.name, "command": command, "arguments": sys.argv[1:],
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": dataclasses.asdict(session.device), "toolchain": toolchain(), "nvml_missing": session.nvml_missing,
        "selftest": session.selftest,
    })  # fmt: skip


class Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        self._bar: Any = None
        if sys.stderr.isatty() and not quiet:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="row", leave=False, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def say(self) -> Callable[[str], None]:
        """Shows what is being done now."""
        return self._say

    def _say(self, doing: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(doing[:60], refresh=False)
            self._bar.refresh()

    def step(self) -> None:
        """One row is settled."""
        if self._bar is not None:
            self._bar.update(1)

"""`run`, `check`, `bench`: the main job and its halves."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.commands.selection import (
    add_device, add_selection, cases_of, check_settings, entries_of, parse_settings, registry_of,
)  # fmt: skip
from harness.names import UsageError
from harness.record import Record

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
    parser.set_defaults(command=command)


def main(arguments: argparse.Namespace) -> int:
    """Check and, unless the command is check, time what was chosen; returns the exit code."""
    registry = registry_of(arguments)
    entries = entries_of(arguments, registry)
    suite, cases = cases_of(arguments)
    settings = parse_settings(arguments.set)
    check_settings(settings, entries)
    entries = [entry for entry in entries if any(case.op == entry.impl.op for case in cases)]
    if not entries:
        raise UsageError("none of the chosen implementations has the operator of a chosen case")
    # torch takes a second to import: only now, when nothing can be wrong with the command any more.
    from harness.options import Options
    from harness.pipeline import Session
    from harness.store import Appender, new_run

    options = Options(
        suite=suite, params=settings, bench=arguments.command != "check", patient=arguments.patient,
        power=not getattr(arguments, "no_power", True),
    )  # fmt: skip
    folder = new_run(arguments.out)
    session = Session(options, registry, arguments.device, run=folder.name)
    store = Appender(folder)
    _write_run(folder, session, arguments)
    records: list[Record] = []
    total = sum(1 for case in cases for entry in entries if entry.impl.op == case.op)
    with Progress(total, quiet=arguments.json) as progress:
        try:
            for record in session.measure(cases, entries, progress.say):
                store.append(record)
                records.append(record)
                progress.step()
        except KeyboardInterrupt:
            print(f"pagedbench: interrupted; {store.count} records are kept in {store.path}", file=sys.stderr)
            return 2
    store.close()
    return _tell(records, folder, arguments)


def _tell(records: Sequence[Record], folder: Path, arguments: argparse.Namespace) -> int:
    from harness.report import terminal_table, write_report

    if arguments.json:
        for record in records:
            print(record.to_line())
    else:
        print(terminal_table(records))
        print(f"records: {folder}")
    if arguments.command == "run":
        for path in write_report(records, folder):
            print(f"report:  {path}", file=sys.stderr if arguments.json else sys.stdout)
    return exit_code(records, arguments.strict_peers)


def exit_code(records: Sequence[Record], strict_peers: bool = False) -> int:
    """1 where something of ours is wrong, failed or timed out; peers count only when told so, controls never."""
    bad = [record for record in records if record.status in ("wrong", "failed", "timeout") and record.role == "implementation"]
    return int(any(strict_peers or not record.impl.startswith("peer.") for record in bad))


def _write_run(folder: Path, session: Any, arguments: argparse.Namespace) -> None:
    """run.json: what a record does not repeat."""
    from dataclasses import asdict

    from harness.device import toolchain
    from harness.store import write_json

    write_json(folder / "run.json", {
        "run": folder.name, "command": arguments.command, "arguments": sys.argv[1:],
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": asdict(session.device), "toolchain": toolchain(), "nvml_missing": session.nvml_missing,
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

"""`report`: make report.md and report.html of a run again, beside other runs, an audit, and what memory was wasted."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.commands.compare import compared, read, share_of
from harness.commands.run import RUNS
from harness.history import HISTORY
from harness.names import UsageError, path_of
from harness.record import Record
from harness.registry import default_registry
from harness.report.beside import Beside, of_run
from harness.store import latest_run, load, run_of
from harness.words import printable


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("run", nargs="?", type=path_of, help="a run's folder or a .jsonl file (default: the newest run)")
    add("--out", type=path_of, metavar="DIR", help="where the report goes (default: beside the records)")
    add("--against", action="append", default=[], type=path_of, metavar="RUN",
        help="an older run or a baseline to show beside it, with ratio, interval, verdict; may be repeated")  # fmt: skip
    add("--threshold", type=share_of, metavar="SHARE", help="for --against: a difference within it is none, as for `compare`")
    add("--history", type=path_of, default=HISTORY, metavar="DIR", help=f"where histories are (default: {HISTORY})")
    add("--audit", type=path_of, metavar="RUN", help="a run of `pagedbench audit`, whose kill matrix is shown")
    add("--memory", type=path_of, metavar="DIR", help="what `pagedbench memory --out DIR` wrote")


def main(arguments: argparse.Namespace) -> int:
    """Write the report; lines that are no records are named and skipped."""
    from harness.report import terminal_table, write_report

    run = run_of(arguments.run) if arguments.run else latest_run(RUNS)
    records = _records(run)
    folder = arguments.out or (run if run.is_dir() else run.parent)
    beside = _beside(run, records, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    print(terminal_table(records))
    for path in write_report(records, folder, beside):
        print(f"report:  {printable(path)}")
    return 0


def _records(run: Path) -> list[Record]:
    records, problems = load(run_of(run))
    _warn(problems)
    if not records:
        raise UsageError(f"{run} holds no records")
    return records


def _warn(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"pagedbench: {problem}", file=sys.stderr)


def _beside(run: Path, records: Sequence[Record], arguments: argparse.Namespace) -> Beside:
    """What was asked for to stand beside the records, and what lies about them."""
    from harness.audit import audit
    from harness.report.pool import read as read_pool

    beside, problems = of_run(run if run.is_dir() else run.parent, records, arguments.history)
    _warn(problems)
    audited = _records(arguments.audit) if arguments.audit else records
    is_audit = any(record.role == "control" for record in audited)
    if arguments.audit and not is_audit:
        raise UsageError(f"--audit {arguments.audit}: holds no control; `pagedbench audit` makes such a run")
    return dataclasses.replace(
        beside,
        comparisons=[
            compared(read(other), records, (str(other), str(run)), arguments.threshold, group="geomean")
            for other in arguments.against
        ],
        audit=audit(audited) if is_audit else None,
        faults=_faults() if is_audit else {},
        pool=read_pool(arguments.memory) if arguments.memory else None,
    )


def _faults() -> Mapping[str, str]:
    """What each control of this version does wrong; records do not say."""
    impls = {entry.impl.name: entry.impl for entry in default_registry().entries(roles=("control",))}
    return {name: str(getattr(impl, "fault", impl.note)) for name, impl in impls.items()}

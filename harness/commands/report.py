"""`report`: make report.md and report.html of a run again."""

from __future__ import annotations

import argparse
import sys

from harness.commands.run import RUNS
from harness.names import UsageError, path_of
from harness.store import latest_run, load
from harness.words import printable


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    parser.add_argument("run", nargs="?", type=path_of, help="a run's folder or a .jsonl file (default: the newest run)")
    parser.add_argument("--out", type=path_of, metavar="DIR", help="where the report goes (default: beside the records)")


def main(arguments: argparse.Namespace) -> int:
    """Write the report; lines that are no records are named and skipped."""
    from harness.report import terminal_table, write_report

    run = arguments.run or latest_run(RUNS)
    records, problems = load(run)
    for problem in problems:
        print(f"pagedbench: {problem}", file=sys.stderr)
    if not records:
        raise UsageError(f"{run} holds no records")
    folder = arguments.out or (run if run.is_dir() else run.parent)
    folder.mkdir(parents=True, exist_ok=True)
    print(terminal_table(records))
    for path in write_report(records, folder):
        print(f"report:  {printable(path)}")
    return 0

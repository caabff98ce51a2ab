"""`fuzz`: random cases for as long as one likes; a failure is shrunk and printed as a case that can be pasted."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.commands.run import RUNS, Progress
from harness.commands.selection import add_device, add_implementations, entries_of, registry_of
from harness.names import UsageError, above_0, path_of
from harness.ops.case import Case
from harness.options import Options
from harness.record import Record
from harness.registry import Entry
from harness.supervisor import Supervisor
from harness.work import Work
from harness.workers import Spare

if TYPE_CHECKING:
    from harness.fuzz import Finding

#: Seconds of silence after which a worker is taken for hung: cases are small, so that only a compiler takes long.
STALL_S = 120.0


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add_implementations(parser)
    add_device(parser)
    add = parser.add_argument
    add("--minutes", type=above_0("minutes"), default=1.0, metavar="N",
        help="take no new case after so long (default: %(default).0f)")  # fmt: skip
    add("--seed", type=int, metavar="N", help="draw the cases of an earlier run again (default: another each time)")
    add("--out", type=path_of, default=RUNS, metavar="DIR", help=f"where the run's folder is made (default: {RUNS})")
    add("--json", action="store_true", help="print findings as lines of JSON, a record each")
    add("--stall", type=above_0("seconds"), default=STALL_S, metavar="SECONDS",
        help="silence after which a worker is killed (default: %(default).0f)")  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Check the chosen implementations on random cases; returns 1 where one of them fails."""
    if importlib.util.find_spec("hypothesis") is None:
        raise UsageError("fuzz needs the package hypothesis: pip install 'pagedbench[test]'")
    from harness.fuzz import Fuzz
    from harness.store import Appender, new_run, write_json

    entries = entries_of(arguments, registry_of(arguments))
    seed = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
    folder = new_run(arguments.out)
    store = Appender(folder)
    checker = Checker(arguments, folder.name)
    fuzz, interrupted = Fuzz(entries, checker.check, seed=seed, seconds=60 * arguments.minutes), False
    try:
        for finding in fuzz.findings():
            store.append(finding.record)
            _tell(finding, folder, arguments)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        checker.spare.close()
        store.close()
        told: dict[str, Any] = {"seed": seed, "cases": fuzz.num_cases, "rows_judged": fuzz.num_judged, "findings": store.count}
        told |= {"run": folder.name, "command": "fuzz", "arguments": arguments.words}
        write_json(folder / "run.json", {**checker.facts, **told})
    print(
        f"fuzz: {fuzz.num_cases} cases, {fuzz.num_judged} rows judged, {store.count} findings; seed {seed}",
        file=sys.stderr if arguments.json else sys.stdout,
    )
    if interrupted:
        raise UsageError(f"interrupted; {store.count} findings are kept in {store.path}")
    if not fuzz.num_judged:
        raise UsageError("nothing was judged: no chosen implementation runs on this device, or the time was too short")
    return int(store.count > 0)


class Checker:
    """Checks cases in a worker that is kept from one to the next, and replaced when it dies."""

    def __init__(self, arguments: argparse.Namespace, run: str) -> None:
        self.spare, self.facts = Spare(), dict[str, Any]()
        self._arguments, self._run = arguments, run
        self._progress = Progress(0, quiet=arguments.json)

    def check(self, case: Case, entries: Sequence[Entry]) -> list[Record]:
        """Return the record of every entry on `case`."""
        arguments = self._arguments
        work = Work(
            options=Options(suite="fuzz", bench=False),
            device=arguments.device,
            run=self._run,
            impl_files=arguments.impl_file,
            rows=[(case, entry) for entry in entries],
            stall_s=arguments.stall,
        )
        supervisor = Supervisor(work, self._progress.say, self.spare)
        records = list(supervisor.records())
        self.facts = supervisor.facts or self.facts
        return records


def _tell(finding: Finding, folder: Path, arguments: argparse.Namespace) -> None:
    """Write the case beside the records, and print it with the command that checks it again."""
    from harness.fuzz import command_of, entry_of

    case_file = folder / f"{finding.case.name}.json"
    case_file.write_text(json.dumps([entry_of(finding.case)], indent=1) + "\n")
    if arguments.json:
        print(finding.record.to_line(), flush=True)
        return
    record = finding.record
    print(f"{record.row} {record.status} on {finding.case}: {record.reason}")
    if not finding.again:
        print("  it did not fail each time")
    print(f"  {json.dumps(entry_of(finding.case))}")
    print(f"  {command_of(finding, str(case_file), arguments.impl_file, arguments.device)}\n", flush=True)

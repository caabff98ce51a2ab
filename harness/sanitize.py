"""compute-sanitizer around a check: what it finds becomes the record of the row in which it was found.

    pagedbench check --sanitize memcheck

Every entry gets a process of its own, with all its cases. Where the sanitizer finds nothing, rows keep the records of
their check. Where it finds something, the entry's rows run again, a process each, so that a finding is some row's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.child import LAST_WORDS
from harness.names import UsageError
from harness.record import Record
from harness.sanitizer_log import Finding, Log, parse
from harness.store import RECORDS, facts_of, load
from harness.words import printable
from harness.work import Work, lost_record

if TYPE_CHECKING:
    from harness.ops.case import Case
    from harness.registry import Entry

    Rows = Sequence[tuple[Case, Entry]]

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROGRAM = "compute-sanitizer"
#: Calls that fail on purpose, as when torch asks what the driver has, are no findings; memcheck alone reports them. Its
#: padding is what a canary is elsewhere: allocations may lie side by side, and then one's end is another one's begin.
_OPTIONS = {"memcheck": ["--report-api-errors", "no", "--padding", "4096"]}
#: what run.json holds besides the facts of the machine
_OF_ONE_RUN = ("run", "command", "arguments", "ended_at")
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from harness.cli import main; sys.exit(main())"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What one sanitized process left: its records by case and row, the sanitizer's log, its last words."""

    records: dict[tuple[str, str], Record]
    log: Log
    ended: str  # "ended with exit code 1; last words: ..."
    timed_out: bool = False

    def of(self, case: Case, entry: Entry) -> Record | None:
        return self.records.get((case.name, str(entry)))


def find_program(tool: str) -> str:
    """Return where compute-sanitizer is. Raises UsageError where it is not."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise UsageError(f"--sanitize {tool}: {PROGRAM} is not on PATH; it comes with the CUDA toolkit, in its folder bin")
    return found


class Sanitized:
    """Checks `work` under a tool of compute-sanitizer and yields its records; `facts` as of a Supervisor."""

    def __init__(self, work: Work, tool: str, progress: Callable[[str], None] = lambda _: None) -> None:
        self.work, self.tool, self.progress = work, tool, progress
        self.facts: dict[str, Any] = {}
        self._program = find_program(tool)

    def records(self) -> Iterator[Record]:
        """Yield a record for every row. Raises UsageError where not even one process comes to measure."""
        for rows in _by_entry(self.work.rows):
            together = self._run(rows)
            if not together.log.errors and together.log.num_errors is not None and all(together.of(*row) for row in rows):
                yield from (self._judge(row, together) for row in rows)
                continue
            alone = [self._run([row]) for row in rows] if len(rows) > 1 else [together]
            hidden = together.log.errors if not any(outcome.log.errors for outcome in alone) else ()
            for row, outcome in zip(rows, alone, strict=True):
                yield self._judge(row, outcome, hidden)

    def _judge(self, row: tuple[Case, Entry], outcome: _Outcome, hidden: Sequence[Finding] = ()) -> Record:
        """The row's record, with what the sanitizer says of it; `hidden` was found among all rows and in none alone."""
        record, errors = outcome.of(*row), outcome.log.errors
        if record is None and not self.facts:
            raise UsageError(f"--sanitize {self.tool}: {outcome.ended}")
        if errors:
            more = f"; and {len(errors) - 1} more" if len(errors) > 1 else ""
            said = f"; the check said: {record.reason}" if record is not None and record.reason else ""
            return self._settled(row, record, "wrong", f"{self.tool}: {errors[0]}{more}{said}")
        if hidden:
            reason = f"{self.tool}: {hidden[0]}, when all cases of {row[1]} ran in one process; in none of them alone"
            return self._settled(row, record, "wrong", reason)
        if record is None or outcome.log.num_errors is None:
            status = "timeout" if outcome.timed_out else "failed"
            return self._settled(row, record, status, f"{self.tool} came to no result: {outcome.ended}")
        warnings = [f"{self.tool}: {finding}" for finding in outcome.log.findings]
        return dataclasses.replace(record, run=self.work.run, suite=self.work.options.suite, flags=(*record.flags, *warnings))

    def _settled(self, row: tuple[Case, Entry], record: Record | None, status: str, reason: str) -> Record:
        made = record or lost_record(self.work, self.facts, status, reason, *row)
        return dataclasses.replace(made, run=self.work.run, suite=self.work.options.suite, status=status, reason=reason)

    def _run(self, rows: Rows) -> _Outcome:
        """Check rows in one sanitized process."""
        self.progress(f"{self.tool} {rows[0][1]} on {rows[0][0] if len(rows) == 1 else f'{len(rows)} cases'}")
        with tempfile.TemporaryDirectory(prefix="pagedbench.") as scratch:
            folder = Path(scratch)
            words = folder / "words"
            with words.open("wb") as output:
                code = self._wait(self._command(folder, rows), output, self.work.stall_s * len(rows))
            said = words.read_bytes()[-LAST_WORDS:].decode(errors="replace").strip()
            how = f"killed after {self.work.stall_s * len(rows):.0f} s" if code is None else f"ended with exit code {code}"
            log = folder / "log"
            return _Outcome(
                records=self._records(folder / "runs"),
                log=parse(log.read_text(errors="replace") if log.exists() else ""),
                ended=f"{how}; last words: {said}" if said else how,
                timed_out=code is None,
            )

    def _command(self, folder: Path, rows: Rows) -> list[str]:
        """The command line, its cases in a file of their own."""
        cases = {case.name: case.to_json() for case, _ in rows}
        (folder / "cases.json").write_text(json.dumps(list(cases.values())))
        words = [self._program, "--tool", self.tool, *_OPTIONS.get(self.tool, []), "--target-processes", "application-only"]
        words += ["--log-file", str(folder / "log"), sys.executable, "-c", _START, json.dumps(sys.path)]
        words += ["check", "--in-process", "--watched-by", self.tool]
        words += ["--json", "--out", str(folder / "runs"), "--case-file", str(folder / "cases.json")]
        words += [word for entry in dict.fromkeys(str(entry) for _, entry in rows) for word in ("--impl", entry)]
        words += [word for path in self.work.impl_files for word in ("--impl-file", path)]
        words += [word for name, value in rows[0][1].params.items() for word in ("--set", f"{name}={value}")]
        words += ["--relations", self.work.options.relations]
        words += ["--device", self.work.device] if self.work.device else []
        return words + (["--patient"] if self.work.options.patient else [])

    def _wait(self, command: Sequence[str], output: Any, limit_s: float) -> int | None:
        """Run a command to its end and return its exit code, or None where it was killed after `limit_s`."""
        # Every tensor an allocation of its own, as long as it was asked for: within a cache of them, or one rounded up,
        # a kernel reads past its end without being seen.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it may end between the two calls
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _records(self, out: Path) -> dict[tuple[str, str], Record]:
        folder = next(out.iterdir(), None) if out.is_dir() else None
        if folder is None or not (folder / RECORDS).exists():
            return {}
        facts, problem = facts_of(folder)
        if problem is not None:
            print(f"pagedbench: {printable(problem)}", file=sys.stderr)
        if "device" in facts:
            self.work.require_device(facts)
            if facts["device"]["kind"] != "cuda":
                raise UsageError(f"--sanitize {self.tool}: it watches the kernels of a GPU (got {facts['device']['name']})")
            self.facts = {name: fact for name, fact in facts.items() if name not in _OF_ONE_RUN}
        return {(record.case, record.row): record for record in load(folder)[0]}


def _by_entry(rows: Rows) -> list[Rows]:
    """Rows in groups of one entry; those that no GPU runs, and that only say so, in one group."""
    groups: dict[str, list[tuple[Case, Entry]]] = {}
    for case, entry in rows:
        groups.setdefault(str(entry) if "cuda" in entry.impl.devices else "no GPU", []).append((case, entry))
    return list(groups.values())

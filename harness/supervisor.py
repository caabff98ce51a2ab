"""The parent that never dies: hands rows to a worker process, and replaces a worker that crashed, hung or lost its GPU.

The row that was worked on becomes a record with the signal or the error and the worker's last words; all other rows go
to the next worker. A worker is alive as long as it says something: the limit is on silence, not on total time.

A row may fail for what another one did to their worker: it closed standard output, or left a thread behind. So a row
that fails after others is tried once more, alone in a new worker, unless its implementation has failed alone before.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from harness.names import UsageError
from harness.record import Record, parse_line
from harness.words import shortened, signal_name

if TYPE_CHECKING:
    from harness.ops.case import Case
    from harness.options import Options
    from harness.registry import Entry

#: Seconds of silence after which a worker is taken for hung. A first compilation of a large library may take minutes.
STALL_S = 300.0
#: Seconds between two looks at whether a silent worker still lives, and that a worker without a channel is given to end.
LOOK_S = 2.0
#: Bytes of a dead worker's output that its row's record quotes.
LAST_WORDS = 2000
#: A row's reason in which an error of the operating system is told: its worker's descriptors, say, are no row's own.
_OS_ERROR = re.compile(r"prepare: (OSError|BlockingIOError|BrokenPipeError|ConnectionError|InterruptedError|TimeoutError): ")
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from harness.worker import main; main(int(sys.argv[2]))"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a run is to do, as data that a worker can be sent. `rows` stand case by case.

    only_on    slug of the device whose run this continues: on any other nothing is measured
    """

    options: Options
    device: str | None
    run: str
    impl_files: Sequence[str]
    rows: Sequence[tuple[Case, Entry]]
    stall_s: float = STALL_S
    only_on: str | None = None

    def require_device(self, facts: Mapping[str, Any]) -> None:
        """Raise UsageError where a session's device is not that of the run it would continue."""
        here = facts["device"]["slug"]
        if self.only_on not in (None, here):
            raise UsageError(f"--resume {self.run}: was begun on {self.only_on}, this is {here}; start a run of its own")


@dataclasses.dataclass
class _Death:
    """How a worker or a row ended, at which row, if it had come to one, and whether others had been worked on before."""

    status: str
    reason: str
    row: int | None
    after_others: bool = False

    @property
    def told(self) -> str:
        """For a flag: on one line, and short."""
        return f"{self.status} after other rows in one worker ({shortened(' '.join(self.reason.split()), 200)})"


class Supervisor:
    """Runs `work` and yields its records. `facts` holds the device, the toolchain and the self-test once one is known.

    A worker that is done goes to `spare`, where one is given, for the next piece of work.
    """

    def __init__(self, work: Work, progress: Callable[[str], None] = lambda _: None, spare: Spare | None = None) -> None:
        self.work, self.progress, self._spare = work, progress, spare or Spare()
        self._owns_spare = spare is None
        self.facts: dict[str, Any] = {}
        self._waiting = dict(enumerate(work.rows))
        self.spent: dict[str, dict[str, float]] = {}  # of the workers that are done
        self._alone: int | None = None  # the row to be tried once more
        self._suspected: dict[int, _Death] = {}  # how rows failed after others

    def records(self) -> Iterator[Record]:
        """Yield a record for every row, whatever happens to workers. UsageError where none can start."""
        try:
            while self._waiting:
                yield from self._records_of_one()
        finally:
            if self._owns_spare:
                self._spare.close()

    def _records_of_one(self) -> Iterator[Record]:
        """The records of one worker, and of the rows that it takes with it."""
        before = len(self._waiting)
        worker = self._spare.take() if self._alone is None else _Worker()
        try:
            yield from worker.records(self)
        finally:
            if worker.is_idle:
                self._spare.keep(worker)
            else:
                worker.close()
        if worker.death is not None:
            yield from self._bury(worker.death, progressed=len(self._waiting) < before)

    def _bury(self, death: _Death, progressed: bool) -> Iterator[Record]:
        """Records of the rows that a dead worker takes with it: the one it was at; its case's, where none was named."""
        if death.row in self._waiting:
            assert death.row is not None
            if self._is_tried_again(death):
                return
            lost = [death.row]
        elif progressed:
            return
        else:
            first = next(iter(self._waiting.values()))[0].name
            lost = [number for number, (case, _) in self._waiting.items() if case.name == first]
        if not self.facts:
            raise UsageError(f"the worker {death.reason}")
        for number in lost:
            record = lost_record(self.work, self.facts, death.status, death.reason, *self._waiting[number])
            yield self.settle(number, record)

    def settle(self, number: int, record: Record) -> Record:
        """The row is done with; return its record, which says so where it failed after others and alone ended otherwise."""
        self._waiting.pop(number, None)
        if self._alone == number:
            self._alone = None
        before = self._suspected.pop(number, None)
        if before is None:
            return record
        if record.status == before.status:
            return record
        return dataclasses.replace(record, flags=(*record.flags, f"{before.told}; alone it ended {record.status}"))

    def doubts(self, record: Record, row: int, after_others: bool) -> bool:
        """Whether a record of failure is not believed, and its row will be tried once more, alone.

        What fails in `prepare` with anything but an OSError (a compiler's error, a package that is missing) is believed.
        """
        own = (record.reason or "").startswith("prepare: ") and not _OS_ERROR.match(record.reason or "")
        if record.status != "failed" or own:
            return False
        return self._is_tried_again(_Death("failed", record.reason or "", row, after_others))

    def _is_tried_again(self, death: _Death) -> bool:
        assert death.row is not None
        name = self._waiting[death.row][1].impl.name
        if not death.after_others:
            self._spare.condemned.add(name)
        if not death.after_others or name in self._spare.condemned or death.row in self._suspected:
            return False
        self._alone, self._suspected[death.row] = death.row, death
        return True

    def add_spent(self, seconds: Mapping[str, float]) -> None:
        """A worker is done, and says how long it was by phase."""
        total = collections.Counter(self.spent.get("spent_s", {}))
        total.update(seconds)
        self.spent = {"spent_s": dict(total)}
        self.facts |= self.spent

    def request(self) -> dict[str, Any]:
        """The rows still waiting, or the one that is to be tried alone, as a worker reads them."""
        work = self.work
        waiting = self._waiting if self._alone is None else {self._alone: self._waiting[self._alone]}
        return {
            "options": dataclasses.asdict(work.options),
            "device": work.device,
            "run": work.run,
            "impl_files": list(work.impl_files),
            "cases": {case.name: case.to_json() for case, _ in waiting.values()},
            "rows": [
                {"number": number, "case": case.name, "entry": str(entry), "params": dict(entry.params)}
                for number, (case, entry) in waiting.items()
            ],
        }


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
        toolchain=facts["toolchain"],
        traffic_bytes=case.traffic_bytes,
        flops=case.flops,
    )


class Spare:
    """A worker that is done with its work and waits for more: who has many small pieces need not start one for each.

    condemned    implementations that have failed alone, whose failures are believed from then on
    """

    def __init__(self) -> None:
        self.condemned: set[str] = set()
        self._worker: _Worker | None = None

    def take(self) -> _Worker:
        """The worker kept, or a new one."""
        worker, self._worker = self._worker, None
        return worker or _Worker()

    def keep(self, worker: _Worker) -> None:
        """Hold on to one, in place of any before it."""
        self.close()
        self._worker = worker

    def close(self) -> None:
        """End the worker kept."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


class _Worker:
    """One worker process, from its start to its end. `is_idle`: it has done what it was asked and waits for more."""

    def __init__(self) -> None:
        self.death: _Death | None = None
        self.is_idle = False
        self._row: int | None = None
        self._doing = "starting"
        self._rows: set[tuple[int, int]] = set()  # worked on since its start, by piece of work and number
        self._pieces = 0
        self._row_begin = 0  # where the output of the row begins
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), str(write)],
            pass_fds=[write],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        os.close(write)
        self._channel = os.fdopen(read, "rb", buffering=0)

    def records(self, supervisor: Supervisor) -> Iterator[Record]:
        """Send it the work and yield its records until it is done, dies or falls silent."""
        self._supervisor, self._row, self._doing, self.is_idle = supervisor, None, "starting", False
        self._pieces += 1
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it may die at once; reading its channel tells
            self._process.stdin.write(json.dumps(supervisor.request()).encode() + b"\n")
            self._process.stdin.flush()
        for line in self._lines():
            message = json.loads(line)
            if "record" in message:
                record = parse_line(message["record"])
                if self._supervisor.doubts(record, message["row"], self._is_after_others(message["row"])):
                    return
                yield self._supervisor.settle(message["row"], record)
            elif "doing" in message:
                if message["row"] != self._row:
                    self._row_begin = message["words"]
                self._row, self._doing = message["row"], message["doing"]
                if self._row is not None:
                    self._rows.add((self._pieces, self._row))
                self._supervisor.progress(self._doing)
            elif "hello" in message:
                self._supervisor.work.require_device(message["hello"])
                self._supervisor.facts = {**message["hello"], **self._supervisor.spent}
            elif "error" in message:
                raise UsageError(message["error"])
            elif "done" in message:
                self._supervisor.add_spent(message["done"])
                self.is_idle = True
                return
            elif "lost" in message:
                break
        if self.death is None:
            self.death = self._autopsy()

    def _lines(self) -> Iterator[bytes]:
        """Lines of the channel until it closes; on a silence of `stall_s` the worker is killed."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while True:
                if not self._wait(selector):
                    return
                chunk = self._channel.read(1 << 16)
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines

    def _wait(self, selector: selectors.BaseSelector) -> bool:
        """Wait until there is something to read; False where the worker has ended or has been killed for its silence.

        What a worker has started may outlive it with the channel open, so the channel's end is not the only sign.
        """
        patience = time.monotonic() + self._supervisor.work.stall_s
        while not selector.select(max(0.0, min(LOOK_S, patience - time.monotonic()))):
            if self._process.poll() is not None:
                return bool(selector.select(0))  # its last lines may have come since
            if time.monotonic() >= patience:
                self.kill()
                self.death = _Death("timeout", self._silence(), self._row, self._is_after_others(self._row))
                return False
        return True

    def _silence(self) -> str:
        return f"silent for {self._supervisor.work.stall_s:.0f} s in '{self._doing}', killed{self._last_words()}"

    def _autopsy(self) -> _Death:
        try:
            code = self._process.wait(LOOK_S)
            how = f"killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            self.kill()
            how = "closed its channel and lived on, killed"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # whatever it started
        reason = f"died in '{self._doing}': {how}{self._last_words()}"
        return _Death("failed", reason, self._row, self._is_after_others(self._row))

    def _is_after_others(self, row: int | None) -> bool:
        """Whether this process has worked on any row but this one."""
        return any(worked != (self._pieces, row) for worked in self._rows)

    def _last_words(self) -> str:
        """What it said of late, but nothing that was said before the row it is at."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(size - LAST_WORDS, min(self._row_begin, size)))
        words = self._output.read().decode(errors="replace").strip()
        return f"; last words: {words}" if words else "; it left no last words"

    def kill(self) -> None:
        """End the worker and whatever it started; harmless when it has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end between the two calls
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill it and let go of its channel and its words."""
        self.kill()
        self._channel.close()
        self._output.close()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # what it did not read before it died
                self._process.stdin.close()

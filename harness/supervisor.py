"""The parent that never dies: hands rows to a worker process, and replaces a worker that crashed, hung or lost its GPU.

The row that was worked on becomes a record with the signal or the error and the worker's last words; all other rows go
to the next worker.

A row may fail for what another one did to their worker: it closed standard output, or left a thread behind. So a row
that fails after others is tried once more, alone in a new worker, unless its implementation has failed alone before.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from harness.names import UsageError
from harness.record import Record
from harness.work import Work, lost_record, rows_to_json
from harness.workers import Death, Spare, Worker

#: A row's reason in which an error of the operating system is told: its worker's descriptors, say, are no row's own.
_OS_ERROR = re.compile(r"prepare: (OSError|BlockingIOError|BrokenPipeError|ConnectionError|InterruptedError|TimeoutError): ")


class Supervisor:
    """The engine of one device: runs `work` in worker processes and yields its records.

    A worker that is done goes to `spare`, where one is given, for the next piece of work.
    """

    def __init__(self, work: Work, progress: Callable[[str], None] = lambda _: None, spare: Spare | None = None) -> None:
        self.work, self.progress, self._spare = work, progress, spare or Spare()
        self._owns_spare = spare is None
        self.facts: dict[str, Any] = {}
        self._waiting = dict(enumerate(work.rows))
        self.spent: dict[str, dict[str, float]] = {}  # of the workers that are done
        self._alone: int | None = None  # the row to be tried once more
        self._suspected: dict[int, Death] = {}  # how rows failed after others

    def introduce(self) -> dict[str, Any]:
        """Start a worker before it is handed any row, and return its `facts`. UsageError where none can start."""
        waiting, self._waiting = self._waiting, {}
        while not self.facts:
            for _ in self._records_of_one():
                raise AssertionError("a record without a row")
        self._waiting = waiting
        return self.facts

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
        worker = self._spare.take() if self._alone is None else self._spare.start()
        try:
            yield from self._heard(worker)
        finally:
            if worker.is_idle:
                self._spare.keep(worker)
            else:
                worker.close()
        if worker.death is not None:
            yield from self._bury(worker.death, progressed=len(self._waiting) < before)

    def _heard(self, worker: Worker) -> Iterator[Record]:
        """The records that a worker makes of what waits."""
        for message in worker.ask(self._request(), self.work.stall_s):
            if "record" in message:
                number, record = message["row"], message["record"]
                if self._doubts(record, number, worker.is_after_others(number)):
                    return
                yield self._settle(number, record)
            elif "doing" in message:
                self.progress(message["doing"])
            elif "hello" in message:
                self.work.require_device(message["hello"])
                self.facts = {**message["hello"], **self.spent}
            elif "error" in message:
                raise UsageError(message["error"])
            elif "done" in message:
                self._add_spent(message["done"])

    def _bury(self, death: Death, progressed: bool) -> Iterator[Record]:
        """Records of the rows that a dead worker takes with it: the one it was at; its case's, where none was named."""
        if death.between:
            return  # a new one is started: this one was kept
        if not self.facts:
            raise UsageError(f"the worker {death.reason}")
        if death.row in self._waiting:
            assert death.row is not None
            if self._is_tried_again(death):
                return
            lost = [death.row]
        elif progressed:
            return
        else:
            first = next((case.name for case, _ in self._waiting.values()), None)
            lost = [number for number, (case, _) in self._waiting.items() if case.name == first]
        for number in lost:
            record = lost_record(self.work, self.facts, death.status, death.reason, *self._waiting[number])
            yield self._settle(number, record)

    def _settle(self, number: int, record: Record) -> Record:
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

    def _doubts(self, record: Record, row: int, after_others: bool) -> bool:
        """Whether a record of failure is not believed, and its row will be tried once more, alone.

        What fails in `prepare` with anything but an OSError (a compiler's error, a package that is missing) is believed.
        """
        own = (record.reason or "").startswith("prepare: ") and not _OS_ERROR.match(record.reason or "")
        if record.status != "failed" or own:
            return False
        return self._is_tried_again(Death("failed", record.reason or "", row, after_others))

    def _is_tried_again(self, death: Death) -> bool:
        assert death.row is not None
        name = self._waiting[death.row][1].impl.name
        if not death.after_others:
            self._spare.condemned.add(name)
        if not death.after_others or name in self._spare.condemned or death.row in self._suspected:
            return False
        self._alone, self._suspected[death.row] = death.row, death
        return True

    def _add_spent(self, seconds: Mapping[str, float]) -> None:
        """A worker is done, and says how long it was by phase."""
        total = collections.Counter(self.spent.get("spent_s", {}))
        total.update(seconds)
        self.spent = {"spent_s": dict(total)}
        self.facts |= self.spent

    def _request(self) -> dict[str, Any]:
        """The rows still waiting, or the one that is to be tried alone, as a worker reads them."""
        work = self.work
        waiting = self._waiting if self._alone is None else {self._alone: self._waiting[self._alone]}
        return {
            "options": dataclasses.asdict(work.options),
            "device": work.device,
            "run": work.run,
            "impl_files": list(work.impl_files),
            **rows_to_json(waiting),
        }

"""Many devices, one run: cases are handed out, one at a time to each, and their records gathered.

All rows of a case are worked on one device: they are compared with each other and with the ceiling of that device. So a
case is handed out whole and its records come back together; a device that is lost on the way gives its case back.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from harness.names import UsageError
from harness.record import Record
from harness.words import shortened
from harness.work import Rows, Work, lost_record

#: How often a case is handed out that each time is lost with its lane.
TRIES = 3
#: What of a toolchain may differ from lane to lane: nodes of one cluster seldom run one build of the system's kernel.
_MAY_DIFFER = ("system",)

Say = Callable[[str], None]
Facts = dict[str, Any]


class LaneLost(Exception):
    """What a lane was doing will never be done; the message says what became of it."""


class Lane(Protocol):
    """One device, and whatever measures on it. Its methods block, and are called from one thread: all but `stop`."""

    name: str

    def introduce(self) -> Facts:
        """Return device, toolchain and self-test. Raises UsageError where it cannot work, LaneLost where it is gone."""

    def measure(self, rows: Rows, say: Say) -> tuple[list[Record], Mapping[str, float]]:
        """Return the record of each row of a case, and seconds by phase. Raises as `introduce` does."""

    def stop(self) -> None:
        """From another thread: let what it is doing end at once, with an exception, and begin nothing more."""

    def close(self) -> None:
        """Let go of whatever it holds."""


class Crew(Protocol):
    """Where lanes come from. `option` is what asked for them, as errors name it."""

    option: str

    def lanes(self, at_most: int) -> Sequence[Lane]:
        """Return at least one lane, and no more than there is work for. Raises UsageError where there is none."""

    def replacement(self) -> Lane | None:
        """Return a lane in place of a lost one, where there may be one."""

    def close(self) -> None:
        """No lane is needed any more."""


class Spread:
    """The engine of many devices. `facts` are those of the first, with "devices", which has each one's own."""

    def __init__(self, work: Work, crew: Crew, progress: Say = lambda _: None) -> None:
        self.work, self.progress, self._crew = work, progress, crew
        self.facts: Facts = {}
        self._cases = collections.deque(work.by_case())
        self._at: dict[Lane, Rows] = {}  # who is at which case
        self._threads: dict[Lane, ThreadPoolExecutor] = {}
        self._jobs: dict[Lane, Future[Any]] = {}  # what each lane was given last
        self._events: queue.SimpleQueue[str | tuple[Lane, Future[Any]]] = queue.SimpleQueue()
        self._lost: dict[str, list[str]] = {}  # by case, the lanes that were lost with it
        self._spent: collections.Counter[str] = collections.Counter()

    def records(self) -> Iterator[Record]:
        """Yield a record for every row, case by case as they are done. UsageError where not every lane can work."""
        if not self._cases:
            return
        try:
            for lane in self._crew.lanes(at_most=len(self._cases)):
                self._begin(lane, lane.introduce)
            idle = self._meet()
            while self._cases or self._at:
                while idle and self._cases:
                    lane = idle.pop()
                    self._at[lane] = self._cases.popleft()
                    self._begin(lane, lane.measure, self._at[lane], self._events.put)
                yield from self._settle(*self._next(), idle)
        finally:
            self._dismiss()

    def _begin(self, lane: Lane, job: Callable[..., Any], *given: Any) -> None:
        """Let the lane's thread do a job, whose end is an event. A worker dies with its thread, which is kept for it."""
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(max_workers=1)
        self._jobs[lane] = self._threads[lane].submit(job, *given)
        self._jobs[lane].add_done_callback(lambda done: self._events.put((lane, done)))

    def _next(self) -> tuple[Lane, Future[Any]]:
        """The next job that is done; what lanes say meanwhile is passed on."""
        if not self._threads:
            losses = "; ".join(itertools.chain(*self._lost.values()))
            raise UsageError(f"{self._crew.option}: no worker is left ({losses}); --resume {self.work.run} goes on")
        while True:
            try:  # while a lane measures, its own limit on silence holds
                event = self._events.get(timeout=None if self._at else self.work.stall_s)
            except queue.Empty:
                said = f"{self._crew.option}: no worker has come in {self.work.stall_s:.0f} s"
                raise UsageError(f"{said}; --resume {self.work.run} goes on") from None
            if not isinstance(event, str):
                return event
            self.progress(event)

    def _meet(self) -> list[Lane]:
        """Wait until all lanes are there and return them; UsageError names those that cannot work, or not together."""
        found: dict[Lane, Facts] = {}
        errors: dict[str, str] = {}
        for _ in list(self._threads):
            lane, done = self._next()
            try:
                found[lane] = done.result()
            except (UsageError, LaneLost) as error:
                errors[lane.name] = str(error)
        if errors:
            texts = set(errors.values())
            raise UsageError(texts.pop() if len(texts) == 1 else "; ".join(f"{name}: {why}" for name, why in errors.items()))
        lanes = [lane for lane in self._threads if lane in found]
        self._refuse_shared({lane.name: found[lane]["device"].get("uuid") for lane in lanes})
        for lane in lanes:
            self._take_in(lane, found[lane])
        return lanes[::-1]

    def _refuse_shared(self, uuids: Mapping[str, str | None]) -> None:
        """Raise UsageError where two lanes have one GPU, under two names or from two nodes: they would time each other."""
        whose: dict[str, str] = {}
        for name, uuid in uuids.items():
            if uuid and whose.setdefault(uuid, name) != name:
                raise UsageError(f"{self._crew.option}: {whose[uuid]} and {name} are one GPU, {uuid}; name it once")

    def _take_in(self, lane: Lane, facts: Facts) -> None:
        """Add a lane's facts to the run's. Raises UsageError where its device or toolchain is another one."""
        self.facts = self.facts or {**facts, "devices": []}
        for rule, ours, theirs in (
            ("kind of device", self.facts["device"]["slug"], facts["device"]["slug"]),
            *(("toolchain", *pair) for pair in _differences(self.facts["toolchain"], facts["toolchain"])),
        ):
            if ours != theirs:
                first = self.facts["devices"][0]["lane"]
                raise UsageError(f"{self._crew.option}: a run has one {rule}; {first} has {ours}, {lane.name} has {theirs}")
        own = {name: fact for name, fact in facts.items() if name not in ("toolchain", "spent_s")}
        self.facts["devices"].append({"lane": lane.name, **own})

    def _settle(self, lane: Lane, done: Future[Any], idle: list[Lane]) -> Iterator[Record]:
        """What comes of a job: records of its case, or of those that are given up; a lane that is there, or is lost."""
        rows = self._at.pop(lane, None)
        try:
            found = done.result()
        except LaneLost as lost:
            yield from self._lose(lane, rows, str(lost))
            return
        except UsageError as error:
            raise UsageError(f"{lane.name}: {error}") from error
        idle.append(lane)
        if rows is None:  # it has introduced itself, in place of another one
            self._take_in(lane, found)
            return
        records, spent = found
        self._spent.update(spent)
        self.facts["spent_s"] = dict(self._spent)
        losses = self._lost.get(rows[0][0].name, [])
        flags = (f"run again, lost with {shortened('; '.join(losses), 300)}",) if losses else ()
        for record in records:
            yield dataclasses.replace(record, flags=(*record.flags, *flags))

    def _lose(self, lane: Lane, rows: Rows | None, why: str) -> Iterator[Record]:
        """A lane is lost: its case goes to another one, or is given up where it has been lost too often."""
        self._threads.pop(lane).shutdown(wait=False)
        lane.close()
        if rows is None:  # it never came
            return
        losses = self._lost.setdefault(rows[0][0].name, [])
        losses.append(f"{lane.name}: {why}")
        if len(losses) < TRIES:
            self._cases.appendleft(rows)
        else:
            reason = f"lost with its worker {len(losses)} times: {'; '.join(losses)}"
            for case, entry in rows:
                yield lost_record(self.work, self.facts, "failed", reason, case, entry)
        successor = self._crew.replacement() if self._cases else None
        if successor is not None:
            self._begin(successor, successor.introduce)

    def _dismiss(self) -> None:
        """End all lanes, in the middle of what they do."""
        for lane in self._threads:
            if not self._jobs[lane].done():
                lane.stop()
        for lane, thread in self._threads.items():
            thread.shutdown(wait=True)
            lane.close()
        self._crew.close()


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str]]:
    names = sorted({*ours, *theirs} - {*_MAY_DIFFER})
    return [(f"{n} {ours.get(n, 'missing')}", f"{n} {theirs.get(n, 'missing')}") for n in names if ours.get(n) != theirs.get(n)]

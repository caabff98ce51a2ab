"""Worker processes as their parent sees them: what each says, and how it ended. Inside one runs worker.py.

A worker is alive as long as it says something: the limit is on silence, not on total time.
"""

from __future__ import annotations

import dataclasses
import selectors
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from harness.child import LOOK_S, START, Child
from harness.messages import Garbled, Kinds, Lines, Script, message_of, require_facts
from harness.words import shortened

#: What a worker may say; see worker.py.
_KINDS: Kinds = {
    "hello": {"hello": (dict,)},
    "doing": {"doing": (str,), "row": (int, type(None)), "words": (int,)},
    "record": {"record": (str,), "row": (int,)},
    "lost": {"lost": (str,)},
    "error": {"error": (str,)},
    "done": {"done": (dict,)},
}
_START = START.format(module="harness.worker")


@dataclasses.dataclass
class Death:
    """How a worker or a row ended, at which row, if it had come to one, and whether others had been worked on before.

    between    it had done other work and not begun with this: no row of this is to blame
    """

    status: str
    reason: str
    row: int | None
    after_others: bool = False
    between: bool = False

    @property
    def told(self) -> str:
        """For a flag: on one line, and short."""
        return f"{self.status} after other rows in one worker ({shortened(' '.join(self.reason.split()), 200)})"


class Worker:
    """One worker process, from its start to its end.

    is_idle    it has done what it was asked and waits for more
    death      how it ended, where it ended of itself or by its silence

    It dies with the thread that started it, not only with the process.
    """

    def __init__(self) -> None:
        self.death: Death | None = None
        self.is_idle = False
        self._row: int | None = None
        self._began = False  # with the piece of work that it was asked last
        self._doing = "starting"
        self._rows: set[tuple[int, int]] = set()  # worked on since its start, by piece of work and number
        self._pieces = 0
        self._row_begin = 0  # where the output of the row begins
        self._lines = Lines()
        self._child = Child(_START, sys.path)

    def ask(self, request: Mapping[str, Any], stall_s: float) -> Iterator[dict[str, Any]]:
        """Send it a piece of work and yield what it says, records as such, until it is done, dies or is silent too long."""
        self._row, self._doing, self.is_idle = None, "starting", False
        self._began = False
        self._pieces += 1
        self._child.send(request)
        script = Script(request["rows"])
        try:
            for line in self._heard(stall_s):
                message = self._understood(line, script)
                if "lost" in message:
                    break
                self.is_idle = "done" in message
                yield message
                if self.is_idle:
                    return
        except Garbled as how:
            self.kill()
            reason = f"spoilt its channel in '{self._doing}', killed: {how}{self._child.last_words(self._row_begin)}"
            self.death = self._death("failed", reason)
        if self.death is None:
            self.death = self._autopsy()

    def _understood(self, line: bytes, script: Script) -> dict[str, Any]:
        """A message that fits what was asked and what has been said; raises Garbled for any other."""
        message = message_of(line, _KINDS)
        if not self._began and not message.keys() & {"hello", "error", "lost"}:
            raise Garbled(f"no hello: {shortened(str(message), 200)}")
        if "hello" in message:
            if self._began:
                raise Garbled("hello in the middle of its work")
            require_facts(message["hello"], "slug", "kind", "name", "uuid")
        self._began = True
        if "record" in message:
            message["record"] = script.record(message["record"], message["row"])
        elif "doing" in message:
            if message["row"] is not None:
                script.require_row(message["row"])
            self._note(message)
        elif "done" in message:
            script.require_all()
            if not all(type(seconds) in (int, float) for seconds in message["done"].values()):
                raise Garbled(f"done in no seconds: {shortened(str(message), 200)}")
        return message

    def _note(self, message: Mapping[str, Any]) -> None:
        if message["row"] != self._row:
            self._row_begin = message["words"]
        self._row, self._doing = message["row"], message["doing"]
        if self._row is not None:
            self._rows.add((self._pieces, self._row))

    def _heard(self, stall_s: float) -> Iterator[bytes]:
        """Lines of the channel until it closes; on a silence of `stall_s` the worker is killed. Raises Garbled."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.channel, selectors.EVENT_READ)
            while True:
                while self._lines.whole:
                    yield self._lines.whole.pop(0)
                if not self._wait(selector, stall_s):
                    return
                chunk = self._child.channel.read(1 << 16)
                if not chunk:
                    return
                self._lines.add(chunk)

    def _wait(self, selector: selectors.BaseSelector, stall_s: float) -> bool:
        """Wait until there is something to read; False where the worker has ended or has been killed for its silence.

        What a worker has started may outlive it with the channel open, so the channel's end is not the only sign.
        """
        patience = time.monotonic() + stall_s
        while not selector.select(max(0.0, min(LOOK_S, patience - time.monotonic()))):
            if self._child.process.poll() is not None:
                return bool(selector.select(0))  # its last lines may have come since
            if time.monotonic() >= patience:
                self.kill()
                reason = f"silent for {stall_s:.0f} s in '{self._doing}', killed{self._child.last_words(self._row_begin)}"
                self.death = self._death("timeout", reason)
                return False
        return True

    def _autopsy(self) -> Death:
        how = self._child.ending()
        self._child.kill_group()
        reason = f"died in '{self._doing}': {how}{self._child.last_words(self._row_begin)}"
        return self._death("failed", reason)

    def _death(self, status: str, reason: str) -> Death:
        between = self._pieces > 1 and not self._began
        return Death(status, reason, self._row, self.is_after_others(self._row), between)

    def is_after_others(self, row: int | None) -> bool:
        """Whether this process has worked on any row but this one."""
        return any(worked != (self._pieces, row) for worked in self._rows)

    def kill(self) -> None:
        """End the worker and whatever it started; harmless when it has ended."""
        self._child.kill()

    def close(self) -> None:
        """Kill it and let go of its channel and its words."""
        self._child.close()


class Stopped(Exception):
    """No worker is started any more: whoever asks for one is to end."""


class Spare:
    """Where workers come from, and where one that is done waits for more: small pieces of work need not start one each.

    condemned    implementations that have failed alone, whose failures are believed from then on
    """

    def __init__(self) -> None:
        self.condemned: set[str] = set()
        self._worker: Worker | None = None
        self._at_work: Worker | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def take(self) -> Worker:
        """The worker kept, or a new one. Raises Stopped after `stop`."""
        return self._hand_out(self._worker)

    def start(self) -> Worker:
        """A new worker. Raises Stopped after `stop`."""
        return self._hand_out(None)

    def _hand_out(self, kept: Worker | None) -> Worker:
        with self._lock:
            if self._stopped:
                raise Stopped
            if kept is not None:
                self._worker = None
            self._at_work = kept or Worker()
            return self._at_work

    def keep(self, worker: Worker) -> None:
        """Hold on to one, in place of any before it."""
        self.close()
        self._worker = worker

    def stop(self) -> None:
        """From another thread: kill the worker that was handed out last, and start no other."""
        with self._lock:
            self._stopped = True
            if self._at_work is not None:
                self._at_work.kill()

    def close(self) -> None:
        """End the worker kept."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

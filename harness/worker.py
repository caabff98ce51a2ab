"""One process that may die: it measures rows and tells its parent, a line of JSON at a time. See workers.py.

Lines it reads: a piece of work each. Lines it writes: {"hello": facts of the device}, {"doing": what, "row": number,
"words": bytes of output so far}, {"record": ..., "row": number}, {"lost": why} before it gives up a device that answers no
more, {"error": why} for wrong usage, {"done": seconds by phase}.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from harness.names import UsageError
from harness.registry import default_registry
from harness.work import rows_from_json

_PR_SET_PDEATHSIG = 1


def main(channel: int) -> None:
    """Work through what standard input asks for; `channel` is the descriptor that the parent reads."""
    die_with_parent()
    faulthandler.enable()  # last words of a crash: where each thread was
    pipe = os.fdopen(channel, "w", buffering=1)
    output = os.dup(2)  # a row may close or replace its own

    def tell(**message: Any) -> None:
        pipe.write(json.dumps(message) + "\n")

    try:
        desk = _Desk(tell, lambda: _size(output))
        for line in sys.stdin:
            tell(done=desk.work(json.loads(line)))
    except UsageError as error:
        tell(error=str(error))
    except BrokenPipeError:
        os._exit(1)
    except Exception:
        tell(error=traceback.format_exc())


def _size(output: int) -> int:
    """Bytes written so far, those that Python still holds included, so that no row is quoted with another one's words."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a row may have closed or replaced it
        sys.stdout.flush()
    return os.fstat(output).st_size


class _Desk:
    """Holds the session from one piece of work to the next, as long as what is asked is of the same run and device."""

    def __init__(self, tell: Any, size: Callable[[], int]) -> None:
        self._tell, self._size = tell, size
        self._asked: dict[str, Any] = {}
        self._session: Any = None

    def work(self, asked: dict[str, Any]) -> dict[str, float]:
        """Work through a piece, tell its records, and return the seconds that it took by phase."""
        from harness.session import DeviceLost, Task

        rows = {name: asked.pop(name) for name in ("rows", "cases")}
        if asked != self._asked:
            self._asked, self._session = asked, _session(asked)
        session = self._session
        session.spent_s.clear()
        self._tell(hello=session.facts())
        tasks = [
            Task(number=number, case=case, entry=entry)
            for number, (case, entry) in rows_from_json(rows, session.registry).items()
        ]
        try:
            for number, record in session.run_tasks(tasks, self._doing):
                self._tell(record=record.to_line(), row=number)
        except DeviceLost as lost:
            self._tell(lost=str(lost))
            os._exit(1)  # what a lost context would do on the way out is not worth waiting for
        return dict(session.spent_s)

    def _doing(self, doing: str, row: int | None) -> None:
        self._tell(doing=doing, row=row, words=self._size())


def _session(asked: dict[str, Any]) -> Any:
    from harness.options import Options
    from harness.session import Session

    registry = default_registry(asked["impl_files"], rehearsed=True)
    return Session(Options(**asked["options"]), registry, asked["device"], run=asked["run"], isolated=True)


def die_with_parent() -> None:
    """On Linux, be killed when the parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

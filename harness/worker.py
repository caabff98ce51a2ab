"""One process that may die: it measures rows and tells its parent, a line of JSON at a time. See supervisor.py.

Lines it reads: a piece of work each. Lines it writes: {"hello": facts of the device}, {"doing": what, "row": number,
"words": bytes of output so far}, {"record": ..., "row": number}, {"lost": why} before it gives up a device that answers no
more, {"error": why} for wrong usage, {"done": seconds by phase}.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from harness.names import UsageError
from harness.ops import case_from_json
from harness.registry import Registry, default_registry

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
        for line in sys.stdin:
            tell(done=_work(json.loads(line), tell, lambda: _size(output)))
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


def _work(asked: dict[str, Any], tell: Any, size: Callable[[], int]) -> dict[str, float]:
    from harness.options import Options
    from harness.session import DeviceLost, Session, Task

    registry = default_registry(asked["impl_files"], rehearsed=True)
    session = Session(Options(**asked["options"]), registry, asked["device"], run=asked["run"], isolated=True)
    tell(hello=session.facts())
    cases = {name: case_from_json(data) for name, data in asked["cases"].items()}
    rows = [
        Task(number=row["number"], case=cases[row["case"]], entry=_entry(registry, row["entry"], row["params"]))
        for row in asked["rows"]
    ]
    try:
        for number, record in session.run_tasks(rows, lambda doing, row: tell(doing=doing, row=row, words=size())):
            tell(record=record.to_line(), row=number)
    except DeviceLost as lost:
        tell(lost=str(lost))
        os._exit(1)  # what a lost context would do on the way out is not worth waiting for
    return session.spent_s


def _entry(registry: Registry, name: str, params: dict[str, Any]) -> Any:
    (entry,) = registry.entries([name], roles=("implementation", "control", "reader"))
    return dataclasses.replace(entry, params=params)


def die_with_parent() -> None:
    """On Linux, be killed when the parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

"""Lines of JSON between a process of ours and its parent, on descriptors that the rows it runs may close, replace or write to.

A row that does so costs itself and its process, never the run: the process ends where its descriptors are no longer what
they were, and the parent takes no line for granted (see messages.py).
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
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from harness.names import UsageError

#: Exit code of a process whose descriptors a row has closed or replaced, so that it can tell nobody.
LOST = 113

_PR_SET_PDEATHSIG = 1


class Channel:
    """The process's end: what the parent asks, what it is told, and where last words go."""

    def __init__(self, told: int) -> None:
        asked, self._told, self._output = os.dup(0), told, os.dup(2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # a row that reads its standard input finds an end, and not what is asked next
        os.close(nothing)
        self._asked = os.fdopen(asked, "rb")
        self._kept = {file: _identity(file) for file in (asked, told, self._output)}

    def asked(self) -> Iterator[dict[str, Any]]:
        """What the parent asks, until it has gone."""
        for line in self._asked:
            yield json.loads(line)

    def tell(self, **message: Any) -> None:
        """Tell the parent. Does not return where a row has spoilt the descriptors: the row is the one that was told last."""
        self._require_own()
        left = json.dumps(message).encode() + b"\n"
        while left:
            left = left[os.write(self._told, left) :]

    def printed(self) -> int:
        """Bytes printed so far, those that Python still holds included, so that no row is quoted with another one's words."""
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a row may have closed or replaced it
            sys.stdout.flush()
        self._require_own()
        return os.fstat(self._output).st_size

    def give_up(self, **message: Any) -> NoReturn:
        """Tell the parent, and end without what libraries do on the way out."""
        self.tell(**message)
        os._exit(1)

    def end(self, words: str) -> NoReturn:
        """End with last words."""
        with contextlib.suppress(OSError):
            os.write(self._output, words.encode())
        os._exit(1)

    def _require_own(self) -> None:
        """A descriptor that was closed may be another file's by now, which is not ours to write into."""
        if any(_identity(file) != kept for file, kept in self._kept.items()):
            os._exit(LOST)


def serve(channel: int, work: Callable[[Channel], None]) -> None:
    """Do `work` as the child of a parent that reads the descriptor `channel`.

    Wrong usage is told the parent, and ends the run. Whatever else goes wrong ends this process, at a cost of one row.
    """
    die_with_parent()
    faulthandler.enable()  # last words of a crash: where each thread was
    parent = Channel(channel)
    try:
        work(parent)
    except UsageError as error:
        parent.tell(error=str(error))
    except BrokenPipeError:
        os._exit(1)
    except Exception:
        parent.end(traceback.format_exc())


def die_with_parent() -> None:
    """On Linux, be killed when the parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _identity(file: int) -> tuple[int, int] | None:
    """Which file a descriptor is of; None where it is closed."""
    try:
        found = os.fstat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino

"""Signs of life from long work of ours: inputs and truth of a large case take longer than a kernel may be silent.

`beat` is called from within that work, never by a clock of its own, so that whoever waits for a kernel hears nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator

#: Seconds between two signs, at least.
BEAT_S = 2.0

_clock = time.monotonic
_tell: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar("tell", default=None)


@contextlib.contextmanager
def telling(tell: Callable[[], None]) -> Iterator[None]:
    """Within, call `tell` when `beat` is called, at most every BEAT_S."""
    last = _clock()

    def told() -> None:
        nonlocal last
        if _clock() - last >= BEAT_S:
            last = _clock()
            tell()

    token = _tell.set(told)
    try:
        yield
    finally:
        _tell.reset(token)


def beat() -> None:
    """Say that the work goes on, to whoever listens."""
    tell = _tell.get()
    if tell is not None:
        tell()

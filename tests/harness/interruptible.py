"""Commands that a test breaks off: one that it starts and interrupts, and duels that end while they measure."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.duel import Duel


@contextlib.contextmanager
def started(words: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The command at work, its stderr in a pipe; it ends with the test, whatever comes.

    What a shell starts in its background ignores Ctrl-C, and so would a command that tests start there.
    """
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-m", "harness", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listens, **options) as running:
        try:
            yield running
        finally:
            running.kill()


def broken_off(monkeypatch: pytest.MonkeyPatch, at: int, end: BaseException, kept: Callable[[], list[Any]]) -> list[Any]:
    """Let a duel raise `end` as it is about to visit for the `at`-th time; the list returned then holds what was `kept()`."""
    visits, found, real = [], [], Duel.alternate

    def alternate(self: Duel, *given: Any) -> Any:
        visits.append(given)
        if len(visits) == at:
            found.extend(kept())
            raise end
        return real(self, *given)

    monkeypatch.setattr(Duel, "alternate", alternate)
    return found

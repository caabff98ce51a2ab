"""A command that a test starts and interrupts."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


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

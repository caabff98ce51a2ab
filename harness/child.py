"""A Python process of ours that may die: told what to do in lines of JSON, answering on a channel of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from harness.channel import LOST
from harness.words import signal_name

#: Bytes of what a process printed last that are told when it has died.
LAST_WORDS = 2000
#: Seconds between two looks at whether a silent process still lives, and that one without a channel is given to end.
LOOK_S = 2.0
#: A program that runs `main` of a module, which it is told how to find and on which descriptor to answer.
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(int(sys.argv[2]))"


class Child:
    """A program (see START), run by this Python with `path` to import from, in a process group of its own, in `folder` or here.

    process    the process
    channel    what it answers, unbuffered bytes; what it prints goes to a file instead
    """

    def __init__(self, program: str, path: Sequence[str], folder: Path | None = None) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(list(path)), str(write)],
            pass_fds=[write],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        os.close(write)
        self.channel: IO[bytes] = os.fdopen(read, "rb", buffering=0)

    def send(self, message: Mapping[str, Any]) -> None:
        """Tell it something; that it has died shows when its channel is read."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def printed(self) -> int:
        """Bytes that it has printed."""
        return self._output.seek(0, os.SEEK_END)

    def last_words(self, since: int = 0) -> str:
        """What it printed of late, from byte `since` on, as the end of a sentence on its death."""
        size = self.printed()
        self._output.seek(max(size - LAST_WORDS, min(since, size)))
        words = self._output.read().decode(errors="replace").strip()
        return f"; last words: {words}" if words else "; it left no last words"

    def ending(self) -> str:
        """How it ended, now that its channel has closed; one that lives on without it is killed."""
        try:
            code = self.process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its channel and lived on, killed"
        if code == LOST:
            return "lost its channel, by a descriptor closed or replaced that was not the row's own"
        return f"killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """End it and whatever it started; harmless when it has ended."""
        if self.process.poll() is None:
            self.kill_group()
        self.process.wait()

    def kill_group(self) -> None:
        """End whatever it started, also after itself."""
        with contextlib.suppress(ProcessLookupError):  # it may end before the call
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it and let go of its channel and its words."""
        self.kill()
        self.channel.close()
        self._output.close()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # what it did not read before it died
                self.process.stdin.close()

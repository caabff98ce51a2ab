"""A user's file is imported once in a short-lived process first: one that ends Python must not end the parent, unseen.

`os._exit(0)` at import would let `pagedbench check` succeed without having checked anything, and a crash would leave no line.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

from harness.names import UsageError
from harness.words import signal_name

#: Seconds that an import may take.
IMPORT_S = 60.0
#: Seconds between two looks at whether it still lives, and that it is given to end.
LOOK_S = 2.0
#: Bytes of the process's output that the error quotes, at most.
LAST_WORDS = 1000
_BACK = b"back"
# An ordinary failure comes back too: the parent meets the same one and names it.
_START = f"""
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from harness.names import UsageError
from harness.registry import load_file
try:
    load_file(sys.argv[2])
except UsageError:
    pass
os.write(int(sys.argv[3]), {_BACK!r})
os._exit(0)
"""


def rehearse(path: str) -> None:
    """Import `path` in a process of its own. Raises UsageError, saying how it ended, where the import does not come back."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as output, os.fdopen(read, "rb", buffering=0) as channel:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), path, str(write)],
            pass_fds=[write], start_new_session=True, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        os.close(write)
        try:
            patience = time.monotonic() + IMPORT_S
            # What it has started may hold the channel open, so the channel's end is not the only sign.
            while not select.select([channel], [], [], LOOK_S)[0] and process.poll() is None and time.monotonic() < patience:
                pass
            if select.select([channel], [], [], 0)[0] and channel.read(len(_BACK)) == _BACK:
                return
            is_late = time.monotonic() >= patience
            how = f"takes more than {IMPORT_S:.0f} s" if is_late else f"ends Python: {_ending(process)}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it has started
            process.wait()
        output.seek(max(output.seek(0, os.SEEK_END) - LAST_WORDS, 0))
        words = output.read().decode(errors="replace").strip()
    raise UsageError(f"--impl-file {path}: importing it {how}" + (f"; last words: {words}" if words else ""))


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return "it closed every descriptor and lived on"
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"

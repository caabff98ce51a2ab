"""A process of ours and what it leaves behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from harness.child import Child

#: Starts another process, says its number, and waits to be told something.
PARENT = """
import os, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
os.write(int(sys.argv[2]), b"%d\\n" % other.pid)
print("my words", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def child():
    started = Child(PARENT, sys.path)
    yield started
    started.close()


def lives(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_what_it_started_ends_with_it(child):
    """An arm of a comparison, too: what it leaves running would take time from the next."""
    other = int(child.channel.read(64))
    assert lives(other)

    child.close()

    deadline = time.monotonic() + 5
    while lives(other) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lives(other)


def test_its_last_words_are_of_its_own_row(child):
    """What it printed before a given byte is somebody else's."""
    child.channel.read(64)
    child.send({})
    child.process.wait()

    assert child.last_words() == "; last words: my words"
    assert child.last_words(since=child.printed()) == "; it left no last words"

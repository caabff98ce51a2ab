"""A user's file that ends Python when it is imported ends a process of its own, with one line that says so."""

from __future__ import annotations

import time

import pytest

from harness import rehearsal
from harness.cli import main
from harness.names import UsageError
from harness.rehearsal import rehearse


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("import os; os._exit(0)", "ends Python: exit code 0"),
        ("import os; print('no licence', flush=True); os._exit(3)", "ends Python: exit code 3; last words: no licence"),
        ("import os, time; os.fork() or time.sleep(30); os._exit(4)", "ends Python: exit code 4"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ends Python: killed by SIGKILL"),
    ],
)
def test_a_file_that_ends_python_ends_no_run_unseen(tmp_path, capsys, text, how):
    """Exit code 2 and one line, from every command that takes such a file."""
    path = tmp_path / "ends.py"
    path.write_text(text)

    assert main(["list", "--impl-file", str(path)]) == 2
    assert capsys.readouterr().err == f"pagedbench: --impl-file {path}: importing it {how}\n"


def test_a_file_that_hangs_is_given_up(tmp_path, monkeypatch):
    """It waits for a lock, say, and has started something that does, too."""
    monkeypatch.setattr(rehearsal, "IMPORT_S", 0.4)
    monkeypatch.setattr(rehearsal, "LOOK_S", 0.1)
    path = tmp_path / "hangs.py"
    path.write_text("import os, time; os.fork(); time.sleep(60)")
    begin = time.monotonic()

    with pytest.raises(UsageError, match="importing it takes more than 0 s"):
        rehearse(str(path))
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("text", ["IMPLS = ()", "1 +", "raise ValueError", "import os; os.close(1); os.close(2)"])
def test_a_file_that_comes_back_is_let_through(tmp_path, text):
    """Also one that fails as Python code does: whoever imports it next says why."""
    path = tmp_path / "fine.py"
    path.write_text(text)

    rehearse(str(path))

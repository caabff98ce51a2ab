"""When Triton can run here, and what is said when it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from impls.triton import interpreter

ROOT = Path(__file__).parents[2]


def ask(program: str, **environment: str) -> str:
    """Run `program` in a fresh process, in which Triton has not been imported, and return what it prints."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_missing_triton_is_said(monkeypatch):
    """Without the package both kinds of device get the same plain reason."""
    monkeypatch.setattr(interpreter, "_installed_version", lambda: None)

    assert interpreter.why_missing("cpu") == interpreter.why_missing("cuda") == "needs triton (not installed)"


def test_old_interpreter_is_refused_with_its_version(monkeypatch):
    """Triton 3.6 is refused on a CPU, where its interpreter fails, with what was found and what is needed."""
    monkeypatch.setattr(interpreter, "_installed_version", lambda: "3.6.0")

    reason = interpreter.why_missing("cpu")

    assert reason is not None
    assert "3.7 or newer" in reason
    assert "got triton 3.6.0" in reason


needs_triton = pytest.mark.skipif(not interpreter.has_interpreter(), reason="needs triton 3.7 or newer")


@needs_triton
def test_interpreter_is_switched_on_in_time():
    """Asked before Triton is imported, the page turns the interpreter on by itself."""
    program = """
from impls.triton.interpreter import why_missing
print(why_missing("cpu"))
import triton
print(type(triton.language.sum).__name__)
"""
    assert ask(program).split() == ["None", "InterpretedFunction"]


@needs_triton
def test_too_late_is_said():
    """Asked after Triton was imported compiled, it says what to set instead of failing in the kernel."""
    program = "import triton; from impls.triton.interpreter import why_missing; print(why_missing('cpu'))"

    assert ask(program) == "triton was imported without TRITON_INTERPRET=1; set it before the process starts"


@needs_triton
def test_interpreted_process_refuses_a_gpu():
    """A process that interprets Triton must not time its kernels on a GPU."""
    program = "from impls.triton.interpreter import why_missing; print(why_missing('cuda'))"

    assert ask(program, TRITON_INTERPRET="1").startswith("this process interprets Triton")
    assert ask(program) == "None"

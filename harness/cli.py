"""People's door: `pagedbench COMMAND`. Parses, loads the command's page, turns errors into one line and an exit code.

Exit codes: 0 good; 1 something of ours is wrong or slower; 2 wrong usage, nothing ran, or the harness itself failed; 3
`compare` and `ab` could not tell, or rows are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TextIO

from harness import __version__
from harness.names import UsageError, nearest
from harness.words import printable

GOOD, BAD, ERROR = 0, 1, 2

#: command -> (its page, what it is for, an example)
COMMANDS = {
    "run": ("harness.commands.run", "check, then bench, then report: the main job", "pagedbench run --suite quick"),
    "check": ("harness.commands.run", "check only", "pagedbench check --impl 'cuda.*' --suite edges"),
    "bench": ("harness.commands.run", "check and time, no report", "pagedbench bench --case facts.a --impl cuda.split_kv"),
    "list": ("harness.commands.list", "implementations, suites and cases", "pagedbench list --suite quick"),
    "report": ("harness.commands.report", "make report.md and report.html again", "pagedbench report results/runs/STAMP"),
    "ceiling": ("harness.commands.ceiling", "what this device can read of cases' blocks", "pagedbench ceiling --suite facts"),
    "tune": ("harness.commands.tune", "sweep declared parameters", "pagedbench tune --impl cuda.split_kv --case facts.e"),
    "profile": ("harness.commands.profile", "what one kernel takes and waits for", "pagedbench profile cuda.split_kv facts.e"),
    "compare": ("harness.commands.compare", "two runs, or a run against the baseline", "pagedbench compare results/runs/STAMP"),
    "accept": ("harness.commands.accept", "make a run the baseline of its device", "pagedbench accept RUN -m WHY"),
    "history": ("harness.commands.history", "rows over revisions, and the steps in them", "pagedbench history show"),
    "ab": ("harness.commands.ab", "two revisions or implementations, measured in turn", "pagedbench ab main --suite quick"),
    "calibrate": ("harness.commands.calibrate", "how often the gate errs, measured", "pagedbench calibrate --suite smoke"),
    "ci": ("harness.commands.ci", "all that a GPU runner does for a change, and one summary", "pagedbench ci --allow-unsure"),
    "memory": ("runtime.memory", "what each way of holding keys and values wastes", "pagedbench memory --requests 500"),
    "serve": ("runtime.serve", "a load on the Qwen3 engine, with an implementation in it", "pagedbench serve --dry"),
    "align": ("runtime.align", "the engine's layers against Hugging Face's attention", "pagedbench align qwen3-tiny"),
    "audit": ("harness.commands.audit", "check the checker on controls, wrong on purpose", "pagedbench audit --suite quick"),
    "fuzz": ("harness.commands.fuzz", "check random cases; failures are shrunk", "pagedbench fuzz --minutes 5 --impl 'cuda.*'"),
    "doctor": ("harness.commands.doctor", "what this machine has, and why the rest is missing", "pagedbench doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        return _answer(argv)
    except OSError:  # standard error is on a full disk or closed, too: the exit code is all that can be said
        _say_no_more(sys.stdout, sys.stderr)
        return ERROR


def _say_no_more(*streams: TextIO) -> None:
    """Let what is still to be written go nowhere: Python tries again as it ends, and what fails then is its exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):  # it stands for no descriptor
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _answer(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if sys.stdout is None:  # the descriptor was closed before Python began: the next file opened would take its place
        print("pagedbench: standard output is closed; send it somewhere, if only to /dev/null", file=sys.stderr)
        return ERROR
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # a reader that has left is met here, and not when Python ends
        return code
    except UsageError as error:
        _complain(error)
    except KeyboardInterrupt:
        print("pagedbench: interrupted", file=sys.stderr)
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody to tell, and Python must not try again at exit.
        _say_no_more(sys.stdout)
    except OSError as error:
        _complain(error)
    except Exception:
        traceback.print_exc()
        print("pagedbench: the harness itself failed; please report the lines above", file=sys.stderr)
    return ERROR


def _complain(error: Exception) -> None:
    text = printable(error, keep="\n\t")  # what it quotes may be anything
    print(f"pagedbench: {text}", file=sys.stderr)


def _dispatch(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pagedbench",
        description="Check and measure paged-attention implementations, side by side.",
        epilog="`pagedbench COMMAND --help` shows a command's options and an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pagedbench {__version__}")
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        raise UsageError(f"no command {name!r}{nearest(name, COMMANDS)}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, (page, purpose, example) in COMMANDS.items():
        child = commands.add_parser(
            command,
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command == name:
            module = importlib.import_module(page)
            module.add_arguments(child, command)
            child.set_defaults(main=module.main)
    arguments = parser.parse_args(words)
    arguments.words = words  # as a run keeps them
    code: int = arguments.main(arguments)
    return code

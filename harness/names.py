"""Names that people type: the nearest known ones, and the error for wrong usage."""

from __future__ import annotations

import argparse
import difflib
import errno
import math
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


class UsageError(Exception):
    """Wrong usage: shown as one line, exit code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean a, b or c?", or a hint when nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    if not close:
        return "; `pagedbench list` shows what there is"
    return f"; did you mean {' or '.join(close)}?"


def split_names(option: str, texts: Sequence[str]) -> list[str]:
    """Return the comma-separated names of an option that may be given several times; none where it is not given.

    Raises UsageError for an empty name: what an unset shell variable leaves must not mean everything.
    """
    names = [name.strip() for text in texts for name in text.split(",")]
    if not all(names):
        got = next(text for text in texts if not all(name.strip() for name in text.split(",")))
        raise UsageError(f"{option}: names nothing between its commas (got {got!r}); is a shell variable unset?")
    return names


def filled(option: str, text: str) -> str:
    """Return the one value of an option; raises UsageError where it is empty."""
    if not text.strip():
        raise UsageError(f"{option}: is empty (got {text!r}); is a shell variable unset?")
    return text


def text_of(text: str) -> str:
    """The value of an option, for argparse, which is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"is empty (got {text!r}); is a shell variable unset?")
    return text


def path_of(text: str) -> Path:
    """The path of an option, for argparse: empty would be the folder that one stands in."""
    return Path(text_of(text))


def read_text(path: Path, errors: str = "strict") -> str:
    """Return what a file holds. Raises OSError for what has no end or never begins, a device or a pipe, before it is opened."""
    if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():  # of a folder, reading says so
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_text(encoding="utf-8", errors=errors)


def count_of(text: str) -> int:
    """The number of an option that counts, for argparse."""
    if not (text.isdecimal() and len(text) <= 18 and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1 (got {text!r})")
    return int(text)


def above_0(unit: str) -> Callable[[str], float]:
    """What reads the number of an option, for argparse: of `unit`, above 0 and finite."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be {unit} above 0 (got {text!r})")
        return value

    return read

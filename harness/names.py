"""Names that people type: the nearest known ones, and the error for wrong usage."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """Wrong usage: shown as one line, exit code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean a, b or c?", or a hint when nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    if not close:
        return "; `pagedbench list` shows what there is"
    return f"; did you mean {' or '.join(close)}?"

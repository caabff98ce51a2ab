"""Texts that are equal but for their numbers, said as one: "every one of 12 to 15 visits was throttled"."""

from __future__ import annotations

import re
from collections.abc import Sequence

# A number stands alone: the digits of "int32", "load_16b" and "sm_90" are names.
_NUMBER = re.compile(r"(?<![\w.])[0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[+-]?[0-9]{1,3})?(?!\w)")


def pattern(text: str) -> str:
    """Return `text` with a "#" for every number: equal patterns may be merged."""
    return _NUMBER.sub("#", text)


def merged(texts: Sequence[str]) -> str:
    """Return texts of one pattern as one, each number as it is or as "2.6 to 68.3"; texts of several give the first."""
    if len(set(map(pattern, texts))) > 1:
        return texts[0]
    columns = (sorted(set(column), key=float) for column in zip(*map(_NUMBER.findall, texts), strict=True))
    ranges = (column[0] if float(column[0]) == float(column[-1]) else f"{column[0]} to {column[-1]}" for column in columns)
    return _NUMBER.sub(lambda _: next(ranges), texts[0])

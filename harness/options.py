"""How thoroughly a run checks and measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

POWER = ("first", "all", "none")
RELATIONS = ("small", "all", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """One run's settings, read once at the door.

    suite            the name that records carry
    bench            time what was right
    untimed          names of cases that are checked only
    power            which rows hold a window of at least 1 s for power and energy: "first" (an implementation's first
                     layout, on cases that move more than the last-level cache holds, within twice the fastest),
                     "all" or "none"
    ceiling          find the best reader of each case and visit it beside the rows
    sweep            rows are readers: try each by one visit, and visit the best two of a case only
    relations        which cases are held to relations (harness/relations.py): "small" ones, "all" or "none"
    patient          run what would take minutes on this device, too
    min_visits       visits a row, at least (other rows between them); the interval over them wants five
    max_visits       visits a row, at most, throttled ones included
    width            by device kind: stop when the interval is at most this share of the median to either side
    row_s            a row that has taken so long stops at min_visits
    """

    suite: str = "custom"
    bench: bool = True
    untimed: tuple[str, ...] = ()
    power: str = "first"
    ceiling: bool = True
    sweep: bool = False
    relations: str = "small"
    patient: bool = False
    min_visits: int = 5
    max_visits: int = 15
    width: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"cuda": 0.01, "cpu": 0.05})
    row_s: float = 4.0

"""All rows of an implementation in one verdict: its worst row's, or that of the geometric mean over its cases."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from harness.compare import VERDICTS, Judged, bound_of, rule
from harness.difference import Difference, geometric_mean, holm

GROUPS = ("worst", "geomean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """All rows of one implementation, in one verdict."""

    row: str
    num_rows: int
    verdict: str
    reason: str
    difference: Difference | None = None


def groups(judged: Sequence[Judged], how: str, threshold: float | None = None) -> list[Group]:
    """One verdict an implementation and layout: its worst row's, or that of the geometric mean over its cases.

    The geometric mean is judged as a row is, corrected for the number of implementations. A wrong row makes it WRONG, and one
    that should be in the mean and cannot be, UNSURE.
    """
    rows: dict[str, list[Judged]] = {}
    for item in judged:
        rows.setdefault(item.record.row, []).append(item)
    if how == "worst":
        return [_worst(row, items) for row, items in rows.items()]
    held = {row: [item for item in items if item.difference and not item.is_denied] for row, items in rows.items()}
    means = {
        row: geometric_mean([item.difference for item in held[row] if item.difference])
        for row, items in rows.items()
        if held[row] and all(item.verdict != "WRONG" for item in items)
    }
    bounds = {row: statistics.geometric_mean(bound_of(item.pair, threshold) for item in held[row]) for row in means}
    adjusted = holm([min(mean.p_above(bounds[row]), mean.p_below(1 / bounds[row])) for row, mean in means.items()])
    corrected = dict(zip(means, adjusted, strict=True))
    made = []
    for row, items in rows.items():
        if row not in means:
            made.append(_worst(row, items))
            continue
        verdict, reason = rule(means[row], bounds[row], corrected[row], len(means))
        untold = next((item for item in items if item.is_denied or (item.verdict == "UNSURE" and not item.difference)), None)
        if untold and verdict != "SLOWER":  # the mean is of the other rows alone
            verdict, reason = "UNSURE", f"{untold.record.case}: {untold.reason}"
        made.append(Group(row=row, num_rows=len(items), verdict=verdict, reason=reason, difference=means[row]))
    return made


def _worst(row: str, items: Sequence[Judged]) -> Group:
    def badness(item: Judged) -> tuple[int, float]:
        return VERDICTS.index(item.verdict), -item.difference.log_ratio if item.difference else 0.0

    worst = min(items, key=badness)
    return Group(
        row=row,
        num_rows=len(items),
        verdict=worst.verdict,
        reason=f"{worst.record.case}: {worst.reason}",
        difference=worst.difference,
    )

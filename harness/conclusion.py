"""What is said of a timed row once its visits are over: doubts, power, and its share of the ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.interval import half_width, is_converged
from harness.record import Samples
from harness.row import Row

if TYPE_CHECKING:
    from harness.session import Session

#: A row that takes so many times as long as the fastest of its case holds no window for power unless asked to.
POWER_TIMES = 2


def conclude(row: Row, session: Session, readers: Sequence[Row], floors: Sequence[Row], fastest_s: float) -> None:
    """Everything about a timed row that needs its samples; `fastest_s` is the median of the fastest row of its case."""
    summary = row.summary()
    if row.status == "ok" and summary is None:
        row.flags.append(f"no time: every one of {row.discarded} visits was throttled")
    if row.status == "ok" and summary is not None:
        if not is_converged(summary, session.options.width[session.device.kind]):
            row.flags.append(f"never converged: {_how_far(summary)}")
        if row.discarded:
            row.flags.append(f"throttled: {row.discarded} visits discarded")
        row.cross_examine()
        _measure_power(row, session, summary.median / fastest_s)
        _hold_against_ceiling(row, readers)
    _hold_against_floor(row, floors)


def _measure_power(row: Row, session: Session, times_fastest: float) -> None:
    why_not = _why_no_power(row, session, times_fastest)
    if why_not is None:
        with session.phase("power"):
            row.measure_power()
    else:
        row.remark("power", f"not measured: {why_not}")


def _why_no_power(row: Row, session: Session, times_fastest: float) -> str | None:
    """A window of a second a row adds up: by default it is held where it says most."""
    wanted = session.options.power
    if wanted == "none":
        return "--power none"
    if wanted == "first" and row.entry.layout is not row.entry.impl.layouts[0]:
        return "not the implementation's first layout (--power all)"
    if wanted == "first" and times_fastest > POWER_TIMES:
        return f"it takes more than {POWER_TIMES} times as long as the fastest (--power all)"
    if wanted == "first" and row.case.traffic_bytes < session.device.cache_bytes:
        return "the case moves less than the last-level cache holds (--power all)"
    return None


def _hold_against_ceiling(row: Row, readers: Sequence[Row]) -> None:
    summary = row.summary()
    measured = [(found, reader) for reader in readers if (found := reader.summary()) is not None and reader.status == "ok"]
    if not measured or summary is None:
        return
    ceiling, reader = min(measured, key=lambda pair: pair[0].median)
    row.fields["ceiling_s"] = ceiling.median
    row.fields["ceiling_by"] = f"{reader.entry} {_settings(reader)}".strip()
    row.fields["ceiling_share"] = ceiling.median / summary.median
    if summary.high < ceiling.low:
        row.flags.append("above the ceiling: the measurement is wrong somewhere")


def _hold_against_floor(row: Row, floors: Sequence[Row]) -> None:
    measured = [found.median for other in floors if (found := other.summary()) is not None and other.status == "ok"]
    if measured and row.summary() is not None:
        row.fields["floor_s"] = min(measured)


def _how_far(summary: Samples) -> str:
    share = half_width(summary)
    if share is None:
        return "one visit, which has no interval"
    return f"within {100 * share:.1f}% after {len(summary.samples)} visits"


def _settings(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in row.params.items())

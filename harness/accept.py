"""What a run must be before it may be held against others as the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.match import settings
from harness.record import TIMERS_DISAGREE, Record

#: What --allow lets pass, by name.
OBSTACLES = ("failures", "wrong", "throttled", "doubts", "device", "missing", "schema")

#: Beginnings of flags that put a row's time in doubt. One that never converged has an interval that says so.
_DOUBTS = (TIMERS_DISAGREE, "above the ceiling", "a spin of known length")


def obstacles(records: Sequence[Record], here: str | None, before: Sequence[Record]) -> dict[str, list[str]]:
    """What speaks against the run, by the name under which it can be allowed; a line for each row or device.

    here      this machine's device; None where that is not to be asked
    before    the present baseline's records, of which the run must lose none
    """
    found: dict[str, list[str]] = {name: [] for name in OBSTACLES}
    for record in records:
        for name, why in _of_row(record):
            found[name].append(f"{record.row} on {record.case}: {why}")
    for device in sorted({record.device for record in records}):
        if here is not None and device != here:
            found["device"].append(f"measured on {device}, this is {here}")
    gone = "in the baseline, and not timed in this run"
    found["missing"] = [f"{record.row} on {record.case}: {gone}" for record in lost(records, before)]
    return {name: lines for name, lines in found.items() if lines}


def _of_row(record: Record) -> Iterator[tuple[str, str]]:
    """Peers are others' business when they fail; when they were throttled, their times are no baseline either."""
    is_ours = record.role == "implementation" and not record.impl.startswith("peer.")
    if is_ours and record.status == "wrong":
        yield "wrong", record.reason or ""
    if is_ours and record.status in ("failed", "timeout"):
        yield "failures", f"{record.status}: {record.reason}"
    for flag in record.flags:
        if flag.startswith("throttled"):
            yield "throttled", flag
        elif flag.startswith(_DOUBTS):
            yield "doubts", flag


def lost(records: Sequence[Record], before: Sequence[Record]) -> list[Record]:
    """Timed rows of `before` that `records` has no time of."""
    timed = {(record.key, settings(record)) for record in records if record.launch_s}
    return [record for record in before if record.launch_s and (record.key, settings(record)) not in timed]

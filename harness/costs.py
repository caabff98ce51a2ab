"""What a row costs besides its launch on the device, compared: memory, workspace, registers, spills, energy, plan and host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from harness.match import Pair
from harness.record import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """A quantity of a record. It has grown where it has by more than `share` of itself and more than `slack` units.

    unit    "bytes", "count", "joules" or "seconds"
    """

    name: str
    unit: str
    of: Callable[[Record], float | None]
    share: float = 0.0
    slack: float = 0.0


def _number(value: object) -> float | None:
    """A number that a float holds; a mapping of a record may have any."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 1e300 else None


def _of_kernels(field: str, total: Callable[[list[float]], float]) -> Callable[[Record], float | None]:
    """A field of a row's kernels, taken together; None where there is no kernel or one does not say."""

    def of(record: Record) -> float | None:
        values = [_number(kernel.get(field)) for kernel in record.kernels]
        known = [value for value in values if value is not None]
        return total(known) if known and len(known) == len(values) else None

    return of


#: The allocator rounds every tensor up to 512 bytes. Energy is one window of a second: no samples, so a wide margin. Between
#: runs of the same code on two H200s, whose hosts had other work, times of the host differed by up to 2.3 times.
COSTS = (
    Cost(name="workspace", unit="bytes", of=lambda record: _number(record.workspace_bytes), share=0.01, slack=512),
    Cost(
        name="allocator's peak",
        unit="bytes",
        of=lambda record: _number(record.memory.get("allocator_peak_bytes")),
        share=0.01,
        slack=512 * 64,
    ),
    Cost(name="most registers of a kernel", unit="count", of=_of_kernels("registers", max)),
    Cost(name="spilled bytes", unit="bytes", of=_of_kernels("spill_bytes", sum)),
    Cost(name="energy a launch", unit="joules", of=lambda record: _number(record.energy_j), share=0.10),
    Cost(
        name="a plan, until the device is through",
        unit="seconds",
        of=lambda record: record.plan_s.median if record.plan_s else None,
        share=2.0,
        slack=50e-6,
    ),
    Cost(name="a plan on the host", unit="seconds", of=lambda record: _number(record.plan_host_s), share=2.0, slack=10e-6),
    Cost(name="a launch on the host", unit="seconds", of=lambda record: _number(record.host_s), share=2.0, slack=10e-6),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """A cost of a row that has grown."""

    record: Record
    cost: Cost
    old: float
    new: float


def grown(pairs: Sequence[Pair]) -> list[Growth]:
    """Every cost that has grown, of rows that are right on both sides."""
    found = []
    for pair in pairs:
        if pair.old is None or pair.new is None or (pair.old.status, pair.new.status) != ("ok", "ok"):
            continue
        for cost in COSTS:
            old, new = cost.of(pair.old), cost.of(pair.new)
            if old is not None and new is not None and new > old * (1 + cost.share) + cost.slack:
                found.append(Growth(record=pair.new, cost=cost, old=old, new=new))
    return found

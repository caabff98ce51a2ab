"""What a report shows beside a record's own fields: rates, ratios, groups of rows, the command that runs a row again."""

from __future__ import annotations

import collections
import dataclasses
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.record import STATUSES, Record
from harness.report import units

#: whose rows these are, in the order of every table: title and test
SIDES = ("implementations", "peers", "controls", "readers")

#: statuses with which no row should end, in words
BAD = {"wrong": "wrong", "failed": "failed", "timeout": "timed out"}


def side(record: Record) -> str:
    """Return which of SIDES a record belongs to."""
    if record.role == "implementation":
        return "peers" if record.impl.startswith("peer.") else "implementations"
    return f"{record.role}s"


def time_s(record: Record) -> float | None:
    """Return the median seconds of a launch, or None where nothing was timed."""
    return record.launch_s.median if record.launch_s else None


def spread(record: Record) -> float | None:
    """Return half the confidence interval of the launch over its median: 0.003 reads "±0.3%"."""
    if record.launch_s is None or not record.launch_s.median:
        return None
    return (record.launch_s.high - record.launch_s.low) / 2 / record.launch_s.median


def rate(record: Record) -> float | None:
    """Return unique bytes a second, or None where there is no time (or it is no time at all) or no traffic."""
    time = time_s(record)
    return record.traffic_bytes / time if time and time > 0 and record.traffic_bytes is not None else None


def worst_error(record: Record) -> float | None:
    """Return the largest error over what was allowed, of all input families and all tests; over 1 is wrong."""
    families = [outcome.get("ratios") for outcome in record.check.values() if isinstance(outcome, Mapping)]
    ratios = [ratio for family in families if isinstance(family, Mapping) for ratio in family.values()]
    numbers = [math.inf if ratio == "inf" else ratio for ratio in ratios]  # JSON has no infinity, a record its name
    return max((float(number) for number in numbers if is_number(number)), default=None)


def peak_bytes(record: Record) -> int | None:
    """Return the allocator's peak while the row was prepared and launched, or None where it was not measured."""
    value = record.memory.get("allocator_peak_bytes")
    return value if is_number(value) else None


def is_number(value: object) -> bool:
    """Whether a value from a record's free-form fields is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole_numbers(shape: Mapping[str, Any], field: str) -> tuple[int, ...]:
    """Return a shape's list of whole numbers; () where it has none, since a shape is free-form."""
    values = shape.get(field)
    good = isinstance(values, list | tuple) and all(type(value) is int for value in values)
    return tuple(values) if values and good else ()


def command(record: Record) -> str:
    """Return the command that runs exactly this row again, quoted for a shell."""
    words = ["pagedbench", "run", "--impl", record.row, "--case", record.case]
    for name, value in record.params.items():
        words += ["--set", f"{name}={value}"]
    if record.device_kind == "cpu":
        words += ["--device", "cpu"]
    return " ".join(word if word.startswith("--") else shlex.quote(word) for word in words)


def describe(shape: Mapping[str, Any]) -> str:
    """Return a case's shape in a line: "64 x 8192 tokens, heads 32/8 x 128, block 16, bf16"."""
    parts = []
    if "seq_lens" in shape:
        parts.append(_lengths(whole_numbers(shape, "seq_lens")))
        q_lens = whole_numbers(shape, "q_lens")
        parts += [f"queries {_lengths(q_lens, 'each')}"] if max(q_lens, default=1) > 1 else []
    if "num_q_heads" in shape:
        parts.append(f"heads {shape['num_q_heads']}/{shape.get('num_kv_heads')} x {shape.get('head_dim')}")
    elif "num_kv_heads" in shape:
        parts.append(f"heads {shape['num_kv_heads']} x {shape.get('head_dim')}")
    parts += [f"{shape[name]} {noun}" for name, noun in (("num_tokens", "tokens"), ("num_copies", "copies")) if name in shape]
    parts += [f"{shape['num_layers']} layers"] if shape.get("num_layers", 1) != 1 else []
    parts += [f"block {shape['block_size']}"] if "block_size" in shape else []
    return ", ".join([*parts, *([str(shape["dtype"])] if "dtype" in shape else [])])


def _lengths(lens: Sequence[int], noun: str = "tokens") -> str:
    if not lens:
        return "empty batch"
    low, high = min(lens), max(lens)
    return f"{len(lens)} x {low} {noun}" if low == high else f"{len(lens)} x {low} to {high} {noun}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseRows:
    """All rows of one case on one device in one run: the timed ones fastest first, then the others as they came."""

    first: Record
    timed: tuple[Record, ...]
    untimed: tuple[Record, ...]

    @property
    def best_s(self) -> float | None:
        """Seconds of the fastest row that is no reader and no control."""
        return min((r.launch_s.median for r in self.timed if r.launch_s and r.role == "implementation"), default=None)

    @property
    def ceiling(self) -> Record | None:
        """A row that knows the ceiling, if any does."""
        return next((r for r in self.timed if r.ceiling_s), None)

    def best_of(self, whose: str) -> Record | None:
        """Return the fastest row of one of SIDES."""
        return next((r for r in self.timed if side(r) == whose), None)

    def to_best(self, record: Record) -> float | None:
        """Return the row's time over the best time."""
        time, best = time_s(record), self.best_s
        return time / best if time and best else None

    def label(self, record: Record) -> str:
        """Return `record.row`; with its parameters where the case has the row more than once."""
        twins = [r for r in (*self.timed, *self.untimed) if r.row == record.row]
        if len(twins) < 2 or not record.params:
            return record.row
        return " ".join([record.row, *(f"{name}={value}" for name, value in record.params.items())])


def by_case(records: Iterable[Record]) -> list[CaseRows]:
    """Group records so that nothing is compared that must not be: by run, device, operator, case and digest."""
    groups: dict[tuple[str, ...], list[Record]] = collections.defaultdict(list)
    for record in records:
        groups[record.run, record.device, record.op, record.case, record.case_digest].append(record)
    return [_case_rows(group) for group in groups.values()]


def _case_rows(group: Sequence[Record]) -> CaseRows:
    timed = sorted((r for r in group if r.status == "ok" and r.launch_s), key=lambda r: r.launch_s.median if r.launch_s else 0)
    chosen = set(map(id, timed))
    return CaseRows(first=group[0], timed=tuple(timed), untimed=tuple(r for r in group if id(r) not in chosen))


def tally(records: Iterable[Record]) -> dict[str, collections.Counter[str]]:
    """Count statuses by side; sides without rows are left out."""
    counts = {whose: collections.Counter[str]() for whose in SIDES}
    for record in records:
        counts.setdefault(side(record), collections.Counter())[record.status] += 1
    return {whose: counter for whose, counter in counts.items() if counter}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reason:
    """Rows that share a status and a reason."""

    status: str
    reason: str
    rows: tuple[Record, ...]

    @property
    def names(self) -> str:
        """The implementations concerned and their layouts, and in how many cases where that is more than one."""
        layouts: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
        for (impl, layout), number in collections.Counter((r.impl, r.layout) for r in self.rows).items():
            layouts[impl, number].append(layout)
        return ", ".join(
            f"{impl}[{', '.join(names)}]" + (f" in {units.count(number, 'case')}" if number > 1 else "")
            for (impl, number), names in layouts.items()
        )


def reasons(records: Iterable[Record], statuses: Sequence[str] = STATUSES[1:]) -> list[Reason]:
    """Group rows that are not ok by status and reason, in the order of `statuses`, the largest groups first.

    Wrong controls are left out: they are as they must be, and `tally` counts them.
    """
    groups: dict[tuple[str, str], list[Record]] = collections.defaultdict(list)
    for record in records:
        if record.status in statuses and not (record.status == "wrong" and record.role == "control"):
            groups[record.status, record.reason or ""].append(record)
    found = [Reason(status=status, reason=reason, rows=tuple(rows)) for (status, reason), rows in groups.items()]
    return sorted(found, key=lambda group: (statuses.index(group.status), -len(group.rows)))


def verdict(records: Sequence[Record]) -> tuple[str, bool]:
    """Return the report's first line, and whether it is good news: ours and the controls decide, peers are told of."""
    ours, peers = (_faults([r for r in records if side(r) == whose]) for whose in ("implementations", "peers"))
    missed = sum(r.role == "control" and r.status == "ok" for r in records)
    num_good = sum(r.role == "implementation" and r.status == "ok" for r in records)
    if not (ours or peers or missed):
        return (f"All {units.count(num_good, 'row')} that ran are right", True) if num_good else ("Nothing ran", True)
    parts = [ours or "All of ours that ran are right"]
    parts += [f"peers: {peers}"] if peers else []
    parts += [f"{units.count(missed, 'control')} passed that should not"] if missed else []
    return "; ".join(parts), not (ours or missed)


def _faults(records: Sequence[Record]) -> str:
    counts = collections.Counter(r.status for r in records)
    return ", ".join(f"{units.count(counts[status], 'row')} {word}" for status, word in BAD.items() if counts[status])


def summary_line(records: Iterable[Record]) -> str:
    """Return "118 ok, 2 wrong, 14 unsupported, 3 skipped, 0 failed; readers: 15 ok; controls: 20 wrong".

    Peers count among the implementations. "timed out" is named only where some row did.
    """
    counts = tally(records)
    ours = counts.pop("implementations", collections.Counter()) + counts.pop("peers", collections.Counter())
    parts = [f"{ours[status]} {status}" for status in STATUSES if status != "timeout"]
    parts += [f"{ours['timeout']} timed out"] if ours["timeout"] else []
    others = [f"{whose}: {_counted(counts[whose])}" for whose in counts]
    return "; ".join([", ".join(parts), *others])


def _counted(counter: Mapping[str, int]) -> str:
    return ", ".join(f"{counter[status]} {status}" for status in STATUSES if counter.get(status))

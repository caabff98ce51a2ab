"""What a report shows beside a record's own fields: rates, ratios, doubts, rows by case."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.interval import half_width
from harness.record import TIMERS_DISAGREE, Record

#: whose rows these are, in the order of every table: title and test
SIDES = ("implementations", "peers", "controls", "readers")

#: FLOPs a byte from which arithmetic binds a case and not reading: a third of the 200 or so that an H200's tensor cores
#: could do. In 16 bits a decode has as many as a KV head has query heads, so it stays below.
RIDGE = 64

#: beginnings of flags that put a time in doubt, and visits below which a throttled row's time is
_DOUBTS, _ENOUGH = ("never converged", TIMERS_DISAGREE, "above the ceiling", "a spin of known length"), 5

#: what stands beside a number: its time is in doubt; its row has another flag
DOUBTED, FLAGGED = "*", "\N{DAGGER}"


def side(record: Record) -> str:
    """Return which of SIDES a record belongs to."""
    if record.role == "implementation":
        return "peers" if record.impl.startswith("peer.") else "implementations"
    return f"{record.role}s"


def time_s(record: Record) -> float | None:
    """Return the median seconds of a launch, or None where nothing was timed."""
    return record.launch_s.median if record.launch_s else None


def spread(record: Record) -> float | None:
    """Return the larger side of the launch's interval over its median: 0.003 reads "±0.3%". None for a single visit."""
    return half_width(record.launch_s) if record.launch_s else None


def is_arithmetic(record: Record) -> bool:
    """Whether arithmetic binds the record's case, so that how fast it reads says nothing."""
    flops, moved = record.flops, record.traffic_bytes
    return flops is not None and bool(moved) and flops >= RIDGE * (moved or 0)


def work(record: Record) -> float | None:
    """Return what its case has most of: FLOPs where arithmetic binds it, else unique bytes; None where that is not known."""
    return record.flops if is_arithmetic(record) else record.traffic_bytes


def rate(record: Record) -> float | None:
    """Return `work` a second, or None where there is no time (or it is no time at all) or no work."""
    time, done = time_s(record), work(record)
    return done / time if time and time > 0 and done is not None else None


def share(record: Record) -> float | None:
    """Return the share of the ceiling, or None where there is none: the ceiling is one of reading."""
    return None if is_arithmetic(record) else record.ceiling_share


def doubts(record: Record) -> list[str]:
    """Return the flags for which the record's time is not to be quoted."""
    visits = len(record.launch_s.samples) if record.launch_s else 0
    kinds = (*_DOUBTS, *(("throttled",) if visits < _ENOUGH else ()))
    return [flag for flag in record.flags if flag.startswith(kinds)]


def mark(record: Record) -> str:
    """Return what must stand beside any number of the record: DOUBTED, FLAGGED or nothing."""
    return DOUBTED if doubts(record) else FLAGGED if record.flags else ""


def worst_error(record: Record) -> float | None:
    """Return the largest error over what was allowed, of all input families and all tests; over 1 is wrong."""
    return max((error for error in map(family_error, record.check.values()) if error is not None), default=None)


def told_error(records: Iterable[Record]) -> float | None:
    """Return the largest `worst_error` of these rows; None where some are wrong but none by that.

    A relation or a guard found those: an error within what is allowed, beside "wrong", would hide it.
    """
    every = list(records)
    worst = max((error for error in map(worst_error, every) if error is not None), default=None)
    is_elsewhere = any(record.status == "wrong" for record in every) and (worst or 0.0) <= 1.0
    return None if is_elsewhere else worst


def family_error(outcome: object) -> float | None:
    """Return the largest error over what was allowed of one input family, as a record's `check` has it."""
    ratios = outcome.get("ratios") if isinstance(outcome, Mapping) else None
    found = ratios.values() if isinstance(ratios, Mapping) else ()
    numbers = [math.inf if ratio == "inf" else ratio for ratio in found]  # JSON has no infinity, a record its name
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
    parts += [str(shape["dtype"])] if "dtype" in shape else []
    return ", ".join([*parts, *_features(shape)])


def _features(shape: Mapping[str, Any]) -> list[str]:
    """What a case asks for besides, in words: "window 1024", "e4m3 cache with a scale a head", "64 share a prefix"."""
    words = [f"{name} {shape[name]}" for name in ("window", "softcap") if shape.get(name)]
    words += [word for name, word in (("alibi", "ALiBi"), ("sinks", "sinks")) if shape.get(name)]
    if shape.get("kv_dtype"):
        words.append(f"{shape['kv_dtype']} cache" + (" with a scale a head" if shape.get("kv_scales") == "head" else ""))
    prefix = shape.get("prefix")
    sharing = sum(bool(part[1]) for part in prefix if isinstance(part, list | tuple) and len(part) == 2) if prefix else 0
    return [*words, f"{sharing} share a prefix"] if sharing else words


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
        """A row that knows the ceiling, if any does and reading binds the case."""
        return next((r for r in self.timed if r.ceiling_s and not is_arithmetic(r)), None)

    def is_crowned(self, record: Record) -> bool:
        """Whether the row is the fastest, is no reader or control, and its time is not in doubt."""
        return record.role == "implementation" and time_s(record) == self.best_s and not doubts(record)

    def best_of(self, whose: str) -> Record | None:
        """Return the fastest row of one of SIDES."""
        return next((r for r in self.timed if side(r) == whose), None)

    @property
    def gain(self) -> float | None:
        """The time of the fastest peer over that of the fastest of ours."""
        ours, peer = (time_s(r) if r else None for r in (self.best_of("implementations"), self.best_of("peers")))
        return peer / ours if ours and peer else None

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


def by_place(groups: Iterable[CaseRows]) -> dict[str, list[tuple[int, CaseRows]]]:
    """What may be compared over cases, under its name: the groups, with their indices, of one operator, device and run."""
    places: dict[tuple[str, str, str], list[tuple[int, CaseRows]]] = collections.defaultdict(list)
    for index, group in enumerate(groups):
        places[group.first.op, group.first.device, group.first.run].append((index, group))
    is_plain = len(places) == len({op for op, _, _ in places})
    return {place[0] if is_plain else ", ".join(place): found for place, found in places.items()}


def _case_rows(group: Sequence[Record]) -> CaseRows:
    timed = sorted((r for r in group if r.status == "ok" and r.launch_s), key=lambda r: r.launch_s.median if r.launch_s else 0)
    chosen = set(map(id, timed))
    return CaseRows(first=group[0], timed=tuple(timed), untimed=tuple(r for r in group if id(r) not in chosen))


def nowhere(records: Sequence[Record]) -> list[Record]:
    """Return the rows that are unsupported for one reason on every case of a run of several: the device's rule, no case's.

    They are counted and named once, with their reason; a line of each in every table would say it again and again.
    """
    cases: dict[str, set[str]] = collections.defaultdict(set)
    by_row: dict[tuple[str, ...], list[Record]] = collections.defaultdict(list)
    for record in records:
        cases[record.run].add(record.case_digest)
        by_row[record.run, record.device, record.row].append(record)
    return [
        record
        for (run, *_), found in by_row.items()
        if len(cases[run]) > 1 and {r.status for r in found} == {"unsupported"} and len({r.reason for r in found}) == 1
        for record in found
    ]

"""The tables that Markdown and HTML share, as text cells: one case's rows, kernels' resources, ledgers, environment."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.record import Record
from harness.report import rows, units


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Text cells. The first `words` columns are text and stand left, the others are numbers and stand right."""

    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    words: int = 1


#: head, what a cell says, of a case's table; a column without any value is left out
_Column = tuple[str, Callable[[Record], str]]


def case_table(group: rows.CaseRows) -> Table:
    """Return the timed rows of a case, fastest first; the first column is the row's label, the last its flags."""
    columns = _case_columns(group)
    cells = [[show(record) for _, show in columns] for record in group.timed]
    kept = [i for i in range(len(columns)) if any(line[i] not in ("", units.MISSING) for line in cells)]
    return Table(heads=tuple(columns[i][0] for i in kept), lines=tuple(tuple(line[i] for i in kept) for line in cells))


def _case_columns(group: rows.CaseRows) -> Sequence[_Column]:
    kind = group.first.device_kind
    time, rate = units.time_scale(kind, map(rows.time_s, group.timed)), units.rate_scale(kind)
    return (
        ("implementation", group.label),
        (f"time {time.unit}", lambda r: time.show(rows.time_s(r))),
        (rate.unit, lambda r: rate.show(rows.rate(r), 3)),
        ("of ceiling", lambda r: units.percent(r.ceiling_share)),
        ("to best", lambda r: units.ratio(group.to_best(r))),
        (f"interval {time.unit}", lambda r: units.interval(time, r.launch_s)),
        (f"plan {time.unit}", lambda r: time.show(r.plan_s.median if r.plan_s else None, 3)),
        (f"host {time.unit}", lambda r: time.show(r.host_s, 3)),
        ("workspace", lambda r: units.size(r.workspace_bytes)),
        ("peak", lambda r: units.size(rows.peak_bytes(r))),
        ("energy", lambda r: units.joules(r.energy_j)),
        ("power W", lambda r: units.MISSING if r.power_w is None else units.decimal(r.power_w, 3)),
        ("flags", lambda r: ", ".join(r.flags)),
    )


def ceiling_line(group: rows.CaseRows) -> str:
    """Return a case's traffic and ceiling as a sentence or two."""
    known, rate = group.ceiling, units.rate_scale(group.first.device_kind)
    moved = group.first.traffic_bytes
    parts = [] if moved is None else [f"{units.size(moved)} to move"]
    if known and known.ceiling_s and known.traffic_bytes:
        time = units.time_scale(known.device_kind, [known.ceiling_s])
        by = f", by {known.ceiling_by}" if known.ceiling_by else ""
        speed = rate.show(known.traffic_bytes / known.ceiling_s, 3)
        parts.append(f"ceiling {speed} {rate.unit} ({time.show(known.ceiling_s)} {time.unit}{by})")
    return "; ".join(parts or ["no ceiling was measured"]) + "."


def fact_tables(records: Sequence[Record]) -> Iterator[tuple[str, Table]]:
    """Yield (title, table) of everything that is not a time; what has no line is left out."""
    found = (
        ("What was inside the timed region", ledgers(records)),
        ("Kernels", kernels(records)),
        ("Conditions during the samples", conditions(records)),
        ("Environment", environment(records)),
    )
    yield from ((title, table) for title, table in found if table.lines)


_NUMBER = re.compile(r"[0-9]{1,15}")


def ledgers(records: Sequence[Record]) -> Table:
    """Return one line for each remark: its topic, and whose rows carry it, "all" where every row does.

    Remarks that differ in their numbers only, from case to case, are one remark with ranges: "28 to 431 sets, rotated".
    """
    remarks: dict[tuple[str, str], list[tuple[str, Record]]] = collections.defaultdict(list)
    for record in records:
        for topic, remark in record.ledger.items():
            remarks[topic, _NUMBER.sub("#", remark)].append((remark, record))
    num_all = sum(bool(record.ledger) for record in records)
    lines = []
    for (topic, _), found in sorted(remarks.items(), key=lambda item: (item[0][0], -len(item[1]))):
        whose = "all" if len(found) == num_all else ", ".join(dict.fromkeys(record.impl for _, record in found))
        lines.append((topic, _merged([remark for remark, _ in found]), whose, str(len(found))))
    return Table(heads=("topic", "remark", "implementations", "rows"), lines=tuple(lines), words=3)


def _merged(remarks: Sequence[str]) -> str:
    """Remarks that are equal but for their numbers, as one with ranges."""
    columns = zip(*(map(int, _NUMBER.findall(remark)) for remark in remarks), strict=True)
    ranges = (str(min(column)) if min(column) == max(column) else f"{min(column)} to {max(column)}" for column in columns)
    return _NUMBER.sub(lambda _: next(ranges), remarks[0])


def kernels(records: Iterable[Record]) -> Table:
    """Return one line for each compiled kernel; equal kernels of several cases are one line."""
    heads = ("implementation", "kernel", "digest", "registers", "shared", "spills", "cases")
    counts = collections.Counter((r.row, *_kernel(kernel)) for r in records for kernel in r.kernels)
    return Table(heads=heads, lines=tuple((*key, str(number)) for key, number in sorted(counts.items())), words=3)


def _kernel(kernel: Mapping[str, Any]) -> tuple[str, ...]:
    def number(name: str) -> str:
        value = kernel.get(name)
        return units.size(value) if isinstance(value, int) else units.MISSING

    registers = units.plain(kernel.get("registers", units.MISSING))
    digest = str(kernel.get("digest", units.MISSING))[:12]
    return str(kernel.get("name", units.MISSING)), digest, registers, number("shared_bytes"), number("spill_bytes")


def conditions(records: Iterable[Record]) -> Table:
    """Return what NVML said around the samples: least and most of every number, every text that occurred."""
    seen: dict[str, list[Any]] = collections.defaultdict(list)
    for record in records:
        for name, value in _leaves(record.nvml):
            seen[name].append(value)
    lines = tuple((_words(name), *_range(values)) for name, values in seen.items())
    return Table(heads=("fact", "least", "most", "rows"), lines=lines)


def _leaves(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Flatten nested facts under their innermost names: before and after are two readings of one fact."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif value is not None and value not in ([], ()):
            yield name, value


def _range(values: Sequence[Any]) -> tuple[str, str, str]:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == len(values):
        return units.plain(min(numbers)), units.plain(max(numbers)), str(len(values))
    return "; ".join(sorted(set(map(units.plain, values)))), units.MISSING, str(len(values))


def _words(name: str) -> str:
    """A field's name as people write it: "sm_clock_mhz" is "sm clock (MHz)"."""
    names = {"mhz": "MHz", "c": "°C", "w": "W", "j": "J", "s": "s", "bytes": "bytes"}
    stem, _, unit = name.rpartition("_")
    text = f"{stem} ({names[unit]})" if stem and unit in names else name
    return re.sub("_", " ", text)


def environment(records: Iterable[Record]) -> Table:
    """Return run, device and toolchain; a name that had several values gets a line for each."""
    found: dict[tuple[str, str], None] = {}
    for record in records:
        own = {"run": record.run, "suite": record.suite, "device": record.device}
        found.update(dict.fromkeys((name, str(value)) for name, value in {**own, **record.toolchain}.items()))
    started = [record.started_at for record in records]
    times = {("first row started", min(started)): None, ("last row started", max(started)): None} if started else {}
    return Table(heads=("what", "value"), lines=(*found, *times), words=2)

"""The tables that Markdown and HTML share, as text cells: one case's rows, checks, ledgers, kernels, environment."""

from __future__ import annotations

import collections
import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.record import Record
from harness.report import rows, units
from harness.report.ranges import merged, pattern


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Text cells. The first `words` columns are text and stand left, the others are numbers and stand right.

    fold     a line that stands for a long table until it is opened; without one it is open
    alarm    the head of a column of sizes in which anything but "0 B" is bad news
    """

    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    words: int = 1
    fold: str = ""
    alarm: str = ""

    def filled(self) -> Table:
        """Return the table without the columns that hold nothing; the first one stays."""
        kept = [i for i in range(len(self.heads)) if i == 0 or any(line[i] not in ("", units.MISSING) for line in self.lines)]
        lines = tuple(tuple(line[i] for i in kept) for line in self.lines)
        words = sum(i < self.words for i in kept)
        return dataclasses.replace(self, heads=tuple(self.heads[i] for i in kept), lines=lines, words=words)

    @property
    def has_alarm(self) -> bool:
        """Whether any cell is bad news."""
        return any(self.is_alarm(column, cell) for line in self.lines for column, cell in enumerate(line))

    def is_alarm(self, column: int, cell: str) -> bool:
        """Whether a cell is bad news."""
        return self.heads[column] == self.alarm and cell not in (units.MISSING, "0 B")


#: head, what a cell says, of a case's table; a column without any value is left out
_Column = tuple[str, Callable[[Record], str]]


def case_table(group: rows.CaseRows) -> Table:
    """Return the timed rows of a case, fastest first; the first column is the row's label, the last its flags."""
    columns = _case_columns(group)
    lines = tuple(tuple(show(record) for _, show in columns) for record in group.timed)
    return Table(heads=tuple(head for head, _ in columns), lines=lines).filled()


def _case_columns(group: rows.CaseRows) -> Sequence[_Column]:
    kind = group.first.device_kind
    time, rate = units.time_scale(kind, map(rows.time_s, group.timed)), rate_scale(group.first)
    return (
        ("implementation", group.label),
        (f"time {time.unit}", lambda r: time.show(rows.time_s(r))),
        (rate.unit, lambda r: rate.show(rows.rate(r), 3)),
        ("of ceiling", lambda r: units.percent(rows.share(r))),
        ("to best", lambda r: units.ratio(group.to_best(r))),
        (f"interval {time.unit}", lambda r: units.interval(time, r.launch_s)),
        (f"plan {time.unit}", lambda r: time.show(r.plan_s.median if r.plan_s else None, 3)),
        (f"host plan {time.unit}", lambda r: time.show(r.plan_host_s, 3)),
        (f"host {time.unit}", lambda r: time.show(r.host_s, 3)),
        ("workspace", lambda r: units.size(r.workspace_bytes)),
        ("peak", lambda r: units.size(rows.peak_bytes(r))),
        ("energy", lambda r: units.joules(r.energy_j)),
        ("power W", lambda r: units.MISSING if r.power_w is None else units.decimal(r.power_w, 3)),
        ("flags", lambda r: ", ".join(map(units.prose, r.flags))),
    )


def rate_scale(record: Record) -> units.Scale:
    """Return the unit of `rows.rate` of the record and all others of its case."""
    return units.rate_scale(record.device_kind, rows.is_arithmetic(record))


def reached(best: Record | None) -> str:
    """Return how near a case's fastest row is to what is possible; where arithmetic binds, how fast it computes."""
    if best is None or not rows.is_arithmetic(best):
        return units.percent(rows.share(best) if best else None)
    scale = rate_scale(best)
    return f"{scale.show(rows.rate(best), 3)} {scale.unit}"


def ceiling_line(group: rows.CaseRows) -> str:
    """Return a case's traffic and ceiling as a sentence or two; of a case bound by arithmetic its FLOPs."""
    known, rate = group.ceiling, rate_scale(group.first)
    moved, flops = group.first.traffic_bytes, group.first.flops
    parts = [] if moved is None else [f"{units.size(moved)} to move"]
    if moved and flops and rows.is_arithmetic(group.first):
        parts.append(f"{units.flops(flops)}, {units.decimal(flops / moved, 3)} a byte: bound by arithmetic, not by reading")
        return "; ".join(parts) + "."
    if known and known.ceiling_s and known.traffic_bytes:
        time = units.time_scale(known.device_kind, [known.ceiling_s])
        by = f", by {known.ceiling_by}" if known.ceiling_by else ""
        speed = rate.show(known.traffic_bytes / known.ceiling_s, 3)
        parts.append(f"ceiling {speed} {rate.unit} ({time.show(known.ceiling_s)} {time.unit}{by})")
    parts += floor_of(group)
    return "; ".join(parts or ["no ceiling was measured"]) + "."


def floor_of(group: rows.CaseRows) -> list[str]:
    """Return in words what a launch takes that does nothing; [] where it was not timed, or arithmetic binds the case."""
    known = next((record for record in group.timed if record.floor_s), None)
    if known is None or not known.floor_s or rows.is_arithmetic(known):
        return []
    time = units.time_scale(known.device_kind, [known.floor_s])
    return [f"an empty launch {time.show(known.floor_s)} {time.unit}"]


def fact_tables(records: Sequence[Record], facts: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Sequence[Table]]]:
    """Yield (title, tables) of everything that is not a time; what has no line is left out."""
    found = (
        ("Checks", [checks(records)]),
        ("What quantised caches err by their format", [formats(records)]),
        ("What was inside the timed region", [ledgers(records)]),
        ("Kernels", kernels(records)),
        ("Conditions during the samples", [conditions(records)]),
        ("Environment", [environment(records, facts)]),
    )
    yield from ((title, [one.filled() for one in tables]) for title, tables in found if any(one.lines for one in tables))


def checks(records: Iterable[Record]) -> Table:
    """Return one line for each kind of check: on how many rows, and the largest error of a row that passed; no controls."""
    found: dict[str, list[tuple[Record, Any]]] = collections.defaultdict(list)
    for record in records:
        if record.role == "implementation":
            for family, outcome in record.check.items():
                found[family].append((record, outcome))
    lines = []
    for family, judged in found.items():
        errors = [(error, r) for r, outcome in judged if _passed(outcome) and (error := rows.family_error(outcome)) is not None]
        worst, by = max(errors, key=lambda pair: pair[0], default=(None, None))
        failed = sum(isinstance(outcome, Mapping) and outcome.get("passed") is False for _, outcome in judged)
        where = f"{by.row} on {by.case}" if by else units.MISSING
        lines.append((family, where, str(len(judged)), str(failed or units.MISSING), units.of_allowed(worst)))
    return Table(heads=("check", "nearest to its limit", "rows", "not passed", "of allowed"), lines=tuple(lines), words=2)


def formats(records: Iterable[Record]) -> Table:
    """Return one line for each case with a quantised cache: what its format alone changes in the output of a row."""
    found = {record.case_digest: record for record in records if record.format_error is not None}
    lines = [
        (r.case, str(r.shape.get("kv_dtype")), f"one a {r.shape.get('kv_scales')}", units.percent(r.format_error))
        for r in found.values()
    ]
    return Table(heads=("case", "cache", "scales", "format's own error"), lines=tuple(lines), words=3)


def _passed(outcome: object) -> bool:
    return isinstance(outcome, Mapping) and outcome.get("passed") is not False


def ledgers(records: Sequence[Record]) -> Table:
    """Return one line for each remark: its topic, and whose rows carry it, "all" where every row does.

    Remarks that differ in their numbers only, from case to case, are one remark with ranges: "28 to 431 sets, rotated".
    """
    remarks: dict[tuple[str, str], list[tuple[str, Record]]] = collections.defaultdict(list)
    for record in records:
        for topic, remark in record.ledger.items():
            remarks[topic, pattern(remark)].append((remark, record))
    num_all = sum(bool(record.ledger) for record in records)
    lines = []
    for (topic, _), found in sorted(remarks.items(), key=lambda item: (item[0][0], -len(item[1]))):
        whose = "all" if len(found) == num_all else ", ".join(dict.fromkeys(record.impl for _, record in found))
        lines.append((topic, merged([remark for remark, _ in found]), whose, str(len(found))))
    return Table(heads=("topic", "remark", "implementations", "rows"), lines=tuple(lines), words=3)


def kernels(records: Iterable[Record]) -> list[Table]:
    """Return a table for each implementation, a line for each compiled kernel; equal kernels of several cases are one line."""
    heads = ("implementation", "kernel", "digest", "registers", "shared", "spills", "cases")
    by_impl: dict[str, list[Record]] = collections.defaultdict(list)
    for record in records:
        if record.kernels:
            by_impl[record.impl].append(record)
    made = []
    for impl, found in by_impl.items():
        counts = collections.Counter((r.row, *_kernel(kernel)) for r in found for kernel in r.kernels)
        lines = tuple((*key, str(number)) for key, number in sorted(counts.items()))
        fold = f"{impl}: {units.count(len(lines), 'kernel')}{_resources([kernel for r in found for kernel in r.kernels])}"
        made.append(Table(heads=heads, lines=lines, words=3, fold=fold, alarm="spills"))
    return made


def _resources(found: Sequence[Mapping[str, Any]]) -> str:
    """What of an implementation's kernels is worth a look before the table is opened."""
    registers = [kernel["registers"] for kernel in found if rows.is_number(kernel.get("registers"))]
    spills = [kernel["spill_bytes"] for kernel in found if rows.is_number(kernel.get("spill_bytes"))]
    text = f", {merged([f'{least} registers' for least in map(str, sorted(registers))])}" if registers else ""
    return text + (f", spills up to {units.size(max(spills))}" if any(spills) else ", no spills" if spills else "")


def _kernel(kernel: Mapping[str, Any]) -> tuple[str, ...]:
    def number(name: str) -> str:
        value = kernel.get(name)
        return units.size(value) if isinstance(value, int) else units.MISSING

    registers = units.plain(kernel.get("registers", units.MISSING))
    digest = str(kernel.get("digest", units.MISSING))[:12]
    return str(kernel.get("name", units.MISSING)), digest, registers, number("shared_bytes"), number("spill_bytes")


def conditions(records: Iterable[Record]) -> Table:
    """Return what NVML said around the samples: numbers from least to most, and of a text or a list how often each occurred."""
    numbers: dict[str, list[float]] = collections.defaultdict(list)
    words: collections.Counter[tuple[str, str]] = collections.Counter()
    for record in records:
        for name, value in _leaves(record.nvml):
            if rows.is_number(value):
                numbers[name].append(value)
            else:
                words.update((name, units.plain(item)) for item in (value if isinstance(value, list | tuple) else [value]))
    lines = [(_words(name), _range(found), str(len(found))) for name, found in numbers.items()]
    lines += [(_words(name), text, str(number)) for (name, text), number in words.most_common()]
    return Table(heads=("fact", "values", "times"), lines=tuple(lines), words=2)


def _leaves(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Flatten nested facts under their innermost names: before and after are two readings of one fact."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif value is not None and value not in ([], ()):
            yield name, value


def _named_leaves(facts: Mapping[str, Any], stem: str = "") -> Iterator[tuple[str, str]]:
    """Flatten nested facts under all their names, as people write them: ("device memory", "150 GB")."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            inner = {f"{part}_s": seconds for part, seconds in value.items()} if name.endswith("_s") else value
            yield from _named_leaves(inner, f"{stem}{name.removesuffix('_s')} ")
        elif value is not None and value not in ([], ()):
            ending, text = _with_unit(name, value)
            yield f"{stem}{name.removesuffix(ending)}".replace("_", " "), text


def _with_unit(name: str, value: Any) -> tuple[str, str]:
    """A value whose name ends in its unit as people read it, and that ending; any other as it is."""
    if rows.is_number(value):
        if name.endswith("_bytes_per_s"):
            return "_bytes_per_s", f"{units.size(value)}/s"
        if name.endswith("_bytes"):
            return "_bytes", units.size(value)
        if name.endswith("_hz"):
            return "_hz", f"{value / 1e6:.0f} MHz"
        if name.endswith("_s"):
            return "_s", f"{units.decimal(value, 3)} s"
    return "", units.plain(value)


def _range(numbers: Sequence[float]) -> str:
    least, most = min(numbers), max(numbers)
    return units.plain(least) if least == most else f"{units.plain(least)} to {units.plain(most)}"


def _words(name: str) -> str:
    """A field's name as people write it: "sm_clock_mhz" is "sm clock (MHz)"."""
    names = {"mhz": "MHz", "c": "°C", "w": "W", "j": "J", "s": "s", "bytes": "bytes"}
    stem, _, unit = name.rpartition("_")
    text = f"{stem} ({names[unit]})" if stem and unit in names else name
    return text.replace("_", " ")


def environment(records: Iterable[Record], facts: Mapping[str, Any] | None = None) -> Table:
    """Return run, device and toolchain, and what else run.json says; a name that had several values gets a line for each."""
    found: dict[tuple[str, str], None] = {}
    for record in records:
        own = {"run": record.run, "suite": record.suite, "device": record.device}
        found.update(dict.fromkeys((name, str(value)) for name, value in {**own, **record.toolchain}.items()))
    started = [record.started_at for record in records]
    facts = facts or {}
    given = facts.get("arguments")
    if isinstance(given, list):
        found["command", shlex.join(["pagedbench", *map(str, given)])] = None
    told = {name: value for name, value in facts.items() if name not in ("run", "command", "arguments", "toolchain")}
    found.update(dict.fromkeys(_named_leaves(told)))
    times = {("first row started", min(started)): None, ("last row started", max(started)): None} if started else {}
    return Table(heads=("what", "value"), lines=(*found, *times), words=2)

"""What became of the rows: counts, the verdict, and why rows have no number."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from harness.record import STATUSES, Record
from harness.report import units
from harness.report.ranges import merged, pattern
from harness.report.rows import SIDES, CaseRows, side, worst_error

#: statuses with which no row should end, in words
BAD = {"wrong": "wrong", "failed": "failed", "timeout": "timed out"}
#: statuses that have a reason, what is to be acted on first
ORDER = (*BAD, "unsupported", "skipped")

_LENGTH = 240  # characters of a line that stand in a table; the whole reason is said once, elsewhere
_FOLDED = 4  # lines from which a reason is folded


def tally(records: Iterable[Record]) -> dict[str, collections.Counter[str]]:
    """Count statuses by side; sides without rows are left out."""
    counts = {whose: collections.Counter[str]() for whose in SIDES}
    for record in records:
        counts.setdefault(side(record), collections.Counter())[record.status] += 1
    return {whose: counter for whose, counter in counts.items() if counter}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reason:
    """Rows that share a status, and a reason up to its numbers."""

    status: str
    rows: tuple[Record, ...]

    @property
    def texts(self) -> list[str]:
        """The different reasons, the first one first."""
        return list(dict.fromkeys(record.reason or "" for record in self.rows))

    @property
    def text(self) -> str:
        """The reason; numbers that differ as ranges. Reasons that differ in more, between their ends, give the first one."""
        return merged(self.texts)

    @property
    def is_long(self) -> bool:
        """Whether only `ends` should be shown at first."""
        return len(self.text.splitlines()) >= _FOLDED

    @property
    def ends(self) -> str:
        """The first and the last line."""
        return "\n".join(_ends(self.text))

    @property
    def count(self) -> str:
        """ "18 rows", and how many texts are shown as one."""
        number = len(self.texts)
        return units.count(len(self.rows), "row") + (f", {number} texts shown as one" if number > 1 else "")

    @property
    def cases(self) -> list[str]:
        """The cases concerned."""
        return list(dict.fromkeys(record.case for record in self.rows))

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


def reasons(records: Iterable[Record], statuses: Sequence[str] = ORDER) -> list[Reason]:
    """Group rows that are not ok by status and reason, in the order of `statuses`, the largest groups first.

    Reasons whose first and last lines are equal up to numbers are one: what lies between quotes the source. A wrong answer
    is its implementation's own. Wrong controls are left out: they are as they must be, and `tally` counts them.
    """
    groups: dict[tuple[str, ...], list[Record]] = collections.defaultdict(list)
    for record in records:
        if record.status in statuses and not (record.status == "wrong" and record.role == "control"):
            whose = record.impl if record.status == "wrong" else ""
            groups[record.status, whose, *map(pattern, _ends(record.reason or ""))].append(record)
    found = [Reason(status=status, rows=tuple(rows)) for (status, *_), rows in groups.items()]
    return sorted(found, key=lambda group: (statuses.index(group.status), -len(group.rows)))


def brief(reason: str) -> str:
    """Return the first and the last line of a reason on one line: what was tried, and what came of it."""
    return " … ".join(line if len(line) <= _LENGTH else f"{line[:_LENGTH]} …" for line in _ends(reason))


def said(record: Record) -> str:
    """What stands in place of a time: the reason in brief, or how near a right row came to what is allowed."""
    if record.reason:
        return brief(record.reason)
    error = worst_error(record)
    return "not timed" if error is None else f"not timed; largest error {units.of_allowed(error)} of what is allowed"


def _ends(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [lines[0], lines[-1]] if len(lines) > 1 else lines or [""]


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


def faults(group: CaseRows) -> str:
    """Return "10 of 13 rows failed", of those that could run: what a case's fastest row was not held against."""
    every = (*group.timed, *group.untimed)
    found = [r for r in every if r.role == "implementation" and r.status not in ("unsupported", "skipped")]
    counts = collections.Counter(r.status for r in found)
    of = f" of {units.count(len(found), 'row')} "
    return ", ".join(f"{counts[status]}{of}{word}" for status, word in BAD.items() if counts[status])


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


def counted(records: Iterable[Record]) -> str:
    """Return "20 ok, 3 unsupported"."""
    return _counted(collections.Counter(record.status for record in records))


def _counted(counter: Mapping[str, int]) -> str:
    return ", ".join(f"{counter[status]} {status}" for status in STATUSES if counter.get(status))

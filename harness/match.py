"""Which row of one run meets which row of another, and why the rest meet nobody.

Rows meet by `Record.key`: case digest, implementation, layout, device. A row's parameters are no part of the key where
each side has one setting of it: a changed default is a change of the implementation, and is compared. Where a side has
several (a `tune` run), settings meet their equals only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from harness.record import Record

Key = tuple[str, str, str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A row of two runs, or of one of them and `why` the other has none."""

    old: Record | None = None
    new: Record | None = None
    why: str = ""

    @property
    def record(self) -> Record:
        """The newer of what there is."""
        found = self.new or self.old
        assert found is not None
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matched:
    """All pairs, in the order of the new run, then what only the old one has; and how many lines were repeats."""

    pairs: Sequence[Pair]
    repeats: int


def match(old: Sequence[Record], new: Sequence[Record]) -> Matched:
    """Pair the rows of two runs. Of a row that stands in one of them twice, the last line counts, whatever its clock."""
    sides = [latest(records) for records in (old, new)]
    groups = [_by_key(side) for side in sides]
    pairs: list[Pair] = []
    for key in dict.fromkeys([*groups[1], *groups[0]]):
        pairs += _settings(groups[0].get(key, []), groups[1].get(key, []), sides)
    return Matched(pairs=pairs, repeats=len(old) + len(new) - len(sides[0]) - len(sides[1]))


def latest(records: Sequence[Record]) -> list[Record]:
    """Each row once: the last of its lines, in the place of the first. Controls, wrong on purpose, are left out."""
    found = {(record.key, settings(record)): record for record in records if record.role != "control"}
    return list(found.values())


def settings(record: Record) -> str:
    """A row's parameters as text, equal for equal ones."""
    return json.dumps(record.params, sort_keys=True)


def _by_key(records: Sequence[Record]) -> dict[Key, list[Record]]:
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(record.key, []).append(record)
    return groups


def _settings(old: Sequence[Record], new: Sequence[Record], sides: Sequence[Sequence[Record]]) -> list[Pair]:
    """The pairs of one key."""
    if len(old) == len(new) == 1:
        return [Pair(old=old[0], new=new[0])]
    if not old or not new:
        absent = [Pair(new=record, why=_why_absent(record, sides[0], "the baseline")) for record in new]
        return absent + [Pair(old=record, why=_why_absent(record, sides[1], "the new run")) for record in old]
    left = {settings(record): record for record in old}
    pairs = []
    for record in new:
        other = left.pop(settings(record), None)
        pairs.append(Pair(old=other, new=record, why="" if other else "the baseline has other settings of it only"))
    return pairs + [Pair(old=record, why="the new run has other settings of it only") for record in left.values()]


def _why_absent(record: Record, others: Sequence[Record], whose: str) -> str:
    """The nearest thing that `others` have to this row, as a reason for which it is not compared."""
    alike = [other for other in others if (other.impl, other.layout) == (record.impl, record.layout)]
    for other in alike:
        if other.case_digest == record.case_digest:
            return f"{whose} has it on {other.device}; different devices are never compared"
    for other in alike:
        if other.case == record.case:
            return f"in {whose} the case under this name has digest {other.case_digest}, here {record.case_digest}"
    return f"not in {whose}"

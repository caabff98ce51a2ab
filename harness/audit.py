"""What an audit found: which case caught which control by which check, and what got away. Plain data over records."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from harness.record import Record

#: what became of a control on a case
KILLED, PASSED, BROKEN, REFUSED = "killed", "passed", "broken", "refused"
_BECAME = {
    "wrong": KILLED, "ok": PASSED, "failed": BROKEN, "timeout": BROKEN, "unsupported": REFUSED, "skipped": REFUSED,
}  # fmt: skip
#: what a reason says after the family of inputs, where it was no value of the output that was wrong
GUARDS = ("guard", "changed its input")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """The verdict over a run of controls and right implementations. Names of controls and cases, in the order they were run.

    kills           control -> case -> the check that caught it first
    passed          control -> cases that it claims, and on which no check saw anything
    survivors       controls that were judged and never caught
    broken          control -> why it raised, did not compile or fell silent: that is no judgement
    never_judged    control -> why no case applied to it
    false_alarms    right implementations that were found wrong or failed: "ROW on CASE: reason"
    num_right       right rows that were judged
    """

    cases: Sequence[str]
    kills: Mapping[str, Mapping[str, str]]
    passed: Mapping[str, Sequence[str]]
    survivors: Sequence[str]
    broken: Mapping[str, str]
    never_judged: Mapping[str, str]
    false_alarms: Sequence[str]
    num_right: int

    @property
    def num_judged(self) -> int:
        """Controls that some check could catch."""
        return sum(bool(found or self.passed[name]) for name, found in self.kills.items())

    @property
    def num_killed(self) -> int:
        return sum(map(bool, self.kills.values()))

    @property
    def is_clean(self) -> bool:
        """Whether every control was caught that could be, none is broken, and nothing right was found wrong."""
        return not (self.survivors or self.broken or self.false_alarms)

    def killers(self) -> dict[str, list[str]]:
        """Case -> the controls that it kills."""
        return {case: [name for name, found in self.kills.items() if case in found] for case in self.cases}

    def sole_kills(self) -> dict[str, list[str]]:
        """Case -> the controls that no other case kills. A case without any kills nothing that its neighbours do not."""
        alone = {name: next(iter(found)) for name, found in self.kills.items() if len(found) == 1}
        return {case: [name for name, killer in alone.items() if killer == case] for case in self.cases}

    def enough(self) -> list[str]:
        """A few cases that together kill all that the suite kills, the busiest first."""
        killers, chosen = self.killers(), list[str]()
        left = {name for name, found in self.kills.items() if found}
        while left:
            best = max(killers, key=lambda case: len(left & set(killers[case])))
            chosen.append(best)
            left -= set(killers[best])
        return chosen

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, with the share killed."""
        judged = self.num_judged
        return {
            **dataclasses.asdict(self),
            "num_judged": judged,
            "num_killed": self.num_killed,
            "share_killed": self.num_killed / judged if judged else None,
            "sole_kills": self.sole_kills(),
            "enough": self.enough(),
        }


def audit(records: Sequence[Record]) -> Audit:
    """Read the verdicts of a run's controls and implementations; readers are left out."""
    controls = list(dict.fromkeys(record.impl for record in records if record.role == "control"))
    kills: dict[str, dict[str, str]] = {name: {} for name in controls}
    passed: dict[str, list[str]] = {name: [] for name in controls}
    broken: dict[str, str] = {}
    refused: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for record in records:
        if record.role != "control":
            continue
        became = _BECAME[record.status]
        if became is KILLED:
            kills[record.impl][record.case] = caught_by(record)
        elif became is PASSED:
            passed[record.impl].append(record.case)
        elif became is BROKEN:
            broken.setdefault(record.impl, f"{record.status} on {record.case}: {record.reason}")
        else:
            refused[record.impl][record.reason or ""] += 1
    right = [record for record in records if record.role == "implementation"]
    alarms = [record for record in right if _BECAME[record.status] in (KILLED, BROKEN)]
    return Audit(
        cases=list(dict.fromkeys(record.case for record in records)),
        kills=kills,
        passed=passed,
        survivors=[name for name in controls if passed[name] and not kills[name]],
        broken=broken,
        never_judged={
            name: refused[name].most_common(1)[0][0]
            for name in controls
            if not kills[name] and not passed[name] and name not in broken
        },
        false_alarms=[f"{record.row} on {record.case}: {record.status}: {record.reason}" for record in alarms],
        num_right=sum(_BECAME[record.status] is PASSED for record in right),
    )


def caught_by(record: Record) -> str:
    """The check that found a row wrong, as its reason begins: a guard, else the family of inputs or the relation."""
    first, *more = (record.reason or "").split(": ")
    return more[0] if more and more[0] in GUARDS else first.partition(",")[0].removesuffix(" inputs")

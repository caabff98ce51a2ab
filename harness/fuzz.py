"""Random cases until the time is up: every failure is shrunk to the smallest case that still shows it.

An implementation that has failed is left out from then on, so that one fault does not hide the others.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Flaky

from harness.ops.attention import AttentionCase
from harness.ops.case import Case
from harness.record import Record
from harness.registry import Entry
from harness.strategies import cases

#: A check of some entries on one case: a record each, whatever happens.
Check = Callable[[Case, Sequence[Entry]], list[Record]]

BAD = ("wrong", "failed", "timeout")
#: Cases of one draw: afterwards the clock is looked at, and what has failed is left out.
ROUND = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """An entry, the smallest case found on which it fails, and the record of that; `again` is False where it once passed."""

    entry: Entry
    case: Case
    record: Record
    again: bool = True


class _Failed(Exception):
    """Tells Hypothesis that a case shows a failure."""


class Fuzz:
    """Checks `entries` on random cases, with `check`, for `seconds` or `max_cases`; counts what it does."""

    def __init__(
        self, entries: Sequence[Entry], check: Check, *, seed: int, seconds: float = float("inf"), max_cases: int | None = None
    ) -> None:
        self.entries, self.seed, self.max_cases = list(entries), seed, max_cases
        self._check, self._until = check, time.monotonic() + seconds
        self.num_cases = self.num_judged = 0

    def findings(self) -> Iterator[Finding]:
        """Yield failures as they are found and shrunk; takes no new case once the time is up, but shrinks to the end."""
        for number in itertools.count():
            if not self.entries or self._is_over():
                return
            finding = self._hunt(self.seed + number)
            if finding is not None:
                self.entries.remove(finding.entry)
                yield finding

    def _is_over(self) -> bool:
        return time.monotonic() > self._until or (self.max_cases is not None and self.num_cases >= self.max_cases)

    def _hunt(self, number: int) -> Finding | None:
        """One draw of cases; the first failure ends it, and only that entry is asked while it is shrunk."""
        smallest: list[Finding] = []

        @seed(number)
        @settings(
            max_examples=ROUND, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
        )  # fmt: skip
        @given(cases(sorted({entry.impl.op for entry in self.entries})))
        def holds(case: Case) -> None:
            if not smallest and self._is_over():
                return
            asked = [smallest[-1].entry] if smallest else [entry for entry in self.entries if entry.impl.op == case.op]
            named = dataclasses.replace(case, name=f"fuzz.{case.digest}")
            for record in self._judge(named, asked):
                if record.status in BAD:
                    entry = next(entry for entry in asked if str(entry) == record.row)
                    smallest.append(Finding(entry=entry, case=named, record=record))
                    raise _Failed

        try:
            holds()
        except _Failed:
            return smallest[-1]
        except Flaky:
            return dataclasses.replace(smallest[-1], again=False)
        return None

    def _judge(self, case: Case, entries: Sequence[Entry]) -> list[Record]:
        self.num_cases += 1
        records = self._check(case, entries)
        self.num_judged += sum(record.status not in ("unsupported", "skipped") for record in records)
        return records


def entry_of(case: Case) -> dict[str, Any]:
    """Return the case as an entry of a --case-file: its name, and what is not at its default."""
    fields = {field.name: field.default for field in dataclasses.fields(case)}
    given_fields = {name: getattr(case, name) for name, default in fields.items() if getattr(case, name) != default}
    return {"op": case.op, **given_fields}


def shape_of(case: Case) -> str | None:
    """Return the case as --shape spells it, or None where that has no words for it."""
    if not isinstance(case, AttentionCase) or not case.seq_lens or case.scale is not None or case.pool_slack != 1.25:
        return None
    words = {"q": case.num_q_heads, "kv": case.num_kv_heads, "d": case.head_dim, "bs": case.block_size}
    lens = {"lens": spell_lengths(case.seq_lens)}
    if case.q_lens != (1,) * case.num_seqs:
        lens["qlens"] = spell_lengths(case.q_lens)
    asked: dict[str, Any] = {name: getattr(case, name) for name in ("window", "softcap", "kv_dtype") if getattr(case, name)}
    asked |= {name: 1 for name in ("alibi", "sinks") if getattr(case, name)}
    asked |= {"kv_scales": case.kv_scales} if case.kv_scales != "tensor" else {}
    if case.prefix:
        shared = set(case.prefix[1:])
        if len(shared) > 1 or case.prefix[-1][0]:
            return None
        asked["prefix"] = case.prefix[-1][1]
    return ",".join(f"{key}={value}" for key, value in {**words, **lens, "dtype": case.dtype, **asked}.items())


def spell_lengths(lens: Sequence[int]) -> str:
    """Return lengths as --shape spells them: (4096, 4096, 17) is 4096x2+17."""
    runs = [(length, len(list(group))) for length, group in itertools.groupby(lens)]
    return "+".join(f"{length}x{count}" if count > 1 else str(length) for length, count in runs)


def command_of(finding: Finding, case_file: str, impl_files: Sequence[str] = (), device: str | None = None) -> str:
    """Return the command that checks the finding again."""
    shape = shape_of(finding.case)
    words = ["pagedbench", "check", "--impl", str(finding.entry)]
    words += ["--shape", shape] if shape is not None else ["--case-file", case_file]
    words += [word for path in impl_files for word in ("--impl-file", path)]
    return shlex.join(words + (["--device", device] if device else []))

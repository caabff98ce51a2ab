"""What compute-sanitizer writes, read: findings, and whether it came to its end."""

from __future__ import annotations

import collections
import dataclasses
import re


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was found `count` times.

    what     "Invalid __global__ read of size 16 bytes"
    where    "split_kv+0x1a0 in split_kv.cu:61"
    """

    what: str
    where: str
    is_error: bool = True
    count: int = 1

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        return f"{self.what}{where}" + (f" ({self.count} times)" if self.count > 1 else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """What a sanitizer wrote. `num_errors` is None where it never came to its summary."""

    findings: tuple[Finding, ...]
    num_errors: int | None

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that are no mere warnings; where the summary counts errors of no known form, one that says so."""
        errors = tuple(finding for finding in self.findings if finding.is_error)
        if not errors and self.num_errors:
            return (Finding(what=f"{self.num_errors} errors by its summary", where=""),)
        return errors


_SUMMARY = re.compile(r"ERROR SUMMARY: (?P<errors>\d+) error|RACECHECK SUMMARY: .*\((?P<races>\d+) error")
_RACE = re.compile(r"(?:(?P<level>\w+): ?)?(?P<what>Race reported between \w+ access) at (?P<where>.*)")
_KINDS = re.compile(
    r"Invalid |Uninitialized |Misaligned |Barrier error|Malloc/Free|Potential |Program hit |Leaked |Unused memory|"
    r"Out-of-range|Stack overflow|Fatal UVM|Hardware|Internal Sanitizer Error"
)


def parse(text: str) -> Log:
    """Read a sanitizer's log; lines that are not its own are passed over.

        ========= Invalid __global__ read of size 4 bytes
        =========     at kernel(float *)+0x70 in kernel.cu:41
    """
    counts: collections.Counter[Finding] = collections.Counter()
    heading: Finding | None = None
    num_errors: int | None = None
    for line in text.splitlines():
        if not line.startswith("========="):
            continue
        body = line[len("=========") :]
        words = body.strip()
        if heading is not None and re.match(r" {4}|(?: ?and )", body):  # a detail of the heading above
            heading = _with_detail(heading, words)
            continue
        if heading is not None:
            counts[heading] += 1
        heading = _heading(words)
        if summary := _SUMMARY.search(words):
            num_errors = (num_errors or 0) + int(summary["errors"] or summary["races"] or 0)
    if heading is not None:
        counts[heading] += 1
    return Log(findings=tuple(dataclasses.replace(found, count=n) for found, n in counts.items()), num_errors=num_errors)


def _heading(words: str) -> Finding | None:
    if race := _RACE.match(words):
        is_error = not (race["level"] or "").lower().startswith("warn")
        return Finding(what=race["what"], where=race["where"][:200], is_error=is_error)
    return Finding(what=words.rstrip(".")[:200], where="") if _KINDS.match(words) else None


def _with_detail(heading: Finding, words: str) -> Finding:
    """Keep where it was, and the other side of a race."""
    if words.startswith("at ") and not heading.where:
        return dataclasses.replace(heading, where=words[3:203])
    if words.startswith("and ") and "access at" in words and " and " not in heading.where:
        return dataclasses.replace(heading, where=f"{heading.where} {words[:200]}")
    return heading

"""The kill matrix of an audit, for a terminal and as Markdown: a control a line, a case a column, a letter a check."""

from __future__ import annotations

import dataclasses
import string
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.audit import Audit
from harness.report.markdown import code, escape, table
from harness.report.terminal import WIDTH

#: a claimed case on which no check saw anything; a case that was not judged
PASSED, BLANK = ".", " "


def terminal_matrix(found: Audit) -> str:
    """Return what `pagedbench audit` prints."""
    letters, heads = check_letters(found), _case_heads(found)
    width = max((len(_short(name)) for name in found.kills), default=0)
    lines = [f"{'':{width}}  {''.join(heads.values())}"]
    lines += [f"{_short(name):{width}}  {_cells(found, name, letters)}".rstrip() for name in found.kills]
    lines += ["", _wrapped("checks", (f"{letter} {check}" for check, letter in letters.items()))]
    lines += [_wrapped("cases", (f"{head} {case}" for case, head in heads.items())), ""]
    lines += [textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in _findings(found)]
    return "\n".join(lines)


def markdown_matrix(found: Audit, faults: dict[str, str]) -> str:
    """Return audit.md; `faults` says of each control what it does wrong."""
    letters, heads = check_letters(found), _case_heads(found)
    rows = [
        [
            code(_short(name)),
            escape(faults.get(name, "")),
            f"{len(kills)} of {len(kills) + len(found.passed[name])}",
            ", ".join(dict.fromkeys(kills.values())) or "-",
            code(_cells(found, name, letters)) if kills or found.passed[name] else "-",
        ]
        for name, kills in found.kills.items()
    ]
    parts = [
        "# Audit",
        escape(_score(found)) + ".",
        table(["control", "what it does wrong", "caught", "first by", code("".join(heads.values()))], rows, words=5),
        escape(_wrapped("Checks", (f"{letter} {check}" for check, letter in letters.items()))),
        escape(_wrapped("Cases", (f"{head} {case}" for case, head in heads.items()))),
        *(f"- {escape(line)}" for line in _findings(found)),
    ]
    return "\n\n".join(parts) + "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """The matrix as a page shows it. A cell is (letter, what it means).

    heads       of the columns: (character, case)
    letters     (letter, check)
    lines       control, what it does wrong, "7 of 7", "caught" or "survives" or "broken" or "unjudged", cells
    findings    what to act on
    """

    heads: Sequence[tuple[str, str]]
    letters: Sequence[tuple[str, str]]
    lines: Sequence[tuple[str, str, str, str, Sequence[tuple[str, str]]]]
    score: str
    findings: Sequence[str]


def grid(found: Audit, faults: Mapping[str, str]) -> Grid:
    """Return the kill matrix for report.html; `faults` says of each control what it does wrong, as far as that is known."""
    letters, heads = check_letters(found), _case_heads(found)
    lines = []
    for name, kills in found.kills.items():
        passed = found.passed[name]
        cells = [
            (letters[kills[case]], f"caught by {kills[case]} on {case}") if case in kills
            else (PASSED, f"passed on {case}") if case in passed else (BLANK, "")
            for case in found.cases
        ]  # fmt: skip
        caught = f"{len(kills)} of {len(kills) + len(passed)}"
        lines.append((_short(name), faults.get(name, ""), caught, _became(found, name), cells))
    return Grid(
        heads=[(mark, case) for case, mark in heads.items()], letters=[(letter, check) for check, letter in letters.items()],
        lines=lines, score=_score(found), findings=list(_findings(found))[:-1],
    )  # fmt: skip


def _became(found: Audit, name: str) -> str:
    if name in found.survivors:
        return "survives"
    return "caught" if found.kills[name] else "broken" if name in found.broken else "unjudged"


def check_letters(found: Audit) -> dict[str, str]:
    """A letter for each check that caught something: its own first one, if that is free."""
    letters: dict[str, str] = {}
    for check in dict.fromkeys(check for kills in found.kills.values() for check in kills.values()):
        wanted = [*check.upper(), *check.lower(), *string.ascii_letters, *string.digits]
        free = (letter for letter in wanted if letter.isalnum() and letter not in letters.values())
        letters[check] = next(free, "?")
    return letters


def _case_heads(found: Audit) -> dict[str, str]:
    """A character for each case, as a column's head."""
    marks = string.ascii_lowercase + string.digits + string.ascii_uppercase
    return {case: marks[index] if index < len(marks) else "?" for index, case in enumerate(found.cases)}


def _cells(found: Audit, name: str, letters: dict[str, str]) -> str:
    cells = (PASSED if case in found.passed[name] else BLANK for case in found.cases)
    kills = found.kills[name]
    return "".join(letters[kills[case]] if case in kills else cell for case, cell in zip(found.cases, cells, strict=True))


def _score(found: Audit) -> str:
    return (
        f"{found.num_killed} of {found.num_judged} controls caught; {len(found.survivors)} survive, "
        f"{len(found.broken)} are broken, {len(found.never_judged)} were never judged; "
        f"{len(found.false_alarms)} false alarms in {found.num_right + len(found.false_alarms)} right rows"
    )


def _findings(found: Audit) -> Iterator[str]:
    """A line for each thing to act on, the score last."""
    for name in found.survivors:
        yield f"SURVIVES: {name} passed {', '.join(found.passed[name])}"
    for name, reason in found.broken.items():
        yield f"BROKEN CONTROL: {name} {reason}"
    for line in found.false_alarms:
        yield f"FALSE ALARM: {line}"
    for reason in dict.fromkeys(found.never_judged.values()):
        names = [_short(name) for name, why in found.never_judged.items() if why == reason]
        yield f"never judged: {', '.join(names)}: {reason}"
    sole = found.sole_kills()
    idle = [case for case in found.cases if not sole[case]]
    if idle:
        yield f"kill nothing that another case does not: {', '.join(idle)}"
    yield f"enough together: {', '.join(found.enough()) or 'none'}"
    yield _score(found)


def _short(name: str) -> str:
    return name.removeprefix("control.")


def _wrapped(head: str, items: Iterable[str]) -> str:
    return textwrap.fill(f"{head}: {', '.join(items)}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)

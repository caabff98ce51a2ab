"""summary.md of `pagedbench ci`: one comment for a pull request, the verdict first, never longer than a comment may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from harness.record import Record
from harness.report import reasons, units
from harness.report.markdown import code, escape, overview, table

#: Bytes of a comment, at most. GitHub takes 65,536 characters.
LIMIT = 60_000
#: By this line whoever posts the comment finds the one that it is to take the place of.
MARK = "<!-- pagedbench ci -->"
#: Kinds of fault that are listed before it is said how many more there are.
LISTED = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the comment. `folded` shows the title alone until it is opened."""

    title: str
    text: str
    folded: bool = True


def comment(headline: str, steps: Sequence[Sequence[str]], sections: Sequence[Section], limit: int = LIMIT) -> str:
    """Return the comment; what does not fit into `limit` bytes is left out from the end of the sections, and said.

    steps    [name, result, what came of it] of each step
    """
    lines = [[escape(name), f"**{result}**", escape(told)] for name, result, told in steps]
    blocks = [MARK, f"### {escape(headline)}", table(["step", "result", "what came of it"], lines, words=3)]
    for section in sections:
        if section.folded:
            blocks.append(f"<details><summary>{escape(section.title)}</summary>\n\n{section.text}\n\n</details>")
        else:
            blocks += [f"#### {escape(section.title)}", *_blocks(section.text)]
    return _fitted(blocks, limit)


def faults(records: Sequence[Record]) -> str:
    """Return a list of what is wrong, failed or timed out, by reason; "" where nothing is."""
    found = reasons.reasons([record for record in records if record.role == "implementation"], tuple(reasons.BAD))
    lines = [
        f"- **{reason.status}** {code(reason.names)} on {_cases(reason.cases)}: {escape(reasons.brief(reason.text))}"
        for reason in found[:LISTED]
    ]
    more = [f"- and {units.count(len(found) - LISTED, 'more kind')}"] if len(found) > LISTED else []
    return "\n".join([*lines, *more])


def times(records: Sequence[Record]) -> Section | None:
    """Return the fastest by case, folded; None where no row has a time."""
    text = overview(records)
    return Section(title="Fastest by case", text=text) if text else None


def _cases(names: Sequence[str]) -> str:
    return ", ".join(map(code, names)) if len(names) <= 3 else units.count(len(names), "case")


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs, tables and lists of a text; what is folded away together stays together."""
    open_block: list[str] = []
    for block in text.strip().split("\n\n"):
        open_block.append(block)
        whole = "\n\n".join(open_block)
        if whole.count("<details>") == whole.count("</details>"):
            yield whole
            open_block = []
    if open_block:
        yield "\n\n".join(open_block)


def _fitted(blocks: Sequence[str], limit: int) -> str:
    """Join blocks in order as long as there is room; of a table that does not fit, the first rows."""
    note = "_Left out, since a comment holds no more: {}. The files beside this one have everything._"
    room = limit - _size(note) - 20
    kept: list[str] = []
    lost = 0
    for block in blocks:
        shown = block if _size(block) <= room else _first_rows(block, room)
        lost += shown != block
        room -= _size(shown)
        kept += [shown] if shown else []
    return "\n\n".join([*kept, *([note.format(units.count(lost, "part"))] if lost else [])]) + "\n"


def _first_rows(block: str, room: int) -> str:
    """As many lines of a table or list as fit; nothing of anything else, nor of a table without a row."""
    lines = block.split("\n")
    heads = 2 if block.startswith("|") else 0
    if not block.startswith(("|", "- ")):
        return ""
    while len(lines) > heads and _size("\n".join(lines)) > room:
        lines.pop()
    return "\n".join(lines) if len(lines) > heads else ""


def _size(text: str) -> int:
    """Bytes, with the blank line behind it."""
    return len(text.encode("utf-8", errors="backslashreplace")) + 2

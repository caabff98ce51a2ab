"""What people look at: tables in the terminal, report.md and report.html. All unit formatting lives here.

Everything is made of records alone, so a report can be made anywhere from a records.jsonl. What a page shows beside a
record's own fields (rates, ratios, groups) is derived in rows.py; numbers become text in units.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.record import Record
from harness.report.html import html
from harness.report.markdown import markdown
from harness.report.reasons import summary_line
from harness.report.terminal import terminal_table

__all__ = ["summary_line", "terminal_table", "write_report"]


def write_report(records: Sequence[Record], folder: str | Path) -> tuple[Path, Path]:
    """Write report.md and report.html into `folder`, which must exist; return their paths. OSError is the caller's."""
    made = (Path(folder) / "report.md", Path(folder) / "report.html")
    for path, page in zip(made, (markdown, html), strict=True):
        path.write_text(page(records), encoding="utf-8", errors="backslashreplace")
    return made

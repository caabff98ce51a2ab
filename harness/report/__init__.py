"""What people look at: tables in the terminal, report.md and report.html. All unit formatting lives here.

A report is made of records, so it can be made anywhere from a records.jsonl; report.html shows what else there is beside
them (beside.py). What a page shows of a record besides its own fields (rates, ratios, groups) is derived in rows.py; numbers
become text in units.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.record import Record
from harness.report.beside import Beside
from harness.report.html import html
from harness.report.markdown import markdown
from harness.report.reasons import summary_line
from harness.report.terminal import terminal_table

__all__ = ["Beside", "summary_line", "terminal_table", "write_report"]


def write_report(records: Sequence[Record], folder: str | Path, beside: Beside | None = None) -> tuple[Path, Path]:
    """Write report.md and report.html into `folder`, which must exist; return their paths. OSError names the file."""
    made = (Path(folder) / "report.md", Path(folder) / "report.html")
    for path, page in zip(made, (markdown(records), html(records, beside)), strict=True):
        try:
            path.write_text(page, encoding="utf-8", errors="backslashreplace")
        except OSError as error:  # of a full disk, it names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
    return made

"""The matrix as pytest runs it from anywhere: `pytest --pyargs harness.test_matrix --impl-file PATH`."""

from __future__ import annotations

from harness.plugin import judge
from harness.record import Record


def test_matrix(paged_record: Record) -> None:
    """An implementation gives the right answer on a case, or says why it does not run there."""
    judge(paged_record)

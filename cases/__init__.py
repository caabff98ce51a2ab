"""What is asked: cases of every operator as plain data, in suites. Imports neither torch nor NumPy."""

from __future__ import annotations

from cases.suites import ALL, SUITE_NOTES, SUITES, UNTIMED

__all__ = ["ALL", "SUITES", "SUITE_NOTES", "UNTIMED"]

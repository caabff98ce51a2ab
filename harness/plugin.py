"""pytest's door: the matrix of implementations and cases as test items, checked, and timed under --benchmark.

A test that asks for the fixture `paged_record` becomes one item for each implementation and case chosen, and gets the
record of that row; `judge` turns the record into pass, skip or failure. Under --benchmark the row is timed as well and
its samples, seconds on the device, go into pytest-benchmark's table, JSON and comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.matrix import Matrix, Row
from harness.names import UsageError
from harness.record import Record

_MATRIX = pytest.StashKey["Matrix"]()
_FIXTURES = ("paged_record", "paged_case", "paged_entry")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagedbench", "paged-attention kernels (pagedbench)")
    globs = "comma-separated globs of %s; may be given again"
    group.addoption("--benchmark", action="store_true", dest="pagedbench_timed", help="time what was right, on the device")
    group.addoption("--impl", action="append", default=[], metavar="GLOBS", help=globs % "implementations")
    group.addoption("--case", action="append", default=[], metavar="GLOBS", help=globs % "cases of any suite")
    group.addoption("--suite", metavar="NAME", help="suite of cases (default: smoke)")
    group.addoption("--impl-file", action="append", default=[], metavar="PATH", help="a Python file with a table IMPLS")
    group.addoption("--case-file", action="append", default=[], metavar="PATH", help="a JSON or TOML file of cases")
    # Not --device: test suites of kernel libraries have that one already, Triton's among them.
    group.addoption("--pagedbench-device", metavar="NAME", help="cpu, cuda or cuda:INDEX (default: the first GPU, or cpu)")

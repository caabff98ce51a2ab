"""Options that say what to run on: implementations, cases, device. Shared by the commands and the pytest plugin."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from harness.names import UsageError, nearest
from harness.ops.case import Case
from harness.ops.layouts import LAYOUTS
from harness.registry import Entry, Registry, default_registry, matches
from harness.rooms import load_room

#: A row for every layout of every entry is for `full` runs; a layout named in --impl is always taken.
DEFAULT_LAYOUTS = "HND,NHD"


def add_selection(parser: argparse.ArgumentParser, suite: str | None = "quick") -> None:
    """Add --impl, --impl-file, --layouts, --case, --suite, --case-file and --shape."""
    add_implementations(parser)
    add = parser.add_argument
    add("--case", action="append", default=[], metavar="GLOBS", help="cases, comma-separated globs over every suite's")
    add("--suite", metavar="NAME", help=f"a suite of cases (default: {suite})" if suite else "a suite of cases")
    add("--case-file", action="append", default=[], metavar="PATH", help="a JSON or TOML file of your own cases")
    add("--shape", action="append", default=[], metavar="SHAPE", help="one case, e.g. q=32,kv=8,d=128,bs=16,lens=8192x64")


def add_implementations(parser: argparse.ArgumentParser) -> None:
    """Add --impl, --impl-file and --layouts."""
    add = parser.add_argument
    add(
        "--impl",
        action="append",
        default=[],
        metavar="GLOBS",
        help="implementations, comma-separated globs, e.g. 'cuda.*,torch.gather[NHD]'",
    )
    add("--impl-file", action="append", default=[], metavar="PATH", help="a Python file with a table IMPLS of your own")
    add(
        "--layouts",
        metavar="NAMES",
        help=f"layouts besides each implementation's first, or all (default: {DEFAULT_LAYOUTS})",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:INDEX (default: the first GPU, else the CPU)")


def registry_of(arguments: argparse.Namespace) -> Registry:
    """Return the table of implementations with the user's files."""
    return default_registry(arguments.impl_file)


def entries_of(arguments: argparse.Namespace, registry: Registry, roles: Sequence[str] = ("implementation",)) -> list[Entry]:
    """Return the chosen rows: of each implementation its first layout, those of --layouts, and those named in --impl."""
    patterns = _split(arguments.impl)
    rows = registry.entries(patterns, roles)
    wanted = set(_split([arguments.layouts or DEFAULT_LAYOUTS]))
    unknown = wanted - {*LAYOUTS, "all"}
    if unknown:
        raise UsageError(f"--layouts {unknown.pop()}: no such layout; there are: {', '.join(LAYOUTS)}, or all")
    named = [pattern for pattern in patterns if "[" in pattern]
    return [
        row
        for row in rows
        if "all" in wanted
        or row.layout.name in wanted
        or row.layout is row.impl.layouts[0]
        or any(matches(str(row), pattern) for pattern in named)
    ]


def cases_of(arguments: argparse.Namespace, default_suite: str = "quick") -> tuple[str, list[Case]]:
    """Return the name of the selection, as records carry it, and its cases.

    --shape and --case-file name cases of their own; with either, and no --suite, nothing else runs.
    """
    parse = _parse()
    own = [parse.parse_shape(text) for text in arguments.shape]
    for path in arguments.case_file:
        own += parse.load_case_file(path)
    room = load_room("cases")
    patterns = _split(arguments.case)
    name, chosen = arguments.suite or "custom", own
    if arguments.suite is not None:
        chosen = [*parse.select(suite(arguments.suite), patterns), *own]
    elif patterns:
        chosen = parse.select([*own, *room.ALL.values()], patterns)
    elif not own:
        name, chosen = default_suite, list(suite(default_suite))
    _refuse_twins(chosen)
    return name, chosen


def rows_of(cases: Sequence[Case], entries: Sequence[Entry]) -> list[tuple[Case, Entry]]:
    """Return every entry on every case of its operator, case by case; raises UsageError where there is none."""
    rows = [(case, entry) for case in cases for entry in entries if entry.impl.op == case.op]
    if not rows:
        raise UsageError("none of the chosen implementations has the operator of a chosen case")
    return rows


def suite(name: str) -> Sequence[Case]:
    """Return a suite's cases; raises UsageError with the nearest names."""
    suites: dict[str, Sequence[Case]] = load_room("cases").SUITES
    if name not in suites:
        raise UsageError(f"no suite {name!r}{nearest(name, suites)}")
    return suites[name]


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return --set NAME=VALUE as a mapping; a value that is a whole number becomes one."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals or not value:
            raise UsageError(f"--set must read NAME=VALUE (got {setting!r})")
        try:
            found[name] = int(value)
        except ValueError:
            found[name] = value
    return found


def apply_settings(settings: Mapping[str, Any], entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with the parameters that each declares; raises UsageError for one that no entry declares."""
    declared = {name for entry in entries for name in entry.impl.params}
    for name in settings:
        if name not in declared:
            known = ", ".join(sorted(declared)) or "none"
            raise UsageError(f"--set {name}: no chosen implementation declares it; declared are: {known}")
    return [
        dataclasses.replace(entry, params={name: settings[name] for name in entry.impl.params if name in settings})
        for entry in entries
    ]


def _refuse_twins(cases: Sequence[Case]) -> None:
    seen: set[str] = set()
    for case in cases:
        if case.name in seen:
            raise UsageError(f"two cases are named {case.name!r}; rename yours")
        seen.add(case.name)


def _split(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _parse() -> Any:
    load_room("cases")
    import importlib

    return importlib.import_module("cases.parse")

"""Options that say what to run on: implementations, cases, device. Shared by the commands and the pytest plugin."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.names import UsageError, filled, nearest, split_names, text_of
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
    what = "cpu, cuda or cuda:INDEX (default: the first GPU, else the CPU)"
    parser.add_argument("--device", type=text_of, metavar="NAME", help=what)


def registry_of(arguments: argparse.Namespace) -> Registry:
    """Return the table of implementations with the user's files."""
    return default_registry(arguments.impl_file)


def entries_of(arguments: argparse.Namespace, registry: Registry, roles: Sequence[str] = ("implementation",)) -> list[Entry]:
    """Return the chosen rows: of each implementation its first layout, those of --layouts, and those named in --impl."""
    patterns = split_names("--impl", arguments.impl)
    rows = registry.entries(patterns, roles)
    wanted = layouts_of(arguments.layouts)
    named = [pattern for pattern in patterns if "[" in pattern]
    return [
        row
        for row in rows
        if "all" in wanted
        or row.layout.name in wanted
        or row.layout is row.impl.layouts[0]
        or any(matches(str(row), pattern) for pattern in named)
    ]


def layouts_of(text: str | None) -> set[str]:
    """Return the names of --layouts, "all" among them perhaps; None is the default."""
    wanted = set(split_names("--layouts", [DEFAULT_LAYOUTS if text is None else text]))
    unknown = wanted - {*LAYOUTS, "all"}
    if unknown:
        raise UsageError(f"--layouts {unknown.pop()}: no such layout; there are: {', '.join(LAYOUTS)}, or all")
    return wanted


def cases_of(arguments: argparse.Namespace, default_suite: str = "quick") -> tuple[str, list[Case]]:
    """Return the name of the selection, as records carry it, and its cases.

    --shape and --case-file name cases of their own; with either, and no --suite, nothing else runs.
    """
    parse = _parse()
    own = [parse.parse_shape(filled("--shape", text)) for text in arguments.shape]
    for path in arguments.case_file:
        own += cases_in(path)
    room = load_room("cases")
    _refuse_taken(own, room.ALL)
    patterns = split_names("--case", arguments.case)
    name, chosen = arguments.suite or "custom", own
    if arguments.suite is not None:
        chosen = [*parse.select(suite(filled("--suite", arguments.suite)), patterns), *own]
    elif patterns:
        chosen = parse.select([*own, *room.ALL.values()], patterns)
    elif not own:
        name, chosen = default_suite, list(suite(default_suite))
    return name, _without_twins(chosen)


def cases_in(path: str) -> Sequence[Case]:
    """The cases of a file of --case-file; raises UsageError, naming it, where it cannot be read."""
    cases: Sequence[Case] = _parse().load_case_file(filled("--case-file", path))
    return cases


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


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """Return --set NAME=VALUE as a mapping; raises UsageError for what reads otherwise, and for a name given twice."""
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals or not value:
            raise UsageError(f"--set must read NAME=VALUE (got {setting!r})")
        if name in found:
            raise UsageError(f"--set {name} is given twice ({found[name]} and {value}); `pagedbench tune` tries several")
        found[name] = value
    return found


def apply_settings(settings: Mapping[str, str], entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with the parameters that each declares; raises UsageError for one that no entry declares.

    Declared values are those worth trying, not all there are: a number must be of their type and at least the smallest of
    them, and how far it may go the entry itself knows. A word must be one of theirs.
    """
    declared = {name for entry in entries for name in entry.impl.params}
    for name in settings:
        if name not in declared:
            known = ", ".join(sorted(declared)) or "none"
            raise UsageError(f"--set {name}: no chosen implementation declares it; declared are: {known}")
    return [
        dataclasses.replace(
            entry, params={name: _setting(entry, name, settings[name]) for name in entry.impl.params if name in settings}
        )
        for entry in entries
    ]


def _setting(entry: Entry, name: str, text: str) -> Any:
    """Return the value that `text` spells, of the type of the values that the entry declares."""
    values = entry.impl.params[name]
    spelled = {str(value): value for value in values}
    if text in spelled:
        return spelled[text]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    rule = "must be one of them"
    if len(numbers) == len(values):
        whole = all(isinstance(value, int) for value in numbers)
        rule = f"must be a {'whole number' if whole else 'number'} of at least {min(numbers)}"
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if min(numbers) <= value < math.inf:
            return value
    told = ", ".join(spelled)
    raise UsageError(f"--set {name}={text}: {entry.impl.name} declares {told}; a value {rule} (got {text!r})")


def _refuse_taken(own: Sequence[Case], known: Mapping[str, Case]) -> None:
    """Results are kept by name and told apart by digest: a name of the suites' cases must not come to mean another."""
    for case in own:
        if case.name in known and known[case.name].digest != case.digest:
            told = f"its digest is {known[case.name].digest}, yours has {case.digest}"
            raise UsageError(f"case {case.name!r} is built in, and is another ({told}); rename yours")


def _without_twins(cases: Sequence[Case]) -> list[Case]:
    """Each case once; raises UsageError where two that differ have one name."""
    found: dict[str, Case] = {}
    for case in cases:
        if found.setdefault(case.name, case).digest != case.digest:
            raise UsageError(f"two cases are named {case.name!r}; rename yours")
    return list(found.values())


def _parse() -> Any:
    load_room("cases")
    import importlib

    return importlib.import_module("cases.parse")

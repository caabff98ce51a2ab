"""`list`: what there is. Imports neither torch nor cuda, unless resources are asked for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from harness.commands.selection import add_selection, cases_of, entries_of, registry_of
from harness.names import UsageError
from harness.registry import ROLES, Impl
from harness.rooms import load_room
from harness.words import printable

#: the options that choose rows, none of which a kernel's builds know
CHOICES = ("impl", "impl_file", "layouts", "case", "suite", "case_file", "shape")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add_selection(parser, suite=None)
    parser.add_argument(
        "--resources", action="store_true", help="registers, shared memory and spills of each CUDA kernel, by target"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print implementations and suites; cases too where some are chosen."""
    if arguments.resources:
        given = [name for name in CHOICES if getattr(arguments, name)]
        if given:
            option = "--" + given[0].replace("_", "-")
            raise UsageError(f"--resources shows every kernel of this repository; leave {option} out")
        return _resources(arguments)
    registry = registry_of(arguments)
    entries = entries_of(arguments, registry, roles=ROLES)
    impls = list({entry.impl.name: entry.impl for entry in entries}.values())
    chosen = arguments.suite is not None or arguments.case or arguments.case_file or arguments.shape
    cases = cases_of(arguments)[1] if chosen else []
    room = load_room("cases")
    if arguments.json:
        print(
            json.dumps(
                {
                    "implementations": [_impl_json(impl) for impl in impls],
                    "suites": {name: [case.name for case in suite] for name, suite in room.SUITES.items()},
                    "cases": [{**case.to_json(), "digest": case.digest} for case in cases],
                }
            )
        )
        return 0
    _print(
        [(i.name, i.op, ",".join(map(str, i.layouts)), ",".join(i.devices), i.note) for i in impls],
        ("implementation", "operator", "layouts", "devices", "what"),
    )
    print()
    _print([(name, len(suite), room.SUITE_NOTES[name]) for name, suite in room.SUITES.items()], ("suite", "cases", "what"))
    if cases:
        print()
        _print([(case.name, case.op, case.digest, f"{_work(case)}") for case in cases], ("case", "operator", "digest", "moves"))
    else:
        print("\nCases of a suite: pagedbench list --suite NAME")
    return 0


def _impl_json(impl: Impl) -> dict[str, Any]:
    return {
        "name": impl.name,
        "op": impl.op,
        "layouts": [str(layout) for layout in impl.layouts],
        "devices": impl.devices,
        "role": impl.role,
        "params": {name: list(values) for name, values in impl.params.items()},
        "note": impl.note,
    }


def _work(case: Any) -> str:
    return f"{case.traffic_bytes / 1e6:,.1f} MB"


def _print(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> None:
    """A plain table; tabulate would cost a tenth of a second to import."""
    texts = [[printable(cell) for cell in row] for row in [headers, *rows]]  # a note is its author's
    widths = [max(len(row[column]) for row in texts) for column in range(len(headers))]
    for row in texts:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _resources(arguments: argparse.Namespace) -> int:
    """Compile every kernel's default builds for every target and print what each takes."""
    load_room("impls")
    import importlib

    page = importlib.import_module("impls.cuda.builds")
    table = [{"target": arch, **kernel} for arch in page.ARCHS for kernel in page.resources(arch)]
    if arguments.json:
        print(json.dumps(table))
        return 0
    columns = ("target", "registers", "shared_bytes", "dynamic_bytes", "spill_bytes", "stack_bytes", "build")
    _print([[row[column] for column in columns] for row in table], columns)
    return int(any(row["spill_bytes"] for row in table))

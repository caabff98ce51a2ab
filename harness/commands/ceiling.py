"""`ceiling`: how fast the readers read the blocks of cases: the speed of light for what reads them and computes, too."""

from __future__ import annotations

import argparse

from harness.commands.run import add_how, execute
from harness.commands.selection import add_selection, cases_of, entries_of, registry_of
from harness.commands.tune import print_best


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add_selection(parser, suite="context")
    add_how(parser)


def main(arguments: argparse.Namespace) -> int:
    """Measure every reader in each layout with each combination of its parameters; the best of each is printed."""
    registry = registry_of(arguments)
    readers = [variant for entry in entries_of(arguments, registry, roles=("reader",)) for variant in entry.variants()]
    suite, cases = cases_of(arguments, default_suite="context")
    return execute(arguments, registry, suite, [case for case in cases if case.op == "attention"], readers, print_best)

"""`tune`: every combination of an entry's declared parameters, measured side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from harness.commands.run import add_how, execute
from harness.commands.selection import add_selection, cases_of, entries_of, registry_of
from harness.names import UsageError
from harness.record import Record


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add_selection(parser)
    add_how(parser)


def main(arguments: argparse.Namespace) -> int:
    """Measure all combinations and print, a case each, the best of each row and how far behind the default is."""
    registry = registry_of(arguments)
    entries = [entry for entry in entries_of(arguments, registry) if entry.impl.params]
    if not entries:
        raise UsageError("none of the chosen implementations declares a parameter; `pagedbench list --json` shows which do")
    suite, cases = cases_of(arguments)
    return execute(
        arguments, registry, suite, cases, [variant for entry in entries for variant in entry.variants()], print_best
    )


def print_best(records: Sequence[Record]) -> None:
    """Print one line for each case and row: the best parameters, and what the default (measured first) takes."""
    from tabulate import tabulate

    from harness.report.units import percent, rate_scale, time_scale

    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.case, record.row), []).append(record)
    times = time_scale(records[0].device_kind if records else "cpu", [r.launch_s.median for r in records if r.launch_s])
    rates = rate_scale(records[0].device_kind if records else "cpu")
    lines = []
    for (case, row), tried in groups.items():
        timed = [(record.launch_s.median, record) for record in tried if record.launch_s]
        if not timed:
            lines.append([case, row, tried[0].status, tried[0].reason, "", ""])
            continue
        seconds, best = min(timed, key=lambda pair: pair[0])
        settings = " ".join(f"{name}={value}" for name, value in best.params.items())
        default = percent(timed[0][0] / seconds) if timed[0][1] is tried[0] else tried[0].status
        rate = rates.show(best.traffic_bytes / seconds if best.traffic_bytes else None)
        lines.append([case, row, times.show(seconds), rate, settings, default])
    headers = ["case", "row", times.unit, rates.unit, "best parameters", "default's time"]
    print(tabulate(lines, headers=headers, disable_numparse=True))

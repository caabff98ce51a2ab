"""`ceiling`: how fast this device reads blocks that lie anywhere: the speed of light for what reads them and computes, too.

Without cases it is a sweep over bytes, chunks and layouts, whose best is kept for the device under results/ceilings; a part of
it, as in `--suite ceiling --case 'ceiling.nhd.*'`, replaces that part of what is kept. In a sweep all readers are tried on each
case by one visit, and the best two are visited as rows are; on named cases, and of named readers, all are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.ceilings import Read, fastest_readers, load_ceilings, save_ceilings
from harness.commands.run import add_how, execute
from harness.commands.selection import add_selection, cases_of, entries_of, registry_of
from harness.commands.tune import print_best
from harness.machine import devices_of
from harness.names import UsageError
from harness.ops.case import Case
from harness.record import Record
from harness.registry import Entry
from harness.words import printable

SWEEP = "ceiling"


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add_selection(parser, suite="the sweep")
    add_how(parser)
    parser.add_argument("--again", action="store_true", help="measure the sweep again where it is known already")


def main(arguments: argparse.Namespace) -> int:
    """Measure the readers with each combination of their parameters on cases, or the sweep where none is named.

    What is known of the device is printed without measuring, unless --again is given.
    """
    chosen = arguments.suite is not None or arguments.case or arguments.case_file or arguments.shape
    some_readers = arguments.impl or arguments.impl_file or arguments.layouts
    is_sweep = arguments.suite == SWEEP or not chosen
    if arguments.again and not is_sweep:
        raise UsageError("--again measures the sweep again; leave --case, --suite, --case-file and --shape out")
    if not (chosen or some_readers or arguments.again) and _print_known(arguments):
        return 0
    registry = registry_of(arguments)
    readers = [variant for entry in entries_of(arguments, registry, roles=("reader",)) for variant in entry.variants()]
    suite, cases = cases_of(arguments, default_suite=SWEEP)
    attention = [case for case in cases if case.op == "attention"]
    if not is_sweep:
        return execute(arguments, registry, suite, attention, readers, print_best)
    if some_readers:  # their best would pass for the best of all
        return execute(arguments, registry, suite, attention, readers, print_best, takes=_is_its_layout)
    return execute(arguments, registry, suite, attention, readers, _keep, takes=_is_its_layout, sweep=True)


def _is_its_layout(case: Case, entry: Entry) -> bool:
    """A case of the sweep is named after the layout that it is read in."""
    return f".{entry.layout.name.lower()}." in case.name or not case.name.startswith(f"{SWEEP}.")


def _print_known(arguments: argparse.Namespace) -> bool:
    """Print what is known of the device, the first of several; False where nothing is, or the device is a cluster's."""
    from harness.device import find_device

    if arguments.engine != "local":
        return False
    device = arguments.device if arguments.devices is None else devices_of(arguments.devices, is_timed=True)[0]
    known, problems = load_ceilings(find_device(device).slug)
    for problem in problems:
        print(f"pagedbench: {problem}", file=sys.stderr)
    if not known:
        return False
    if arguments.json:
        for record in known:
            print(record.to_line())
    else:
        print(table(known))
        print(f"{known[0].device}, measured {known[0].started_at[:10]}; --again measures once more")
    return True


def _keep(records: Sequence[Record]) -> None:
    """Print the sweep and keep it for its device, if any of it was measured."""
    best = fastest_readers(records)
    if not best:
        print("no reader could read anything here; nothing is kept")
        return
    print(table(best))
    print(f"kept:    {printable(save_ceilings(best))}")


def table(records: Sequence[Record]) -> str:
    """The sweep as rates: a line for each layout and number of bytes, a column a chunk; beside them a launch of nothing."""
    from tabulate import tabulate

    from harness.report.units import MISSING, rate_scale, size, time_scale

    kind, reads = records[0].device_kind, [read for record in records if (read := Read.of(record)) is not None]
    rate, time = rate_scale(kind), time_scale(kind, [r.floor_s for r in records if r.floor_s])
    chunks = sorted({read.chunk_bytes for read in reads})
    lines: dict[tuple[str, int], dict[int, Read]] = {}
    for read in reads:  # bytes of tables and queries differ a little from chunk to chunk
        lines.setdefault((read.record.layout, _total(read)), {})[read.chunk_bytes] = read
    cells = [
        [layout, size(total), *(rate.show(_rate(of.get(chunk)), 3) for chunk in chunks),
         time.show(min((r.record.floor_s for r in of.values() if r.record.floor_s), default=None)) or MISSING]
        for (layout, total), of in sorted(lines.items())
    ]
    heads = ["layout", "bytes", *(f"{chunk >> 10} KB" for chunk in chunks), f"empty launch, {time.unit}"]
    return f"{rate.unit} read, by chunk\n{tabulate(cells, headers=heads, disable_numparse=True)}"


def _total(read: Read) -> int:
    """Bytes of K and V."""
    tokens: int = sum(read.record.shape["seq_lens"])
    return 2 * tokens * read.chunk_bytes // int(read.record.shape["block_size"])


def _rate(read: Read | None) -> float | None:
    return None if read is None else read.traffic_bytes / read.seconds

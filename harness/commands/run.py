"""`run`, `check`, `bench`: the main job and its halves."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.ceilings import hold_against, load_ceilings
from harness.commands.engines import add_engine, engine_of
from harness.commands.selection import (
    add_device,
    add_selection,
    apply_settings,
    cases_of,
    entries_of,
    parse_settings,
    registry_of,
    rows_of,
)
from harness.names import UsageError, path_of
from harness.ops.case import Case
from harness.options import POWER, RELATIONS, Options
from harness.record import Record
from harness.registry import Entry, Registry
from harness.resume import Begun
from harness.rooms import load_room
from harness.sanitize import TOOLS
from harness.words import printable
from harness.work import Work

if TYPE_CHECKING:
    from harness.store import Appender

RUNS = Path("results/runs")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add_selection(parser)
    add_how(parser)
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="an entry's declared parameter")
    add(
        "--relations", choices=RELATIONS, default="small",
        help="cases on which launches are held against each other: batch order, split counts, graphs, ... (default: small)",
    )
    if command == "check":
        add("--sanitize", choices=TOOLS, help="under compute-sanitizer: what it finds is wrong, a process each entry")
        add("--watched-by", choices=TOOLS, help=argparse.SUPPRESS)  # what --sanitize tells the check behind the sanitizer
    else:
        add("--power", choices=POWER, default="first", help="layouts that hold a second's window for power and energy")
    add("--resume", type=path_of, metavar="RUN", help="continue a broken run in its folder: give its other options again")


def add_how(parser: argparse.ArgumentParser) -> None:
    """Add what every command that measures takes: --device, --out, --json, --patient, engines."""
    add_device(parser)
    add = parser.add_argument
    add("--out", type=path_of, default=RUNS, metavar="DIR", help=f"where the run's folder is made (default: {RUNS})")
    add("--json", action="store_true", help="print records as lines of JSON instead of tables")
    add("--patient", action="store_true", help="also run what would take minutes on this device")
    add("--strict-peers", action="store_true", help="a peer that is wrong or fails counts for the exit code, too")
    add_engine(parser)


def main(arguments: argparse.Namespace) -> int:
    """Check and, unless the command is check, time what was chosen; returns the exit code."""
    registry = registry_of(arguments)
    entries = apply_settings(parse_settings(arguments.set), entries_of(arguments, registry))
    suite, cases = cases_of(arguments)
    with _watched_by(getattr(arguments, "watched_by", None)):
        return execute(arguments, registry, suite, cases, entries, _print_tables)


def _watched_by(tool: str | None) -> contextlib.AbstractContextManager[None]:
    """Allocations as the sanitizer around this process wants them; torch is not loaded for a process without one."""
    if tool is None:
        return contextlib.nullcontext()
    from harness.guards import watched_by

    return watched_by(tool)


def execute(
    arguments: argparse.Namespace,
    registry: Registry,
    suite: str,
    cases: Sequence[Case],
    entries: Sequence[Entry],
    show: Callable[[Sequence[Record]], None],
    takes: Callable[[Case, Entry], bool] = lambda case, entry: True,
    sweep: bool = False,
) -> int:
    """Measure `entries` on those of `cases` that they take into a new run's folder, show the records, return the exit code.

    sweep    as in Options
    """
    rows = [(case, entry) for case, entry in rows_of(cases, entries) if takes(case, entry)]
    make_engine = engine_of(arguments, registry)
    from harness.store import Appender, new_run

    broken = getattr(arguments, "resume", None)
    begun = None if broken is None else Begun.read(broken, rows, arguments.words)
    folder = new_run(arguments.out) if begun is None else begun.folder
    store = Appender(folder)
    options = Options(
        suite=suite,
        untimed=load_room("cases").UNTIMED.get(suite, ()),
        bench=arguments.command != "check",
        patient=arguments.patient,
        sweep=sweep,
        power=getattr(arguments, "power", "none"),
        relations=getattr(arguments, "relations", "small"),
    )
    work = Work(
        options=options,
        device=arguments.device,
        run=folder.name,
        impl_files=arguments.impl_file,
        rows=rows if begun is None else begun.missing(rows),
        stall_s=arguments.stall,
        only_on=None if begun is None else begun.device,
    )
    records: list[Record] = [] if begun is None else [*begun.records]
    place = {case.name: number for number, case in enumerate(cases)}
    known = functools.cache(lambda device: load_ceilings(device)[0])

    def by_place(record: Record) -> int:
        return place.get(record.case, -1)  # a resumed run may hold cases that are not asked for now

    if begun is None:
        _write_run(folder, {}, arguments)  # a run that is killed says at least what it was
    with Progress(len(work.rows), quiet=arguments.json) as progress:
        engine = make_engine(work, progress.say)
        try:
            records += keep((hold_against(known, record) for record in engine.records()), store, progress, by_place)
        finally:
            problem = _write_end(folder, engine.facts, arguments)
    if problem is not None:
        print(f"pagedbench: {printable(problem)}; {store.count} records are kept in {printable(store.path)}", file=sys.stderr)
    records.sort(key=by_place)
    _tell(records, folder, arguments, show)
    idle = why_nothing_ran(records)
    if idle is not None:
        print(f"pagedbench: {printable(idle)}", file=sys.stderr)
        return 2
    return exit_code(records, arguments.strict_peers)


def keep(found: Iterable[Record], store: Appender, progress: Progress, place: Callable[[Record], Any]) -> list[Record]:
    """Write records down as they come, and put the file in the order of their `place` at the end; closes `store`.

    Raises UsageError, which says where they are, where that is interrupted or cannot be written.
    """
    records = []
    try:
        for record in found:
            store.append(record)
            records.append(record)
            progress.step()
        store.arrange(place)
    except KeyboardInterrupt:
        raise UsageError(f"interrupted; {store.count} records are kept in {store.path}") from None
    except OSError as error:  # a full disk, say
        raise UsageError(f"{error}; {store.count} records are kept in {store.path}") from error
    finally:
        store.close()
    return records


def _tell(
    records: Sequence[Record], folder: Path, arguments: argparse.Namespace, show: Callable[[Sequence[Record]], None]
) -> None:
    from harness.report import write_report
    from harness.report.beside import of_run

    # With --json, standard output is for records alone.
    stream = sys.stderr if arguments.json else sys.stdout
    if arguments.json:
        for record in records:
            print(record.to_line())
    else:
        show(records)
    print(f"records: {printable(folder / 'records.jsonl')}", file=stream)
    if arguments.command == "run":
        beside, problems = of_run(folder, records)
        for problem in problems:
            print(f"pagedbench: {problem}", file=sys.stderr)
        try:
            made = write_report(records, folder, beside)
        except OSError as error:
            kept = f"all {len(records)} records are kept in {folder / 'records.jsonl'}"
            raise UsageError(f"no report: {error}; {kept}") from error
        for path in made:
            print(f"report:  {printable(path)}", file=stream)


def _print_tables(records: Sequence[Record]) -> None:
    from harness.report import terminal_table

    print(terminal_table(records))


def exit_code(records: Sequence[Record], strict_peers: bool = False) -> int:
    """1 where something of ours is wrong, failed or timed out; peers count only when told so, controls never."""
    bad = [record for record in records if record.status in ("wrong", "failed", "timeout") and record.role == "implementation"]
    return int(any(strict_peers or not record.impl.startswith("peer.") for record in bad))


def why_nothing_ran(records: Sequence[Record]) -> str | None:
    """What to say where no row was even tried, which must not pass for good; else None."""
    if any(record.status not in ("unsupported", "skipped") for record in records):
        return None
    from harness.report import summary_line

    reasons = collections.Counter(record.reason for record in records).most_common(1)
    often = "".join(f"; {count} of {len(records)} rows: {reason}" for reason, count in reasons)
    return f"nothing ran: {summary_line(records)}{often}"


def _write_run(folder: Path, facts: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """run.json: what a record does not repeat."""
    from harness.store import FACTS, write_json

    write_json(folder / FACTS, {"run": folder.name, "command": arguments.command, "arguments": arguments.words, **facts})


def _write_end(folder: Path, facts: Mapping[str, Any], arguments: argparse.Namespace) -> OSError | None:
    """run.json of a run that has ended, however it has; what stands in the way is returned, not to hide why it ended."""
    if not facts:
        return None
    try:
        _write_run(folder, {"ended_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **facts}, arguments)
    except OSError as error:
        return error
    return None


class Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        self._bar: Any = None
        if sys.stderr.isatty() and not quiet:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="row", leave=False, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def say(self) -> Callable[[str], None]:
        """Shows what is being done now."""
        return self._say

    def _say(self, doing: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(doing[:60], refresh=False)
            self._bar.refresh()

    def step(self) -> None:
        """One row is settled."""
        if self._bar is not None:
            self._bar.update(1)

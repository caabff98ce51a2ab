"""`compare`: two runs, or a run against the device's baseline. docs/regressions.md says how it judges.

Exit codes: 0 nothing to worry about; 1 something is SLOWER or WRONG; 2 wrong usage, or nothing could be compared;
3 neither, but something is UNSURE or MISSING.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.baseline import BASELINES, load_baseline
from harness.commands.run import RUNS
from harness.commands.selection import add_device, layouts_of, registry_of
from harness.compare import ACROSS_GPUS, THRESHOLD, Judged, judge, unjudged
from harness.costs import grown
from harness.groups import GROUPS, groups
from harness.match import latest, match, settings
from harness.names import UsageError, path_of, split_names
from harness.pytest_json import load_pytest_json
from harness.record import Record
from harness.registry import matches
from harness.report import units, verdicts
from harness.store import Appender, load, new_run, run_of, write_json, write_whole
from harness.words import printable


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("runs", nargs="+", type=path_of, metavar="RUN", help="old and new: folders, .jsonl files or pytest-benchmark's .json; "
        "one alone is held against its device's baseline")  # fmt: skip
    add("--impl", action="append", default=[], metavar="GLOBS", help="only these implementations")
    add("--case", action="append", default=[], metavar="GLOBS", help="only these cases")
    add("--layouts", metavar="NAMES", help="only these layouts, each implementation's first, and those named in --impl, as in "
        "`run` (default: all)")  # fmt: skip
    add_judging(parser)
    add("--baselines", type=path_of, default=BASELINES, metavar="DIR", help=f"where baselines are (default: {BASELINES})")
    add("--rerun-unsure", action="store_true", help="measure the new run's UNSURE rows again, here and now")
    add_device(parser)
    add("--impl-file", action="append", default=[], metavar="PATH", help="for --rerun-unsure: a file with a table IMPLS")
    add("--runs-dir", type=path_of, default=RUNS, metavar="DIR", help=f"for --rerun-unsure: where it goes (default: {RUNS})")


def add_judging(parser: argparse.ArgumentParser) -> None:
    """Add what decides over verdicts and how they are told."""
    add = parser.add_argument
    shares = ", ".join(f"{100 * share:g}%% on {kind}" for kind, share in THRESHOLD.items())
    shares += f", {100 * ACROSS_GPUS:g}%% between two GPUs of a kind"
    add("--threshold", type=share_of, metavar="SHARE", help=f"a difference within it is none, e.g. 2%% (default: {shares})")
    add("--group", choices=GROUPS, help="one verdict an implementation: its worst row's, or its geometric mean's")
    add("--strict-peers", action="store_true", help="peers count for the exit code, too")
    add("--json", action="store_true", help="print the comparison as JSON")
    add("--out", type=path_of, metavar="DIR", help="where summary.md and comparison.json go (default: beside the new run)")


def share_of(text: str) -> float:
    """Read "2%" or "0.02"; raises ArgumentTypeError for what is no share between 0 and 1."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 2% or 0.02 (got {text!r})")
    return value


def main(arguments: argparse.Namespace) -> int:
    """Compare, tell, and return the exit code."""
    if len(arguments.runs) > 2:
        raise UsageError(f"compare takes one run or two (got {len(arguments.runs)})")
    arguments.runs = [run_of(run) for run in arguments.runs]
    new = chosen(read(arguments.runs[-1]), arguments)
    if len(arguments.runs) == 2:
        old, whose = chosen(read(arguments.runs[0]), arguments), str(arguments.runs[0])
    else:
        old, whose = _baseline(new, arguments)
    comparison = _compare(old, new, whose, arguments)
    if arguments.rerun_unsure and comparison.counts["UNSURE"]:
        again = _rerun([row for row in comparison.judged if row.verdict == "UNSURE"], arguments)
        replaced = {(record.key, settings(record)) for record in again}
        kept = [record for record in new if (record.key, settings(record)) not in replaced]
        comparison = _compare(old, [*kept, *again], whose, arguments)
        told = f"UNSURE at first, and measured again: {units.count(len(again), 'row')}."
        comparison = dataclasses.replace(comparison, notes=[told, *comparison.notes])
    if idle := _idle(arguments, [*old, *new]):
        told = f"Nothing on either side is chosen by {', '.join(idle)}."
        comparison = dataclasses.replace(comparison, notes=[told, *comparison.notes])
    return tell(comparison, arguments, arguments.runs[-1])


def _idle(arguments: argparse.Namespace, records: Sequence[Record]) -> list[str]:
    """Globs of --impl and --case that choose none of the records, misspelt perhaps."""
    names = {
        "--impl": {name for record in records for name in (record.impl, record.row)},
        "--case": {record.case for record in records},
    }
    asked = [(option, glob) for option in names for glob in split_names(option, getattr(arguments, option[2:]))]
    return [f"{option} {glob}" for option, glob in asked if not any(matches(name, glob) for name in names[option])]


def read(path: Path) -> list[Record]:
    """Records of a run or of pytest-benchmark's JSON; what was skipped is told. UsageError where there are none."""
    if path.suffix == ".json":
        records: list[Record] = load_pytest_json(path)
        if any(record.launch_s and len(record.launch_s.samples) == 1 for record in records):
            _warn([f"{path}: rows with one round, or saved without their rounds, are UNSURE; --benchmark-save-data keeps them"])
    else:
        records, problems = load(run_of(path))
        _warn(problems)
    if not records:
        raise UsageError(f"{path} holds no records")
    return records


def _warn(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"pagedbench: {problem}", file=sys.stderr)


def chosen(records: Sequence[Record], arguments: argparse.Namespace) -> list[Record]:
    """The records that --impl, --case and --layouts choose; UsageError where that is none."""
    impls, cases = split_names("--impl", arguments.impl), split_names("--case", arguments.case)
    found = [
        record
        for record in records
        if (not impls or any(matches(name, glob) for glob in impls for name in (record.impl, record.row)))
        and (not cases or any(matches(record.case, glob) for glob in cases))
    ]
    found = _of_layouts(found, impls, arguments)
    if not found:
        raise UsageError(f"--impl, --case and --layouts choose none of {len(records)} records")
    return found


def _of_layouts(records: Sequence[Record], impls: Sequence[str], arguments: argparse.Namespace) -> list[Record]:
    """Those that `run` would have measured with the same --layouts; what is in no table any more stays, and is missed."""
    wanted = {"all"} if arguments.layouts is None else layouts_of(arguments.layouts)
    first = {} if "all" in wanted else {impl.name: impl.layouts[0].name for impl in registry_of(arguments)}
    named = [glob for glob in impls if "[" in glob]
    return [
        record
        for record in records
        if "all" in wanted
        or record.layout in wanted
        or record.layout == first.get(record.impl, record.layout)
        or any(matches(record.row, glob) for glob in named)
    ]


def _baseline(new: Sequence[Record], arguments: argparse.Namespace) -> tuple[list[Record], str]:
    """The baselines of the run's devices; rows that the run never asked about are told apart by --impl and --case."""
    records: list[Record] = []
    devices = sorted({record.device for record in new})
    for device in devices:
        found, problems = load_baseline(device, arguments.baselines)
        _warn(problems)
        records += found
    return chosen(records, arguments), f"the baseline of {' and '.join(devices)}"


def _compare(
    old: Sequence[Record], new: Sequence[Record], whose: str, arguments: argparse.Namespace
) -> verdicts.Comparison:
    made = compared(old, new, (whose, str(arguments.runs[-1])), arguments.threshold, arguments.group)
    return dataclasses.replace(made, strict_peers=arguments.strict_peers)


def compared(
    old: Sequence[Record], new: Sequence[Record], names: tuple[str, str], threshold: float | None, group: str | None
) -> verdicts.Comparison:
    """Hold two runs against each other; `names` is what each is called. UsageError where no row of them meets."""
    matched = match(old, new)
    if not any(pair.old and pair.new for pair in matched.pairs):
        why = next((pair.why for pair in matched.pairs if pair.why), "there are no rows")
        raise UsageError(f"nothing to compare: no row of {names[1]} meets one of {names[0]} ({why})")
    judged = judge(matched.pairs, threshold)
    repeats = f"Left out: {units.count(matched.repeats, 'line')} of controls, or of rows that have a later line."
    return verdicts.Comparison(
        old=names[0],
        new=names[1],
        judged=judged,
        growths=grown(matched.pairs),
        groups=groups(judged, group, threshold) if group else None,
        unjudged=unjudged(matched.pairs),
        threshold=threshold,
        notes=[repeats] if matched.repeats else [],
    )


def _rerun(rows: Sequence[Judged], arguments: argparse.Namespace) -> list[Record]:
    """Measure rows again, in a run's folder of their own; the fresh record takes the place of the old one."""
    from harness.rerun import rerun

    records = latest([row.pair.new for row in rows if row.pair.new])
    if len({record.device for record in records}) > 1:
        raise UsageError("--rerun-unsure: the rows are of several devices; compare one device's at a time")
    folder = new_run(arguments.runs_dir)
    store = Appender(folder)
    made = []
    print(f"measuring {len(records)} UNSURE rows again, into {printable(store.path)}", file=sys.stderr)
    try:
        for record in rerun(records, registry_of(arguments), folder.name, arguments.device, arguments.impl_file):
            store.append(record)
            made.append(record)
    finally:
        store.close()
    return made


def write(comparison: verdicts.Comparison, arguments: argparse.Namespace, run: Path) -> Path:
    """Write summary.md and comparison.json; returns where the summary is."""
    folder: Path = arguments.out or (run if run.is_dir() else run.parent)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "summary.md", verdicts.markdown(comparison))
    write_json(folder / "comparison.json", verdicts.plain_data(comparison))
    return folder / "summary.md"


def tell(comparison: verdicts.Comparison, arguments: argparse.Namespace, run: Path) -> int:
    """Print a comparison, write it down, and return the exit code. UsageError where no row of it has a verdict."""
    summary = write(comparison, arguments, run)
    if not comparison.judged:
        why = ", ".join(f"{units.count(number, 'row')} {why}" for why, number in comparison.unjudged.items())
        raise UsageError(f"nothing to judge between {comparison.old} and {comparison.new}: {why or 'there are no rows'}")
    if arguments.json:
        print(json.dumps(verdicts.plain_data(comparison), indent=1))
    else:
        print(verdicts.terminal(comparison))
        print(f"summary: {summary}")
    return comparison.exit_code

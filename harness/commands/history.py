"""`history add RUN`, `history show`: what each row took over the revisions, and which revision changed it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.baseline import baseline_of
from harness.commands.compare import share_of
from harness.compare import THRESHOLD
from harness.history import HISTORY, Point, Series, add, by_series, history_of, points, read
from harness.names import UsageError, path_of, split_names, text_of
from harness.registry import matches
from harness.report.trends import step_words, steps_in
from harness.steps import FALSE_ALARMS, Step
from harness.store import load, run_of


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add both actions with their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    adding = actions.add_parser("add", help="append a run's timed rows to its device's history", allow_abbrev=False)
    adding.add_argument("run", nargs="+", type=path_of, help="runs' folders or .jsonl files, oldest first")
    showing = actions.add_parser("show", help="every row's level, and the steps in it", allow_abbrev=False)
    option = showing.add_argument
    option("--device", type=text_of, metavar="SLUG", help="whose history, e.g. nvidia-h200 (default: the only one there is)")
    option("--impl", action="append", default=[], metavar="GLOBS", help="only these implementations")
    option("--case", action="append", default=[], metavar="GLOBS", help="only these cases")
    option("--false-alarms", type=share_of, default=FALSE_ALARMS, metavar="SHARE",
           help="probability that a history without any step shows one (default: %(default)s)")  # fmt: skip
    shares = ", ".join(f"{100 * share:g}%% on {kind}" for kind, share in THRESHOLD.items())
    option("--threshold", type=share_of, metavar="SHARE", help=f"leave out smaller steps (default: {shares})")
    option("--json", action="store_true", help="print series and steps as JSON")
    for action in (adding, showing):
        action.add_argument("--history", type=path_of, default=HISTORY, metavar="DIR", help=f"default: {HISTORY}")


def main(arguments: argparse.Namespace) -> int:
    """Add or show; a step found is no error."""
    return _add(arguments) if arguments.action == "add" else _show(arguments)


def _add(arguments: argparse.Namespace) -> int:
    for run in arguments.run:
        records, problems = load(run_of(run))
        _warn(problems)
        new = points(records)
        if not new:
            raise UsageError(f"{run} has no time of any row")
        for device in sorted({point.device for point in new}):
            baseline_of(device)  # refuses what is no device's name
            file = history_of(device, arguments.history)
            mine = [point for point in new if point.device == device]
            added = add(file, mine)
            known = f", {len(mine) - added} were there already" if added < len(mine) else ""
            print(f"{file}: {added} rows of {run} added{known}")
    return 0


def _warn(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"pagedbench: {problem}", file=sys.stderr)


def _show(arguments: argparse.Namespace) -> int:
    found, problems = read(_file(arguments))
    _warn(problems)
    series = {key: line for key, line in by_series(found).items() if _is_chosen(line[-1], arguments)}
    if not series:
        raise UsageError(f"--impl and --case choose none of {len(by_series(found))} rows")
    # Each series gets its part of the allowance, so that the whole page keeps it.
    level = arguments.false_alarms / len(series)
    steps = {key: steps_in(line, level, arguments.threshold) for key, line in series.items()}
    if arguments.json:
        print(json.dumps([_data(line, steps[key]) for key, line in series.items()], indent=1))
    else:
        print(_table(series, steps))
    return 0


def _file(arguments: argparse.Namespace) -> Path:
    if arguments.device:
        return history_of(arguments.device, arguments.history)
    files: list[Path] = sorted(arguments.history.glob("*.jsonl"))
    if len(files) != 1:
        there = ", ".join(file.stem for file in files) or "none; `pagedbench history add RUN` begins one"
        raise UsageError(f"--device must name one of the histories under {arguments.history}: {there}")
    return files[0]


def _is_chosen(point: Point, arguments: argparse.Namespace) -> bool:
    impls, cases = split_names("--impl", arguments.impl), split_names("--case", arguments.case)
    names = (point.impl, f"{point.impl}[{point.layout}]")
    return (not impls or any(matches(name, glob) for glob in impls for name in names)) and (
        not cases or any(matches(point.case, glob) for glob in cases)
    )


def _table(series: Mapping[Series, Sequence[Point]], steps: Mapping[Series, Sequence[Step]]) -> str:
    """A line a row, and below it a line a step."""
    from tabulate import tabulate

    from harness.report.units import time_scale

    lines, told = [], []
    for key, line in series.items():
        scale = time_scale(line[0].device_kind, [point.launch_s for point in line])
        first, last = (f"{scale.show(point.launch_s)} {scale.unit}" for point in (line[0], line[-1]))
        lines.append([line[-1].label, len(line), first, last, len(steps[key])])
        told += [f"{line[-1].label}: {step_words(line, step)}" for step in steps[key]]
    heads = ["row", "runs", "first", "last", "steps"]
    table: str = tabulate(lines, headers=heads, disable_numparse=True)
    return "\n".join([table, *(told or ["no step in any row"])])


def _data(line: Sequence[Point], steps: Sequence[Step]) -> dict[str, Any]:
    last = line[-1]
    who = {name: getattr(last, name) for name in ("case", "case_digest", "impl", "layout", "device")}
    runs = [{"run": p.run, "revision": p.revision, "started_at": p.started_at, "launch_s": p.launch_s, "gpu": p.unit}
            for p in line]  # fmt: skip
    found = [
        {"run": line[step.at].run, "revision": line[step.at].revision, "before": line[step.at - 1].revision,
         "ratio": step.ratio, "probability": step.probability}
        for step in steps
    ]  # fmt: skip
    return {**who, "params": dict(last.params), "runs": runs, "steps": found}

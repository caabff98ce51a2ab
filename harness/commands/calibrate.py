"""`calibrate`: measure the gate's false alarms and misses on this device, and what each case can show.

Exit codes: 0 every goal that could be judged was reached, 1 one was not, 2 error. calibration.json is written after each
repeat, and when the run is broken off (exit code 2), of the trials that have had all their rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.calibrate import GOALS, SHARES, Calibration, Score, Trial, held, score
from harness.commands.ab import add_rounds, require_visits, setup_of
from harness.commands.compare import share_of
from harness.commands.run import RUNS, Progress
from harness.commands.selection import add_device, add_selection, cases_of, entries_of, registry_of, rows_of
from harness.duel import Duel, Match
from harness.names import UsageError, count_of, path_of
from harness.store import run_folder, write_json
from harness.trees import Side

KEPT = "calibration.json"


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add_selection(parser)
    add_device(parser)
    add_rounds(parser)
    add("--repeats", type=count_of, default=1, metavar="N", help="trials of each row and share (default: %(default)s)")
    shares = ",".join(f"{100 * share:g}%%" for share in SHARES)
    add("--shares", metavar="SHARES", help=f"slowdowns to try; 0%% is none (default: {shares})")
    add("--threshold", type=share_of, metavar="SHARE", help="as of `compare`")
    add("--json", action="store_true", help="print the result as JSON")
    add("--runs-dir", type=path_of, default=RUNS, metavar="DIR", help=f"where the run's folder is made (default: {RUNS})")


def main(arguments: argparse.Namespace) -> int:
    """Measure, print tables by case and the goals, keep calibration.json, and return the exit code."""
    require_visits(arguments)
    shares = _shares(arguments.shares)
    _, cases = cases_of(arguments)
    rows = rows_of(cases, entries_of(arguments, registry_of(arguments)))
    calibration = Calibration(shares, arguments.rounds, arguments.visits)
    turns = arguments.repeats * arguments.rounds
    steps = turns * len({case.name for case, _ in rows})
    with run_folder(arguments.runs_dir) as folder, Progress(steps, quiet=arguments.json) as progress:

        def say(doing: str) -> None:
            progress.say(doing)
            progress.step()

        def keep(turn: int) -> None:
            if (turn + 1) % arguments.rounds == 0:
                _keep(arguments, calibration, duel, folder)

        same = Side(impl_files=arguments.impl_file)
        matches = [Match(case=case, entries=(entry, entry)) for case, entry in rows]
        duel = Duel(setup_of(arguments, folder.name, (same, same)), matches, say)
        try:
            duel.run(turns, calibration.play, keep)
        except (KeyboardInterrupt, UsageError) as end:
            raise _broken_off(end, arguments, calibration, duel, folder) from None
    trials, goals = _keep(arguments, calibration, duel, folder)
    if not trials:
        raise UsageError(f"no row could be measured: {_why_not(duel)}")
    print(json.dumps(_data(trials, goals, duel, 0), indent=1) if arguments.json else _told(trials, goals, folder))
    return int(any(reached is False for _, reached in goals))


def _keep(
    arguments: argparse.Namespace, calibration: Calibration, duel: Duel, folder: Path
) -> tuple[list[Trial], list[tuple[str, bool | None]]]:
    """Write what there is so far, if there is any, and return it: trials and goals."""
    trials = calibration.trials(duel, arguments.threshold)
    if not trials:
        return [], []
    goals = held(trials, GOALS[duel.facts[0]["device"]["kind"]])
    write_json(folder / KEPT, _data(trials, goals, duel, calibration.missing(duel, arguments.repeats)))
    return trials, goals


def _broken_off(
    end: BaseException, arguments: argparse.Namespace, calibration: Calibration, duel: Duel, folder: Path
) -> UsageError:
    """Keep what there is of a run that ends before its time, and return the line that says so."""
    why, missing = str(end) or "interrupted", calibration.missing(duel, arguments.repeats)
    trials, _ = _keep(arguments, calibration, duel, folder)
    if not trials:
        return UsageError(f"{why}; no trial was complete" if isinstance(end, KeyboardInterrupt) else why)
    return UsageError(f"{why}; {missing} trials were not complete; the {len(trials)} that were are kept in {folder / KEPT}")


def _shares(text: str | None) -> tuple[float, ...]:
    """Read "0%,2%"; 0 is allowed here, where nothing is to differ."""
    if text is None:
        return SHARES
    try:
        return tuple(dict.fromkeys(0.0 if part.strip() in ("0", "0%") else share_of(part.strip()) for part in text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--shares {text}: {error}") from error


def _why_not(duel: Duel) -> str:
    reasons = dict.fromkeys(
        f"{record.status}: {record.reason}" for sides in duel.records.values() for side in sides for record in side
    )
    return "; ".join(list(reasons)[:3])


def _by_row(trials: Sequence[Trial]) -> dict[tuple[str, str], list[Trial]]:
    rows: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        rows.setdefault((trial.record.case, trial.record.row), []).append(trial)
    return rows


def _told(trials: Sequence[Trial], goals: Sequence[tuple[str, bool | None]], folder: Path) -> str:
    """A line a row: alarms, catches by share with the slowdown measured, and the smallest slowdown shown; then the goals."""
    from tabulate import tabulate

    from harness.report.units import MICROSECONDS

    shares = sorted({trial.share for trial in trials if trial.share > 0})
    lines = []
    for (case, row), some in _by_row(trials).items():
        found = score(some)
        caught = [_caught(found, share) for share in shares]
        shown = "none of them" if found.shown is None else f"{100 * found.shown:g}%"
        lines.append([case, row, MICROSECONDS.show(some[0].launch_s), f"{found.alarms}/{found.quiet}", *caught, shown])
    heads = ["case", "row", MICROSECONDS.unit, "alarms", *(f"{100 * share:g}%" for share in shares), "shows"]
    table: str = tabulate(lines, heads, disable_numparse=True, colalign=["left"] * 2 + ["right"] * (len(heads) - 2))
    words = {True: "reached", False: "MISSED", None: "not tried"}
    told = [f"{words[reached]}: {sentence}" for sentence, reached in goals]
    how = "Alarms and slowdowns caught, of how many; in brackets the slowdown as measured."
    return "\n".join([table, how, *told, f"kept: {folder / KEPT}"])


def _caught(found: Score, share: float) -> str:
    measured = f" ({100 * found.measured[share]:+.1f}%)" if share in found.measured else ""
    return f"{found.caught[share]}/{found.slowed[share]}{measured}"


def _data(trials: Sequence[Trial], goals: Sequence[tuple[str, bool | None]], duel: Duel, missing: int) -> dict[str, Any]:
    """Everything, as JSON has it; seconds and ratios new over old, `rounds` the median ratio of each round's pairs.

    `missing` trials were not complete when this was written.
    """
    listed = [
        {
            "case": trial.record.case,
            "row": trial.record.row,
            "share": trial.share,
            "launch_s": trial.launch_s,
            "verdict": trial.judged.verdict,
            "ratio": trial.judged.difference.ratio if trial.judged.difference else None,
            "error": trial.judged.difference.error if trial.judged.difference else None,
            "rounds": trial.rounds,
        }
        for trial in trials
    ]
    told = [{"goal": sentence, "reached": reached} for sentence, reached in goals]
    return {"schema": 1, "device": duel.facts[0]["device"]["slug"], "goals": told, "trials": listed, "missing": missing}

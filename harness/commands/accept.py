"""`accept`: make a run the baseline that new runs on its device are held against."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.accept import OBSTACLES, lost, obstacles
from harness.baseline import BASELINES, baseline_of, load_baseline, locked, read_log, write_baseline
from harness.commands.selection import add_device
from harness.match import latest
from harness.names import UsageError, path_of, split_names
from harness.record import Record
from harness.store import load, run_of

#: Lines that a refusal names before it says how many more there are.
NAMED = 5


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("run", type=path_of, help="a run's folder or a .jsonl file")
    add("-m", "--message", required=True, metavar="TEXT", help="why this run is the one to be held against; kept in the log")
    add("--allow", action="append", default=[], metavar="NAMES", help=f"accept in spite of: {', '.join(OBSTACLES)}")
    add("--merge", action="store_true", help="keep the baseline's rows that this run did not time")
    add("--baselines", type=path_of, default=BASELINES, metavar="DIR", help=f"where baselines are (default: {BASELINES})")
    add_device(parser)


def main(arguments: argparse.Namespace) -> int:
    """Write the baseline and its log, or refuse and say why (exit code 2)."""
    allowed = _allowed(arguments.allow)
    if not arguments.message.strip():
        raise UsageError("--message must say something")
    read, problems = load(run_of(arguments.run))
    for problem in problems:
        print(f"pagedbench: {problem}", file=sys.stderr)
    records = latest(read)
    if not any(record.launch_s for record in records):
        raise UsageError(f"{arguments.run} has no time of any row; a baseline is made of times")
    devices = sorted({record.device for record in records})
    if len(devices) > 1:
        raise UsageError(f"{arguments.run} holds records of {' and '.join(devices)}; a baseline is of one device")
    file = baseline_of(devices[0], arguments.baselines)
    before, other = _before(file, arguments.merge)
    here = None if "device" in allowed else _device_here(arguments.device)
    against = obstacles(records, here, [] if arguments.merge else before) | ({"schema": [other]} if other else {})
    _refuse(arguments.run, {name: lines for name, lines in against.items() if name not in allowed})
    entry = _entry(arguments, records, {name: len(lines) for name, lines in against.items()})
    with locked(file):
        kept = lost(records, _before(file, merge=True)[0]) if arguments.merge else []  # somebody may have merged meanwhile
        write_baseline(file, [*records, *kept], {**entry, "kept": len(kept)})
    _tell(file, records, kept)
    return 0


def _before(file: Path, merge: bool) -> tuple[list[Record], str | None]:
    """The present baseline, and what is wrong with it: one of another schema can be replaced, but not kept in part."""
    try:
        return (load_baseline(file.stem, file.parent)[0] if file.is_file() else []), None
    except UsageError as error:
        if merge:
            raise
        return [], str(error)


def _allowed(texts: Sequence[str]) -> set[str]:
    names = set(split_names("--allow", texts))
    for name in sorted(names - set(OBSTACLES)):
        raise UsageError(f"--allow {name}: must be of {', '.join(OBSTACLES)}")
    return names


def _device_here(wanted: str | None) -> str:
    from harness.device import find_device

    return find_device(wanted).slug


def _refuse(run: Path, against: dict[str, list[str]]) -> None:
    """Raise UsageError, naming what speaks against the run and how each could be allowed, if anything does."""
    if not against:
        return
    lines = []
    for name, whys in against.items():
        more = [f"    and {len(whys) - NAMED} more"] if len(whys) > NAMED else []
        lines += [f"  {name} ({len(whys)}):", *(f"    {' '.join(why.split())[:200]}" for why in whys[:NAMED]), *more]
    raise UsageError("\n".join([f"{run} is no baseline; --allow {','.join(against)} makes it one", *lines]))


def _entry(arguments: argparse.Namespace, records: Sequence[Record], allowed: dict[str, int]) -> dict[str, Any]:
    """One line of the log."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    revisions = sorted({record.toolchain.get("revision", "unknown") for record in records})
    runs = sorted({record.run for record in records})
    timed = sum(record.launch_s is not None for record in records)
    what = {"runs": runs, "revisions": revisions, "rows": len(records), "timed": timed, "allowed": allowed}
    return {"accepted_at": now, "message": arguments.message, **what}


def _tell(file: Path, records: Sequence[Record], kept: Sequence[Record]) -> None:
    timed = sum(record.launch_s is not None for record in records)
    merged = f", {len(kept)} kept from before" if kept else ""
    print(f"baseline: {file}: {timed} timed rows{merged}; accepted {len(read_log(file))} times so far")

"""results/baselines/: for each device the records that new runs are held against, and a log of who made them that.

DEVICE.jsonl holds the records of the accepted run; DEVICE.log.jsonl one line for each time one was accepted: when, which
run, which revision, the message. Both are committed: git keeps what they were before.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.names import UsageError
from harness.record import SCHEMA, Record
from harness.store import load

BASELINES = Path("results/baselines")


def baseline_of(device: str, folder: Path = BASELINES) -> Path:
    """The file of a device's baseline, whether or not there is one. Raises UsageError for a name that is no device's."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", device):
        raise UsageError(f"a device's name must be of lower-case letters, digits, '.' and '-' (got {device!r})")
    return folder / f"{device}.jsonl"


def log_of(baseline: Path) -> Path:
    """The file that says how a baseline came to be."""
    return baseline.with_suffix(".log.jsonl")


def load_baseline(device: str, folder: Path = BASELINES) -> tuple[list[Record], list[str]]:
    """Read a device's baseline and what was skipped in it.

    Raises UsageError where there is none, or its records are of another schema version.
    """
    file = baseline_of(device, folder)
    if not file.is_file():
        raise UsageError(f"no baseline for {device} ({file}); `pagedbench accept RUN -m MESSAGE` makes a run the baseline")
    refuse_other_schemas(file)
    return load(file)


def refuse_other_schemas(file: Path) -> None:
    """Raise UsageError where a line of `file` is a record of another schema version: dropped, it would pass for missing."""
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict) and data.get("schema") != SCHEMA:
            raise UsageError(
                f"{file}:{number}: a record of schema {data.get('schema')!r}, this version reads and writes {SCHEMA}; "
                "measure again with this version and `pagedbench accept --allow schema` that run"
            )


def read_log(baseline: Path) -> list[Mapping[str, Any]]:
    """The entries of a baseline's log, oldest first; a line that is none is left out."""
    try:
        lines = log_of(baseline).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    entries: list[Mapping[str, Any]] = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


@contextlib.contextmanager
def locked(baseline: Path) -> Iterator[None]:
    """Wait until nobody else changes the baselines of this folder, which is made if need be; then it is ours."""
    baseline.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(baseline.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_baseline(file: Path, records: Sequence[Record], entry: Mapping[str, Any]) -> None:
    """Make `records` the baseline, whole or not at all, and append `entry` to its log; the caller holds `locked`."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text("".join(f"{record.to_line()}\n" for record in records), encoding="utf-8")
    line = json.dumps(entry, sort_keys=True) + "\n"
    log = log_of(file)
    torn = log.is_file() and log.stat().st_size and not log.read_bytes().endswith(b"\n")
    with log.open("a", encoding="utf-8") as out:
        out.write("\n" * bool(torn) + line)
    os.replace(scratch, file)

"""results/history/: one line a timed row and run for each device, and the steps in them.

Lines stand in the order in which runs were added, and that order counts, not the clock: two machines' clocks differ. A
run added twice leaves no second line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.match import latest
from harness.names import UsageError
from harness.record import Record

HISTORY = Path("results/history")
SCHEMA = 1

Series = tuple[str, str, str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One row of one run: the median of its visits in seconds, and the revision that was measured.

    kernel    digests of its binaries in one word, "" where none are known
    unit      UUID of the GPU, "" where none is known
    """

    run: str
    revision: str
    started_at: str
    device: str
    device_kind: str
    case: str
    case_digest: str
    impl: str
    layout: str
    params: Mapping[str, Any]
    launch_s: float
    kernel: str = ""
    unit: str = ""
    schema: int = SCHEMA

    @property
    def series(self) -> Series:
        """What it belongs to: case digest, implementation, layout, parameters."""
        return self.case_digest, self.impl, self.layout, json.dumps(self.params, sort_keys=True)

    @property
    def label(self) -> str:
        """The row with its parameters, and the case."""
        settings = [f"{name}={value}" for name, value in self.params.items()]
        return " ".join([f"{self.impl}[{self.layout}]", *settings, "on", self.case])


def history_of(device: str, folder: Path = HISTORY) -> Path:
    """The file of a device's history, whether or not there is one."""
    return folder / f"{device}.jsonl"


def points(records: Sequence[Record]) -> list[Point]:
    """The lines that a run gains the history: its timed rows, controls left out. A row without a time says nothing here."""
    return [
        Point(
            run=record.run,
            revision=record.toolchain.get("revision", "unknown"),
            started_at=record.started_at,
            device=record.device,
            device_kind=record.device_kind,
            case=record.case,
            case_digest=record.case_digest,
            impl=record.impl,
            layout=record.layout,
            params=dict(record.params),
            launch_s=record.launch_s.median,
            kernel=" ".join(sorted(str(kernel.get("digest", ""))[:12] for kernel in record.kernels)),
            unit=str(record.unit.get("uuid") or ""),
        )
        for record in latest(records)
        if record.launch_s and record.launch_s.median > 0
    ]


def add(file: Path, new: Sequence[Point]) -> int:
    """Append the points that `file` has not got; return how many. Waits for another process that is adding."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file) as descriptor:
        known = {(point.run, *point.series) for point in read(file)[0]}
        fresh = [point for point in new if (point.run, *point.series) not in known]
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        text = "\n" * torn + "".join(json.dumps(dataclasses.asdict(point), sort_keys=True) + "\n" for point in fresh)
        with open(descriptor, "ab", closefd=False) as out:
            out.write(text.encode())
    return len(fresh)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def read(file: Path) -> tuple[list[Point], list[str]]:
    """Read a history: its points in order, and a line for each line that is none. UsageError where there is no file."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UsageError(f"cannot read history {file}: {error.strerror or error}") from error
    found, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_parse(line))
        except (ValueError, TypeError, RecursionError) as error:
            problems.append(f"{file}:{number}: skipped, {error}")
    return found, problems


def _parse(line: str) -> Point:
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError("not an object")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA} (got {data.get('schema')!r})")
    known = {field.name: data[field.name] for field in dataclasses.fields(Point) if field.name in data}
    seconds = known.get("launch_s")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"launch_s must be a time (got {seconds!r})")
    texts = [field.name for field in dataclasses.fields(Point) if field.type == "str"]
    if odd := next((name for name in texts if not isinstance(known.get(name, ""), str)), None):
        raise ValueError(f"{odd} must be a text (got {known[odd]!r})")
    if not isinstance(known.get("params"), dict):
        raise ValueError("params must be an object")
    return Point(**known)


def by_series(found: Sequence[Point]) -> dict[Series, list[Point]]:
    """The points of each series, in order."""
    series: dict[Series, list[Point]] = {}
    for point in found:
        series.setdefault(point.series, []).append(point)
    return series

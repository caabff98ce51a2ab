"""pytest-benchmark's JSON as records, so that `compare` judges it as it judges ours.

A benchmark of pagedbench's plugin has one round a visit, and its row's names in `extra_info`. Any other benchmark's rounds
follow each other without a pause and are no independent samples: they are taken in BLOCKS blocks, in order, and the
median of each block stands for a visit.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.interval import summarise
from harness.names import UsageError
from harness.record import Record, Samples, unit_of

BLOCKS = 10


def load_pytest_json(path: Path) -> list[Record]:
    """Read a file of --benchmark-json, --benchmark-save or --benchmark-autosave. Raises UsageError for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        machine, commit = data["machine_info"], data.get("commit_info") or {}
        return [_record(path, data, machine, commit, benchmark) for benchmark in data["benchmarks"]]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not pytest-benchmark's JSON: {type(error).__name__}: {error}") from error


def _record(
    path: Path, data: Mapping[str, Any], machine: Mapping[str, Any], commit: Mapping[str, Any], benchmark: Mapping[str, Any]
) -> Record:
    extra, name = benchmark.get("extra_info") or {}, str(benchmark["fullname"])
    ours = machine.get("pagedbench") or {}
    device = ours.get("device") or {}
    rounds = benchmark["stats"].get("data") or []
    return Record(
        run=str(extra.get("run", path.stem)),
        suite=str(extra.get("suite", "pytest")),
        started_at=str(data.get("datetime", "")),
        op=str(extra.get("op", "test")),
        case=str(extra.get("case", name)),
        case_digest=str(extra.get("case_digest", hashlib.sha256(name.encode()).hexdigest()[:12])),
        shape={},
        impl=str(extra.get("impl", "pytest")),
        layout=str(extra.get("layout", benchmark.get("group") or "test")),
        status="ok",
        device=str(device.get("slug") or _slug(machine)),
        device_kind=str(device.get("kind", "cpu")),
        unit={name: str(fact) for name, fact in unit_of(device).items()},
        toolchain=_toolchain(machine, ours, commit),
        flags=tuple(map(str, extra.get("flags") or ())),
        launch_s=_samples(rounds, float(benchmark["stats"]["median"]), is_visits="case_digest" in extra),
        workspace_bytes=extra.get("workspace_bytes"),
    )


def _samples(rounds: Sequence[Any], median: float, is_visits: bool) -> Samples:
    """Visits of one benchmark. Without the rounds themselves there is one, of which no interval can be made."""
    values = [float(value) for value in rounds]
    if not all(map(math.isfinite, [median, *values])):
        raise ValueError("a round's time is not finite")
    if not is_visits and len(values) > BLOCKS:
        edges = [len(values) * block // BLOCKS for block in range(BLOCKS + 1)]
        values = [statistics.median(values[a:b]) for a, b in itertools.pairwise(edges)]
    return summarise(values or [median])


def _slug(machine: Mapping[str, Any]) -> str:
    """The machine, where the file names no device of ours: its processor."""
    cpu = machine.get("cpu") or {}
    name = f"{cpu.get('brand_raw') or machine.get('machine') or 'unknown'} {cpu.get('count') or ''}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _toolchain(machine: Mapping[str, Any], ours: Mapping[str, Any], commit: Mapping[str, Any]) -> dict[str, str]:
    found = {"python": str(machine.get("python_version", "unknown")), "system": str(machine.get("system", "unknown"))}
    found |= {str(name): str(version) for name, version in (ours.get("toolchain") or {}).items()}
    revision = str(commit.get("id") or "unknown")[:12]
    return {**found, "revision": revision + ("+" if commit.get("dirty") else "")}

"""The other end of a cluster's lane: a device of this node, asked in plain data by a driver elsewhere. See cluster.py."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import __version__
from harness.machine import LocalLane
from harness.names import UsageError
from harness.options import Options
from harness.registry import Registry, default_registry
from harness.rooms import HOUSE
from harness.work import Work, rows_from_json

#: What a user's file may read beside itself, and so goes with it; and bytes of it all, at most.
SOURCES = (".py", ".cu", ".cuh", ".h", ".hpp")
SOURCES_BYTES = 16 << 20


class Node:
    """Holds the lane of one device, and the files that its implementations come in."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        _set_threads(asked["threads"])
        self._folder = Path(tempfile.mkdtemp(prefix="pagedbench.")) if asked["impl_files"] else None
        files = [unpack(packed, self._folder / str(at)) for at, packed in enumerate(asked["impl_files"]) if self._folder]
        work = Work(**{**asked["work"], "options": Options(**asked["work"]["options"]), "impl_files": files, "rows": ()})
        self._lane = LocalLane(work, asked["work"]["device"])

    @functools.cached_property
    def _registry(self) -> Registry:
        return default_registry(self._lane.work.impl_files)

    def introduce(self) -> dict[str, Any]:
        """Return the device's facts."""
        return self._lane.introduce()

    def measure(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Return lines of records, and seconds by phase."""
        records, spent = self._lane.measure(list(rows_from_json(rows, self._registry).values()), lambda _: None)
        return {"records": [record.to_line() for record in records], "spent_s": dict(spent)}

    def close(self) -> None:
        """End the worker and take the files away."""
        self._lane.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def ask(work: Work, device: str) -> dict[str, Any]:
    """What a Node is made of, as plain data: everything of `work` but its rows. Raises UsageError for files too large."""
    plain = {**{field.name: getattr(work, field.name) for field in dataclasses.fields(work)}, "device": device}
    del plain["rows"], plain["impl_files"]
    return {
        "work": {**plain, "options": dataclasses.asdict(work.options)},
        "impl_files": [pack(Path(path)) for path in work.impl_files],
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def pack(file: Path) -> dict[str, Any]:
    """A user's file and the sources in its folder, by name. Raises UsageError where they are too large to be sent."""
    beside = [path for path in sorted(file.resolve().parent.iterdir()) if path.suffix in SOURCES and path.is_file()]
    size = sum(path.stat().st_size for path in beside)
    if size > SOURCES_BYTES:
        raise UsageError(
            f"--impl-file {file}: the sources in its folder go to every node with it, {SOURCES_BYTES / 1e6:.0f} MB at most "
            f"(got {size / 1e6:.0f}); give it a folder of its own"
        )
    folder = file.resolve().parent
    return {
        "name": file.name,
        "sources": {path.name: path.read_bytes() for path in beside},
        "folder": str(folder),
        "is_on_path": any(Path(place).resolve() == folder for place in sys.path),
    }


def unpack(packed: Mapping[str, Any], folder: Path) -> str:
    """Write what `pack` took, and return the file's path. It takes the place of the driver's folder in Python's path.

    Ray puts the folder that the driver was started in there, where a node may find other files, or the same ones.
    """
    folder.mkdir(parents=True)
    for name, source in packed["sources"].items():
        (folder / Path(name).name).write_bytes(source)
    sys.path[:] = [place for place in sys.path if place == str(HOUSE) or place != packed["folder"]]
    if packed["is_on_path"]:
        sys.path.insert(0, str(folder))
    return str(folder / packed["name"])


def identity() -> dict[str, str]:
    """What must be equal on all machines of a run: the version, and a digest of the code that makes a record."""
    digest = hashlib.sha256()
    for path in _sources(("harness", "impls", "cases")):
        digest.update(f"{path.relative_to(HOUSE)}\0".encode() + path.read_bytes() + b"\0")
    return {"version": __version__, "code": digest.hexdigest()[:12]}


def _sources(rooms: Sequence[str]) -> list[Path]:
    return sorted(path for room in rooms for path in (HOUSE / room).rglob("*") if path.suffix in SOURCES)


def _set_threads(count: str | None) -> None:
    """As many threads as the driver's environment says: Ray sets a number of its own, which no other run would have."""
    if count is None:
        os.environ.pop("OMP_NUM_THREADS", None)
    else:
        os.environ["OMP_NUM_THREADS"] = count

"""Where implementations come from besides the table of `impls`: installed packages, and files given by the user."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from harness.impl import Impl
from harness.names import UsageError
from harness.words import of_error, of_value

ENTRY_POINT_GROUP = "pagedbench.impls"


def load_points() -> Iterator[Sequence[Impl]]:
    """The tables that installed packages name under the entry-point group; UsageError for a name that leads to none."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        yield _load_point(point)


def _load_point(point: importlib.metadata.EntryPoint) -> Sequence[Impl]:
    who = f"entry point {point.name!r} ({point.value}) of the group {ENTRY_POINT_GROUP}"
    try:
        table = point.load()
    except Exception as error:
        raise UsageError(f"{who}: {of_error(error)}") from error
    if not _is_table(table):
        raise UsageError(f"{who}: must name a tuple of harness.registry.Impl (got {of_value(table)})")
    return table


def _is_table(table: object) -> TypeGuard[Sequence[Impl]]:
    return isinstance(table, list | tuple) and all(isinstance(impl, Impl) for impl in table)


def load_file(path: str) -> Sequence[Impl]:
    """Run the user's file and return its `IMPLS`. Its own functions are named "MODULE:function", MODULE the file's stem.

    Raises UsageError, with the file and the reason, when there is no such file, it is a folder, it fails, or it has no table.
    """
    file = Path(path)
    if path and file.is_dir():
        raise UsageError(f"--impl-file {path}: is a folder; name the file in it that holds the table IMPLS")
    if not file.is_file():
        raise UsageError(f"--impl-file {path}: no such file")
    name = file.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(file.resolve()):
        raise UsageError(f"--impl-file {path}: a module named {name!r} is loaded already; rename the file")
    known = importlib.util.find_spec(name) if "." not in name else None
    if known and known.origin and Path(known.origin).resolve() != file.resolve():
        raise UsageError(f"--impl-file {path}: Python has another module named {name!r} ({known.origin}); rename the file")
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"--impl-file {path}: not a Python file (it must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"--impl-file {path}: {of_error(error)}") from error
    except KeyboardInterrupt as error:  # Ctrl-C, or its own
        del sys.modules[name]
        raise UsageError(f"--impl-file {path}: interrupted while it was imported") from error
    table = getattr(module, "IMPLS", None)
    if not _is_table(table):
        raise UsageError(f"--impl-file {path}: must define IMPLS, a tuple of harness.registry.Impl (got {of_value(table)})")
    for impl in table:
        module_named = impl.prepare.partition(":")[0]
        if module_named != name and "." not in module_named:  # some other file that happens to lie in the folder
            raise UsageError(
                f"--impl-file {path}: {impl.name} names its prepare {impl.prepare!r}, which is not in this file"
            )
    return table

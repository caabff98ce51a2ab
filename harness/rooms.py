"""The packages beside this one, `impls` and `cases`, found by name: the harness imports neither.

Both names are common. A folder of that name in the place that Python searches first hides ours, which would run
somebody else's modules or fail far from the cause, so whoever asks for a room gets ours or is told what hides it.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from harness.names import UsageError

HOUSE = Path(__file__).resolve().parent.parent


def load_room(name: str) -> ModuleType:
    """Import and return our package `name`. Raises UsageError, naming both places, where another one hides it.

    What hides it is not run.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and _place(spec) != HOUSE / name:
        raise UsageError(
            f"{_place(spec)} hides pagedbench's own package {name!r} ({HOUSE / name}): run the command `pagedbench`"
            " instead of `python -m harness`, add --import-mode=importlib to pytest, or run from another folder"
        )
    return importlib.import_module(name)


def _place(spec: ModuleSpec) -> Path:
    """The folder of a package, with an `__init__.py` or without, or the file of a module."""
    places = list(spec.submodule_search_locations or ()) or [spec.origin or spec.name]
    return Path(places[0]).resolve()

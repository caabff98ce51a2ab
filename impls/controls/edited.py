"""Loads edits: `impls.controls.edited:NAME` is the `prepare` of the right page, executed with the control's changes.

The edited page is a module of its own; the right one, and whoever uses it, sees nothing of it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import linecache
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from impls.controls.edit import IMPLS, Edit, edited_text


def __getattr__(name: str) -> Callable[[Any], Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    prepare: Callable[[Any], Any] = edited_page(f"control.{name}").prepare
    return prepare


@functools.cache
def edited_page(name: str) -> ModuleType:
    """Execute the page of the control called `name` as a module of its own; its kernels are compiled from edited sources."""
    control = find(name)
    source = edited_text(control, control.right)
    module = ModuleType(f"{__name__}.{name}")
    module.__file__ = f"<{name}: {control.right}>"
    # Triton reads a kernel's source back, and tracebacks show lines.
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    sys.modules[module.__name__] = module  # where dataclasses look their module up
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    if any(change.file != control.right for change in control.changes):
        module.__dict__["load"] = functools.partial(_load, control, module.__dict__["load"])
    return module


def find(name: str) -> Edit:
    """Return the edit called `name`."""
    table = importlib.import_module("impls.controls").CONTROLS
    found = [control for control in table if control.name == name and isinstance(control, Edit)]
    if not found:
        raise AttributeError(f"no edit is named {name!r}")
    return found[0]


def _load(control: Edit, load: Callable[..., Any], build: Any, *more: Any) -> Any:
    """Compile a build from edited copies of its source and every header, so that each includes edited ones."""
    with tempfile.TemporaryDirectory() as folder:
        write_sources(control, Path(folder))
        return load(dataclasses.replace(build, source=str(Path(folder) / build.source)), *more)


def write_sources(control: Edit, folder: Path) -> None:
    """Write the kernels' sources and headers into `folder`, the control's changes made."""
    beside = (IMPLS / control.right).parent
    for file in (*beside.glob("*.cu"), *beside.glob("*.cuh")):
        text = edited_text(control, str(file.relative_to(IMPLS)))
        (folder / file.name).write_text(text, encoding="utf-8")

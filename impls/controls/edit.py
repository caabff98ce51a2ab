"""A control as an edit: the source of a right implementation with a few words replaced. Plain data; see edited.py.

An edit cannot rot unseen: each old text must stand in its file exactly once, and a test holds that for every control.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from harness.control import Control, Shows

IMPLS = Path(__file__).resolve().parent.parent


class EditError(Exception):
    """An old text that does not stand in its file exactly once: the right implementation has moved on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """Replace `old`, which stands exactly once in `file` (a path inside impls/), by `new`."""

    file: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit(Control):
    """A control made of the page `right` (a path inside impls/) and, for a CUDA kernel, the files it is compiled from."""

    right: str
    changes: tuple[Change, ...]


def edit(name: str, *replacements: tuple[str, ...], right: str, fault: str, **entry: Any) -> Edit:
    """Return the control `control.NAME`. A replacement is (old, new) in the page itself or (file, old, new) beside it."""
    folder = Path(right).parent
    changes = []
    for *file, old, new in replacements:
        changes.append(Change(file=str(folder / file[0]) if file else right, old=old, new=new))
    at_least, dtypes = entry.pop("at_least", {}), entry.pop("dtypes", None)
    return Edit(
        name=f"control.{name}", prepare=f"impls.controls.edited:{name}", right=right, changes=tuple(changes),
        fault=fault, note=fault, shows=Shows(at_least=at_least, dtypes=dtypes), **entry,
    )


def edited_text(control: Edit, file: str) -> str:
    """Return `file` with the control's changes. Raises EditError, naming the control, the file and the text."""
    text = (IMPLS / file).read_text(encoding="utf-8")
    for change in control.changes:
        if change.file != file:
            continue
        count = text.count(change.old)
        if count != 1:
            raise EditError(
                f"{control.name}: impls/{file} must hold the text below exactly once (got {count}); write the fault anew for "
                f"the file as it is now\n{change.old}"
            )
        text = text.replace(change.old, change.new)
    return text

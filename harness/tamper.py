"""What verdicts and times are made by, watched: a row that puts something else in its place is wrong, and it is put back.

An implementation runs in the harness's process and may do there what it likes; this finds the names that it replaces and
the tables that it changes, by slip or not, and keeps one row's from deciding over the next one's. It is no jail: see
docs/audit.md.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

#: of others, what judges and times are made of. Not all: torch._dynamo puts its own manual_seed into torch when it is loaded
_OTHERS: dict[Any, frozenset[str] | None] = {
    torch: frozenset({
        "arange", "as_tensor", "cat", "empty", "empty_like", "from_numpy", "full", "maximum", "split", "stack", "tensor",
        "unravel_index", "where", "zeros", "zeros_like",
    }),
    torch.Tensor: None, torch.linalg: None, math: None, time: None,
    torch.cuda: frozenset({"CUDAGraph", "Event", "Stream", "current_stream", "graph", "synchronize"}),
}  # fmt: skip
#: modules of ours that judge and time, loaded before any row runs
_OURS = (
    "attention_relations", "check", "checks", "conclusion", "device", "guards", "hazards", "impl", "interval", "nvml",
    "ops.attention_staged", "ops.attention_tensors", "ops.block_copy_tensors", "ops.cache_write_tensors", "ops.in_place",
    "ops.layouts", "ops.needles", "ops.outlier", "pipeline", "record", "relations", "row", "session", "stock", "timing",
    "trial", "truth",
)  # fmt: skip


class Untouched:
    """Names as they were when this was made, and what the tables among them held."""

    def __init__(self) -> None:
        self._kept = [(owner, dict(found), set(vars(owner))) for owner, found in _watched()]
        self._tables = [
            (f"{_title(owner)}.{name}", table, table.copy())
            for owner, found, _ in self._kept
            for name, table in found.items()
            if isinstance(table, dict | list | set)
        ]

    def put_back(self) -> list[str]:
        """Restore what was replaced, deleted, covered in a class or changed in a table; its names, "torch.Tensor.norm"."""
        replaced = []
        for title, table, kept in self._tables:
            if _contents(table) != _contents(kept):
                _refill(table, kept)
                replaced.append(title)
        for owner, kept, own in self._kept:
            now = vars(owner)
            for name, value in kept.items():
                if now.get(name) is not value:
                    setattr(owner, name, value)
                    replaced.append(f"{_title(owner)}.{name}")
            for name in _covering(owner, own):
                delattr(owner, name)
                replaced.append(f"{_title(owner)}.{name}")
        return replaced


def _contents(table: Any) -> Any:
    """What a table holds, by identity, in order; a set's members in any."""
    if isinstance(table, dict):
        return [(id(key), id(value)) for key, value in table.items()]
    members = map(id, table)
    return set(members) if isinstance(table, set) else list(members)


def _refill(table: Any, kept: Any) -> None:
    table.clear()
    table.extend(kept) if isinstance(table, list) else table.update(kept)


def _covering(owner: Any, own: set[str]) -> list[str]:
    """Names that a class has got since, and that hide those of its bases."""
    if not isinstance(owner, type) or len(vars(owner)) == len(own):
        return []
    return [name for name in vars(owner) if name not in own and any(name in vars(base) for base in owner.__mro__[1:])]


def _watched() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Owners of names, and the names."""
    for owner, chosen in _OTHERS.items():
        names = {name: value for name, value in vars(owner).items() if callable(value) and not name.startswith("_")}
        yield owner, {name: value for name, value in names.items() if chosen is None or name in chosen}
    for module in (importlib.import_module(f"harness.{name}") for name in _OURS):
        names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        yield module, names
        for value in names.values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                kinds = (property, functools.cached_property)
                yield value, {name: made for name, made in vars(value).items() if callable(made) or isinstance(made, kinds)}


def _title(owner: Any) -> str:
    if isinstance(owner, type):
        module = "torch" if owner is torch.Tensor else owner.__module__
        return f"{module}.{owner.__qualname__}"
    return next((name for name, module in sys.modules.items() if module is owner), str(owner))

"""The implementations at hand, and the rows that are made of them.

The harness knows implementations only through this page. They are found in the table `IMPLS` of the package `impls`, in
installed packages that name a table under the entry-point group "pagedbench.impls", and in files given by the user; all of
them import the contract (harness/impl.py, harness/limits.py) from here.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.impl import DETERMINISTIC, RELATIONS, ROLES, TAILS, Impl, Prepared, PreparedReader, Unsupported
from harness.limits import Limits
from harness.names import UsageError, nearest
from harness.ops.layouts import Layout
from harness.rehearsal import rehearse
from harness.rooms import load_room
from harness.tables import ENTRY_POINT_GROUP, load_file, load_points

__all__ = [
    "DETERMINISTIC",
    "ENTRY_POINT_GROUP",
    "RELATIONS",
    "ROLES",
    "TAILS",
    "Entry",
    "Impl",
    "Limits",
    "Prepared",
    "PreparedReader",
    "Registry",
    "Unsupported",
    "default_registry",
    "load_file",
    "matches",
]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of the matrix: an implementation in one of its layouts, its parameters at their defaults or as given."""

    impl: Impl
    layout: Layout
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.impl.name}[{self.layout.name}]"

    def variants(self) -> list[Entry]:
        """This entry with every combination of its declared parameters, the defaults first."""
        combinations = itertools.product(*self.impl.params.values())
        return [dataclasses.replace(self, params=dict(zip(self.impl.params, values, strict=True))) for values in combinations]


class Registry:
    """The implementations at hand, in the order of their tables; names are unique."""

    def __init__(self, impls: Iterable[Impl] = ()) -> None:
        self._impls: dict[str, Impl] = {}
        self.add(impls)

    def add(self, impls: Iterable[Impl]) -> None:
        """Add entries; a name taken already raises UsageError."""
        for impl in impls:
            if impl.name in self._impls:
                raise UsageError(f"two implementations are named {impl.name!r}; rename one")
            self._impls[impl.name] = impl

    def __iter__(self) -> Iterator[Impl]:
        return iter(self._impls.values())

    def entries(self, patterns: Sequence[str] = (), roles: Sequence[str] = ("implementation",)) -> list[Entry]:
        """Rows whose `name` or `name[LAYOUT]` matches one of the globs; none given is all of `roles`.

        A pattern that matches nothing raises UsageError with the nearest names. Naming an entry overrides `roles`. A peer
        whose library is missing, and what is `on_request`, come only when they are named.
        """
        rows = [Entry(impl, layout) for impl in self._impls.values() for layout in impl.layouts]
        if not patterns:
            rows = [row for row in rows if row.impl.role in roles and not row.impl.on_request]
            return [row for row in rows if not row.impl.is_absent_peer()]
        chosen: dict[str, Entry] = {}
        for pattern in patterns:
            found = [row for row in rows if matches(row.impl.name, pattern) or matches(str(row), pattern)]
            if not found:
                known = [*self._impls, *map(str, rows)]
                raise UsageError(f"no implementation matches {pattern!r}{nearest(pattern, known)}")
            chosen.update((str(row), row) for row in found if row.impl.role in roles or pattern in (row.impl.name, str(row)))
        return list(chosen.values())


def matches(name: str, pattern: str) -> bool:
    """Glob match in which brackets stand for themselves, since row names carry them."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def default_registry(impl_files: Sequence[str] = (), rehearsed: bool = False) -> Registry:
    """The table of `impls`, then installed entry points, then `impl_files`, imported apart first unless `rehearsed`."""
    registry = Registry(load_room("impls").IMPLS)
    for table in load_points():
        registry.add(table)
    for path in impl_files:
        if not rehearsed:
            rehearse(path)
        registry.add(load_file(path))
    return registry

"""What every case has: a name for ever, a digest of its content, and rules that speak when broken."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from harness.ops.layouts import Layout

_NAME = re.compile(r"[a-z0-9][a-z0-9_.\-]*")


class CaseError(ValueError):
    """A case that cannot be: says which case, which rule, and what was got."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A problem for one operator. Subclasses add the shapes; `name` keys results, `digest` guards the name."""

    op: ClassVar[str]

    name: str

    def __post_init__(self) -> None:
        good = isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None
        self.require(good, "name must be lower-case words, digits, '.', '_' or '-'", self.name)

    def require(self, holds: bool, rule: str, got: Any) -> None:
        """Raise CaseError unless `holds`."""
        if not holds:
            raise CaseError(f"{self.name}: {rule} (got {got!r})")

    def require_positive(self, *fields: str) -> None:
        """Raise CaseError unless each named field is an integer of at least 1."""
        for field in fields:
            value = getattr(self, field)
            self.require(type(value) is int and value >= 1, f"{field} must be a whole number of at least 1", value)

    def require_count(self, *fields: str) -> None:
        """Raise CaseError unless each named field is an integer of at least 0."""
        for field in fields:
            value = getattr(self, field)
            self.require(type(value) is int and value >= 0, f"{field} must be a whole number of at least 0", value)

    def require_fraction(self, field: str, holds: Callable[[float], bool], rule: str) -> None:
        """Raise CaseError unless the field is a finite number for which `holds`; a whole one becomes a float, as digests
        are made of text."""
        value = getattr(self, field)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        self.require(is_number and abs(value) < 1e300 and holds(value), f"{field} {rule}", value)
        object.__setattr__(self, field, float(value))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole pool, K and V."""
        raise NotImplementedError

    def staged_bytes(self, sets: int, layouts: Collection[Layout]) -> int:
        """Bytes that the harness holds to check or time this case: `sets` of caches, as made and in each of `layouts`.

        This is of an operator that writes its caches: no layout shares memory with what was made, and the two that are
        compared in the end, and what differs, are held besides.
        """
        return int(self.cache_bytes * (sets * (1 + len(layouts)) + 2.25))

    @property
    def traffic_bytes(self) -> int:
        """Bytes that must cross memory at least."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """Multiplications and additions that must be done at least."""
        raise NotImplementedError

    @functools.cached_property
    def digest(self) -> str:
        """Twelve hex digits over the operator and every field that is not the name and not at its default.

        Leaving defaults out lets a field be added later without changing the digest of older cases.
        """
        content = {"op": self.op}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and value != field.default:
                content[field.name] = value
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """Return the case as plain JSON data, with its operator."""
        return {"op": self.op, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        return self.name

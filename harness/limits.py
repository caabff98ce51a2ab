"""What an implementation takes, said as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from typing import TYPE_CHECKING

from harness.names import UsageError
from harness.ops.features import FEATURES

if TYPE_CHECKING:
    from harness.ops.case import Case


#: Fields that are sets, with what one looks like: a word alone would be read letter by letter.
_SETS = {"dtypes": '{"bf16"}', "head_dims": "{128}", "block_sizes": "{16}", "groups": "{8}", "features": '{"window"}'}
_NUMBERS = ("head_dim_multiple", "max_head_dim", "max_block_size", "max_group", "max_q_len", "max_seq_len")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What an implementation takes, as data, so that it can be asked without loading it. None is "any".

    head_dim_multiple    head_dim must be a multiple of it
    max_q_len            1 for decode only
    features             what it implements of harness/ops/features.py, besides softmax(scale * q.k) v
    """

    dtypes: frozenset[str] | set[str] | None = None
    head_dims: frozenset[int] | set[int] | None = None
    head_dim_multiple: int = 1
    max_head_dim: int | None = None
    block_sizes: frozenset[int] | set[int] | None = None
    max_block_size: int | None = None
    groups: frozenset[int] | set[int] | None = None
    max_group: int | None = None
    max_q_len: int | None = None
    max_seq_len: int | None = None
    features: frozenset[str] | set[str] = frozenset()

    def __post_init__(self) -> None:
        for name, example in _SETS.items():
            got = getattr(self, name)
            if not isinstance(got, Set | tuple | list) and (got is not None or name == "features"):
                raise UsageError(f"Limits: {name} must be a set such as {example} (got {got!r})")
        for name in _NUMBERS:
            got = getattr(self, name)
            if not (isinstance(got, int | float) and got > 0) and (got is not None or name == "head_dim_multiple"):
                raise UsageError(f"Limits: {name} must be a number above 0 (got {got!r})")
        if unknown := set(self.features) - set(FEATURES):
            raise UsageError(f"Limits: features must be of {', '.join(FEATURES)} (got {', '.join(sorted(map(str, unknown)))})")

    def why_not(self, case: Case) -> str | None:
        """Return the first rule that `case` breaks, as a sentence, or None. Fields that a case lacks break no rule."""
        one_of = (
            ("dtype", self.dtypes),
            ("head_dim", self.head_dims),
            ("block_size", self.block_sizes),
            ("group", self.groups),
        )
        for field, allowed in one_of:
            value = getattr(case, field, None)
            if allowed is not None and value is not None and value not in allowed:
                return f"{field} must be one of {', '.join(map(str, sorted(allowed)))} (got {value})"
        head_dim = getattr(case, "head_dim", None)
        if head_dim is not None and head_dim % self.head_dim_multiple:
            return f"head_dim must be a multiple of {self.head_dim_multiple} (got {head_dim})"
        at_most = (
            ("head_dim", self.max_head_dim),
            ("block_size", self.max_block_size),
            ("group", self.max_group),
            ("max_q_len", self.max_q_len),
            ("max_seq_len", self.max_seq_len),
        )
        for field, most in at_most:
            value = getattr(case, field, None)
            if most is not None and value is not None and value > most:
                return f"{field} must be at most {most} (got {value})"
        lacks = next((name for name in getattr(case, "features", ()) if name not in self.features), None)
        if lacks:
            has = ", ".join(name for name in FEATURES if name in self.features) or "none"
            return f"{lacks} is not implemented (implements: {has})"
        return None

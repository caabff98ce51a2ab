"""Controls: implementations that are wrong on purpose, by which the checker itself is checked. See docs/audit.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from harness.registry import Impl

if TYPE_CHECKING:
    from harness.ops.case import Case

#: what a rule may ask of a case besides its own fields and properties
DERIVED: dict[str, Callable[[Any], int]] = {
    "num_blocks_of_longest": lambda case: max(case.blocks_per_seq, default=0),
    "num_ragged": lambda case: sum(n % case.block_size > 0 for n in case.seq_lens),
    "num_empty": lambda case: sum(q > 0 for n, q in _lens(case) if not n),
    "num_masked": lambda case: sum(max(q - n, 0) for n, q in _lens(case) if n),
    "num_written": lambda case: case.num_tokens - case.num_padding,
    "num_lengths": lambda case: len(set(case.seq_lens)),
    "num_past_64": lambda case: sum(n > 64 and n % 64 == 1 for n in case.seq_lens),
    "num_outliers": lambda case: int(not case.sinks and case.num_kv_heads * sum(n > 0 < q for n, q in _lens(case)) > 1),
    "own_scale": lambda case: int(case.softmax_scale != case.head_dim**-0.5),
    "asks_window": lambda case: int(bool(case.window)),
    "asks_softcap": lambda case: int(bool(case.softcap)),
    "asks_fp8": lambda case: int(bool(case.kv_dtype)),
    "scales_by_head": lambda case: int(case.kv_scales == "head" and case.num_kv_heads > 1),
    "num_behind": lambda case: sum(q > 0 and n > case.window for n, q in _lens(case)) if case.window else 0,
    "strong_cap": lambda case: int(bool(case.softcap) and case.softcap <= 4),
    "num_sharing": lambda case: sum(tokens > 0 for _, tokens in case.prefix),
    "num_elements": lambda case: case.num_blocks * case.num_kv_heads * case.block_size * case.head_dim,
}


def _lens(case: Any) -> Iterable[tuple[int, int]]:
    return zip(case.seq_lens, case.q_lens, strict=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shows:
    """On which cases a fault shows, as data: on others the control is right, and must not be counted as missed.

    at_least    of a case's own numbers or of `DERIVED`: num_ragged counts sequences that end inside a block, num_empty those
                without keys that are asked nevertheless, num_masked query tokens before the first key, num_written tokens
                that have a slot, num_elements those of one cache, num_past_64 sequences that end one token into a tile of
                64; num_outliers is 1 where one head lies far from the others, own_scale 1 where the scale is not
                head_dim ** -0.5; num_behind sequences with keys before a window, strong_cap 1 where a masked score would count
                if it were capped, num_sharing sequences that begin with another's blocks
    dtypes      None is any
    """

    at_least: Mapping[str, int] = dataclasses.field(default_factory=dict)
    dtypes: frozenset[str] | set[str] | None = None

    def why_not(self, case: Case) -> str | None:
        """Return why the fault cannot show on `case`, or None."""
        for name, least in self.at_least.items():
            value = DERIVED[name](case) if name in DERIVED else int(getattr(case, name))
            if value < least:
                return f"its fault shows where {name} is at least {least} (got {value})"
        dtype = getattr(case, "dtype", None)
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"its fault shows in {' and '.join(sorted(self.dtypes))} (got {dtype})"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Control(Impl):
    """An implementation that is wrong on purpose, as public code has been.

    fault         what it does wrong, and where that was seen
    shows         on which cases
    only_timed    it shows in timed launches only: the audit times such a control, the others are checked and that's all
    """

    fault: str
    shows: Shows = Shows()
    only_timed: bool = False
    role: str = "control"

    def why_not(self, case: Case, device_kind: str) -> str | None:
        """As of any implementation; a case on which the fault cannot show is refused as well."""
        return super().why_not(case, device_kind) or self.shows.why_not(case)

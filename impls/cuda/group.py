"""How the kernels of group.cuh are specialised: warps, heads and rows, from the shape alone."""

from __future__ import annotations

import dataclasses
import math

from harness.ops.dtypes import ITEMSIZE
from impls.cuda.attention import Shape

MAX_HEADS = 8  # query heads of a CTA whose sums fit its registers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The constants of group.cuh.

    warps    of a CTA
    ctas     that an SM must hold at once, which bounds a thread's registers
    heads    query heads of a CTA; `parts` CTAs share a larger group
    rows     tokens that a lane reads at a time
    step     tokens that a CTA reads at a time
    """

    warps: int
    ctas: int
    heads: int
    parts: int
    rows: int
    step: int

    @classmethod
    def of(cls, shape: Shape) -> Group:
        """Choose for `shape`: eight 16-byte loads a lane in flight, or four where a lane's tokens would straddle blocks."""
        warps = 4
        chunks = shape.head_dim * ITEMSIZE[shape.dtype] // 16
        lanes = min(32, 1 << (chunks - 1).bit_length())
        loads = 4 if shape.block_size % 8 else 8
        rows = min(max(loads // math.ceil(chunks / lanes), 1), lanes)
        parts = math.ceil(shape.group / MAX_HEADS)
        heads = math.ceil(shape.group / parts)
        ctas = 4 if heads <= 2 else 3 if heads <= 4 else 2  # as many as no spills allow
        return cls(warps=warps, ctas=ctas, heads=heads, parts=parts, rows=rows, step=warps * (32 // lanes) * rows)

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.warps

    def macros(self) -> dict[str, str | int]:
        """The macros of group.cuh, besides those of paged.cuh."""
        return {
            "PA_WARPS": self.warps, "PA_CTAS": self.ctas, "PA_HEADS": self.heads, "PA_ROWS": self.rows, "PA_STEP": self.step,
        }

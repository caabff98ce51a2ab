"""How the kernels of group.cuh are specialised: warps, heads and rows, from the shape alone."""

from __future__ import annotations

import dataclasses
import math

from harness.ops.dtypes import ITEMSIZE
from impls.cuda.attention import Shape

MAX_HEADS = 8  # query heads of a CTA whose sums fit its registers
SLOTS = 3      # of a warp's ring

#: shapes that are short of registers, or were: some have spilled with one NVRTC and not with another
TIGHT_SHAPES = (
    Shape(group=2),
    Shape(group=8),
    Shape(group=16),
    Shape(group=71, dtype="f16"),
    Shape(group=2, block_size=64),
    Shape(group=8, block_size=4),
    Shape(group=8, block_size=2),
    Shape(head_dim=64, group=2),
    Shape(head_dim=96, group=2),
    Shape(layout="NHD", head_dim=80, group=8),
    Shape(head_dim=192, group=4),
    Shape(head_dim=192, group=8),
    Shape(head_dim=256, group=8),
    Shape(head_dim=256, group=7, dtype="f32"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The constants of group.cuh.

    warps    of a CTA
    ctas     that an SM must hold at once, which bounds a thread's registers
    heads    query heads of a CTA; `parts` CTAs share a larger group
    rows     tokens that a lane reads at a time
    step     tokens that a CTA reads at a time
    shared_bytes    dynamic, of a CTA: queries, rings and scores, as `Shared` in group.cuh
    """

    warps: int
    ctas: int
    heads: int
    parts: int
    rows: int
    step: int
    shared_bytes: int

    @classmethod
    def of(cls, shape: Shape) -> Group:
        """Choose for `shape`: slots of eight 16-byte chunks a lane, or four where a lane's tokens would straddle blocks."""
        warps = 4
        chunks = shape.head_dim * ITEMSIZE[shape.dtype] // 16
        lanes = min(32, 1 << (chunks - 1).bit_length())
        per_lane = math.ceil(chunks / lanes)
        loads = 4 if shape.block_size % 8 else 8
        rows = min(max(loads // per_lane, 1), lanes)
        tile = 32 // lanes * rows
        parts = math.ceil(shape.group / MAX_HEADS)
        heads = math.ceil(shape.group / parts)
        ctas = 2 if heads > 4 else 4 if heads <= 2 or rows >= 8 else 3  # as many as no spills allow, anywhere
        query = heads * per_lane * lanes * 16 * 4 // ITEMSIZE[shape.dtype]
        ring = max(SLOTS * rows * per_lane * 32 * 16, heads * shape.head_dim * 4)
        return cls(
            warps=warps, ctas=ctas, heads=heads, parts=parts, rows=rows, step=warps * tile,
            shared_bytes=query + warps * (ring + heads * tile * 4 + heads * 2 * 4),
        )

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.warps

    def macros(self) -> dict[str, str | int]:
        """The macros of group.cuh, besides those of paged.cuh."""
        return {
            "PA_WARPS": self.warps, "PA_CTAS": self.ctas, "PA_HEADS": self.heads, "PA_ROWS": self.rows, "PA_STEP": self.step,
            "PA_SHARED": self.shared_bytes,
        }

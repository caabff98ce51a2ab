"""What fragments.cuh takes and refuses: tiles by loads to registers, for cuda.tensor_core."""

from __future__ import annotations

import math

from harness.ops.layouts import HND_SWIZZLED
from harness.registry import Unsupported
from impls.cuda.attention import Shape

LOADS = ("load", "load_once")  #: ways of `copy` that bring a tile to registers, without a ring
WARPS = (16, 12, 8)            # of a CTA, the most that registers hold
REGISTERS = 65536              # of an SM
MORE_REGISTERS = 56, 72        # of a thread, besides operands and sums; where a tile's rows lie in several blocks


def refuse(shape: Shape, copy: str, stages: int) -> None:
    """Raise Unsupported where `copy`, one of LOADS, cannot read the layout, or a ring is asked for besides."""
    if shape.layout == HND_SWIZZLED.name:
        raise Unsupported(f"copy={copy} must have the chunks of a row in order (got {HND_SWIZZLED.name})")
    if stages != 2:
        raise Unsupported(f"copy={copy} has no ring: stages must be left at 2 (got {stages})")


def count_warps(shape: Shape, heads: int) -> int:
    """How many warps of a CTA, with the operands and sums of `heads` query heads, registers hold."""
    lines, columns = 8 * math.ceil(shape.head_dim / 64), math.ceil(heads / 8)
    held = 4 * lines + columns * 3 * lines + MORE_REGISTERS[shape.block_size % 16 != 0]
    return next((warps for warps in WARPS if held <= REGISTERS // (32 * warps) // 8 * 8), WARPS[-1])


def partials_at_once(warps: int) -> int:
    """How many partials of other teams are read at a time, while registers hold the next tile."""
    return 4 if warps > 12 else 8

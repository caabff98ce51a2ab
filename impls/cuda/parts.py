"""The parameters of an attention kernel in parts, each packed when it changes.

A step changes those of the plan, a layer those of its tensors, and what they are was packed when the tensors were verified.
Nothing else is packed at a launch.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any

from impls.cuda.attention import LAYER, PLANNED, POINTERS, VERIFIED

if TYPE_CHECKING:
    from impls.cuda.attention import Shape


class Parts:
    """Of a kernel that takes what `shape.signature` says, and then `own`, which stays.

    pointers, verified    where in `buffer`, of a Packer, lie what `pack` returns
    plan(*planned)        put what Attention._planned holds
    """

    def __init__(self, buffer: memoryview, shape: Shape, own: tuple[int, ...]) -> None:
        verified = VERIFIED + (f" {struct.calcsize(LAYER)}s" if shape.features else "")
        self._pointers, planned, self._verified = (struct.Struct("@" + part) for part in (POINTERS, PLANNED, verified))
        # Each part begins with 8 bytes, and so at a multiple of them.
        second, third, last = (struct.calcsize(f"@{before}0P") for before in (
            POINTERS, POINTERS + PLANNED, POINTERS + PLANNED + verified
        ))
        self.pointers = buffer[: self._pointers.size]
        self.plan = functools.partial(planned.pack_into, buffer, second)
        self.verified = buffer[third : third + self._verified.size]
        struct.pack_into("@PPPi", buffer, last, *own)

    def pack(self, pointers: tuple[int, ...], tail: tuple[Any, ...]) -> tuple[bytes, bytes]:
        """Return both parts that tensors change; the second ends with LAYER where the shape has features."""
        return self._pointers.pack(*pointers), self._verified.pack(*tail)

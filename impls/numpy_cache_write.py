"""numpy.cache_write: scatter by NumPy's own indexing; every layout, on the CPU. What the others are read against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.ops.dtypes import ITEMSIZE
from harness.registry import Prepared, Unsupported

if TYPE_CHECKING:
    import torch

    from harness.ops.cache_write import CacheWriteSpec, CacheWriteStep


def prepare(spec: CacheWriteSpec) -> CacheWrite:
    if spec.layout.name in ("X_PACKED", "HND_SWIZZLED") and spec.head_dim * ITEMSIZE[spec.dtype] % 16:
        raise Unsupported(f"{spec.layout}: head_dim must be whole chunks of 16 bytes (got {spec.head_dim} of {spec.dtype})")
    return CacheWrite(spec)


class CacheWrite(Prepared):
    """Copies the rows of tokens that have a slot, then assigns them to their places."""

    ledger = {"temporaries": "rows of written tokens are gathered into new arrays"}

    def __init__(self, spec: CacheWriteSpec) -> None:
        self.spec = spec

    def plan(self, step: CacheWriteStep) -> None:
        self.tokens = np.flatnonzero(step.host_slot_mapping >= 0)
        self.block, self.offset = np.divmod(step.host_slot_mapping[self.tokens], self.spec.block_size)

    def launch(self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        key_slots, value_slots = by_slot(bits(key_cache), bits(value_cache), self.spec.layout.name)
        for rows, slots in ((bits(key)[self.tokens], key_slots), (bits(value)[self.tokens], value_slots)):
            if self.spec.layout.name == "HND_SWIZZLED":
                rows = swizzled(rows, self.offset, 16 // ITEMSIZE[self.spec.dtype])
            slots[self.block, self.offset] = rows.reshape(len(rows), *slots.shape[2:])


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a CPU tensor as unsigned integers of its own width: NumPy has no bf16, and a copy needs no numbers."""
    import torch

    unsigned = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(unsigned).numpy()


def by_slot(key_cache: Any, value_cache: Any, layout: str) -> tuple[Any, Any]:
    """View caches with block and offset in front: [num_blocks, block_size, num_kv_heads, ...]."""
    if layout in ("NHD", "KV_NHD"):
        return key_cache, value_cache
    if layout == "X_PACKED":
        return key_cache.transpose(0, 3, 1, 2, 4), value_cache.transpose(0, 3, 1, 2)
    return key_cache.transpose(0, 2, 1, 3), value_cache.transpose(0, 2, 1, 3)


def swizzled(rows: Any, offset: Any, chunk: int) -> Any:
    """Put chunk c of each row [num_tokens, num_kv_heads, head_dim] at c ^ (offset % 8); a last group of fewer than 8 stays."""
    num_tokens, num_heads, head_dim = rows.shape
    place = np.arange(head_dim // chunk)
    moved = place[None] ^ (offset[:, None] % 8)
    source = np.where(place < len(place) // 8 * 8, moved, place)
    chunks = rows.reshape(num_tokens, num_heads, len(place), chunk)
    return np.take_along_axis(chunks, source[:, None, :, None], axis=2).reshape(rows.shape)

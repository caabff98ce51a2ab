"""numpy.cache_write: scatter by NumPy's own indexing; every layout, on the CPU. What the others are read against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.registry import Prepared, Unsupported

if TYPE_CHECKING:
    import torch

    from harness.ops.cache_write import CacheWriteSpec, CacheWriteStep


def prepare(spec: CacheWriteSpec) -> CacheWrite:
    if why := spec.layout.why_not(spec):
        raise Unsupported(why)
    return CacheWrite(spec)


class CacheWrite(Prepared):
    """Copies the rows of tokens that have a slot, then assigns them to their places."""

    ledger = {"temporaries": "rows of written tokens are gathered into new arrays"}

    def __init__(self, spec: CacheWriteSpec) -> None:
        self.spec = spec

    def plan(self, step: CacheWriteStep) -> None:
        self.tokens = np.flatnonzero(step.host_slot_mapping >= 0)
        self.block, self.offset = np.divmod(step.host_slot_mapping[self.tokens], self.spec.block_size)

    def launch(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, **layer: torch.Tensor
    ) -> None:
        key_slots, value_slots = by_slot(bits(key_cache), bits(value_cache), self.spec.layout.name)
        for new, slots, scale in ((key, key_slots, "k_scale"), (value, value_slots, "v_scale")):
            if self.spec.kv_dtype:
                scaled = new.float().numpy()[self.tokens] / layer[scale].numpy()[:, None]
                rows = fp8_bits(scaled, self.spec.kv_dtype)
            else:
                rows = bits(new)[self.tokens]
            if self.spec.layout.name == "HND_SWIZZLED":
                rows = swizzled(rows, self.offset, 16 // rows.itemsize)
            slots[self.block, self.offset] = rows.reshape(len(rows), *slots.shape[2:])


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a CPU tensor as unsigned integers of its own width: NumPy has no bf16, and a copy needs no numbers."""
    import torch

    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(unsigned).numpy()


def fp8_bits(x: Any, kv_dtype: str) -> Any:
    """Round float32 to fp8, to nearest even, what is too large to the largest: [...] uint8, as NumPy has no such type.

    A number is sign | exponent, counted from `bias` | mantissa; exponent 0 holds multiples of the smallest step.
    """
    mantissa, bias, most = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}[kv_dtype]
    size = np.minimum(np.where(np.isnan(x), 0, np.abs(x)), np.float32(most))
    exponent = np.frexp(np.maximum(size, 2.0 ** (1 - bias)))[1] - 1
    steps = np.rint(np.ldexp(size, mantissa - exponent))  # below 2 ** mantissa only where the exponent is the smallest
    # One step past the last of an exponent is the first of the next, as the bits count on.
    magnitude = np.where(np.isnan(x), 127, steps + (exponent + bias - 1) * 2**mantissa)
    return (magnitude + 128 * np.signbit(x)).astype(np.uint8)


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

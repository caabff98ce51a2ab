"""torch.cache_write: scatter by `index_put_`; every layout, CPU and GPU, capturable with padding in the batch.

A mask would drop the padded tokens, but its size is known only after a synchronisation. So padding repeats the write of
the first token that has a slot: the same bytes to the same place, whoever comes last. When all are padding, what stands in
slot 0 is written back to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.guards import workspace
from harness.ops.dtypes import ITEMSIZE, movable, torch_dtype
from harness.ops.quantised import quantise
from harness.registry import Prepared, Unsupported

if TYPE_CHECKING:
    from harness.ops.cache_write import CacheWriteSpec, CacheWriteStep


def prepare(spec: CacheWriteSpec) -> CacheWrite:
    if why := spec.layout.why_not(spec):
        raise Unsupported(why)
    return CacheWrite(spec)


class CacheWrite(Prepared):
    """Buffers, one entry a token, filled by `plan` without a synchronisation

    source           [max_num_tokens]                int64    token whose key and value are written
    block, offset    [max_num_tokens]                int64    where to
    chunk            [max_num_tokens, num_chunks]    int64    HND_SWIZZLED only: which 16-byte chunk comes where
    any_valid        []                              bool     whether any token has a slot
    """

    ledger = {"temporaries": "rows are gathered (and swizzled) into new tensors before the scatter"}

    def __init__(self, spec: CacheWriteSpec) -> None:
        self.spec = spec
        integers = [workspace(spec.max_num_tokens, torch.int64, spec.device) for _ in range(3)]
        self.source, self.block, self.offset = integers
        self.any_valid = workspace((), torch.bool, spec.device)
        self.workspace_bytes = 3 * 8 * spec.max_num_tokens + 1
        if spec.layout.name == "HND_SWIZZLED":
            num_chunks = spec.head_dim * ITEMSIZE[spec.cache_dtype] // 16
            self.chunk = workspace((spec.max_num_tokens, num_chunks), torch.int64, spec.device)
            self.workspace_bytes += 8 * self.chunk.numel()

    def plan(self, step: CacheWriteStep) -> None:
        slots = step.slot_mapping
        self.num_tokens = len(slots)
        if not self.num_tokens:
            return
        valid = slots >= 0
        first = valid.to(torch.int32).argmax()
        token = torch.arange(self.num_tokens, device=slots.device)
        target = torch.where(valid, slots, slots.index_select(0, first[None]).clamp_min(0))
        torch.any(valid, out=self.any_valid)
        self.source[: self.num_tokens] = torch.where(valid, token, first)
        self.block[: self.num_tokens] = target // self.spec.block_size
        self.offset[: self.num_tokens] = target % self.spec.block_size
        if self.spec.layout.name == "HND_SWIZZLED":
            self.chunk[: self.num_tokens] = chunk_sources(target % self.spec.block_size, self.chunk.shape[1])

    def launch(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, **layer: torch.Tensor
    ) -> None:
        if len(key) != self.num_tokens:
            raise ValueError(f"torch.cache_write: planned for {self.num_tokens} tokens (got {len(key)})")
        if self.num_tokens:
            key_slots, value_slots = by_slot(movable(key_cache), movable(value_cache), self.spec.layout.name)
            self._scatter(key, key_slots, layer.get("k_scale"))
            self._scatter(value, value_slots, layer.get("v_scale"))

    def _scatter(self, tokens: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> None:
        block, offset = self.block[: self.num_tokens], self.offset[: self.num_tokens]
        rows = tokens.index_select(0, self.source[: self.num_tokens])
        if scale is not None:
            rows = movable(quantise(rows, scale[:, None], torch_dtype(self.spec.cache_dtype)))
        if self.spec.layout.name == "HND_SWIZZLED":
            chunks = rows.view(torch.int64).unflatten(2, (self.chunk.shape[1], 2))
            index = self.chunk[: self.num_tokens, None, :, None].expand(chunks.shape)
            rows = chunks.gather(2, index).flatten(2).view(rows.dtype)
        rows = rows.reshape(self.num_tokens, *slots.shape[2:])
        present = slots[block[:1], offset[:1]]
        slots.index_put_((block, offset), torch.where(self.any_valid, rows, present))


def by_slot(key_cache: torch.Tensor, value_cache: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """View caches with block and offset in front: [num_blocks, block_size, num_kv_heads, ...]."""
    if layout in ("NHD", "KV_NHD"):
        return key_cache, value_cache
    if layout == "X_PACKED":
        return key_cache.permute(0, 3, 1, 2, 4), value_cache.permute(0, 3, 1, 2)
    return key_cache.transpose(1, 2), value_cache.transpose(1, 2)


def chunk_sources(offset: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Which chunk stands at each place of a swizzled row, [num_tokens, num_chunks]; a last group of fewer than 8 stays."""
    place = torch.arange(num_chunks, device=offset.device)
    return torch.where(place < num_chunks // 8 * 8, place ^ (offset[:, None] % 8), place)

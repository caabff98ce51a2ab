"""triton.cache_write: one program a token and a tile of its heads; HND, NHD and KV_NHD are three sets of strides."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from harness.ops.dtypes import torch_dtype
from harness.registry import Prepared, Unsupported
from impls.triton.interpreter import why_missing

if TYPE_CHECKING:
    from harness.ops.cache_write import CacheWriteSpec, CacheWriteStep

#: elements of K, and of V, that one program moves
TILE = 2048


@triton.jit
def scatter(
    key, value, key_cache, value_cache, slot_mapping,
    key_token_stride, value_token_stride, key_block_stride, value_block_stride, offset_stride, head_stride,
    num_heads: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr, heads_tile: tl.constexpr, dim_tile: tl.constexpr,
):
    """Grid (num_tokens, ceil(num_heads / heads_tile)). Strides in elements; a row [num_heads, head_dim] has no gaps."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        head = tl.program_id(1) * heads_tile + tl.arange(0, heads_tile)[:, None]
        dim = tl.arange(0, dim_tile)[None, :]
        inside = (head < num_heads) & (dim < head_dim)
        block = slot // block_size  # 64-bit, and so are the offsets below
        place = slot % block_size * offset_stride + head * head_stride + dim
        read = head * head_dim + dim
        keys = tl.load(key + token * key_token_stride + read, inside)
        values = tl.load(value + token * value_token_stride + read, inside)
        tl.store(key_cache + block * key_block_stride + place, keys, inside)
        tl.store(value_cache + block * value_block_stride + place, values, inside)


def prepare(spec: CacheWriteSpec) -> CacheWrite:
    reason = why_missing(torch.device(spec.device).type)
    if reason:
        raise Unsupported(reason)
    return CacheWrite(spec)


class CacheWrite(Prepared):
    """Holds no memory: `plan` keeps the step's own slot_mapping."""

    def __init__(self, spec: CacheWriteSpec) -> None:
        self.spec = spec
        self.dim_tile = triton.next_power_of_2(spec.head_dim)
        self.heads_tile = max(1, min(triton.next_power_of_2(spec.num_kv_heads), TILE // self.dim_tile))
        self.kernels = self._compile() if torch.device(spec.device).type == "cuda" else ()

    def plan(self, step: CacheWriteStep) -> None:
        self.slot_mapping = step.slot_mapping

    def launch(self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        if len(key) != len(self.slot_mapping):
            raise ValueError(f"triton.cache_write: planned for {len(self.slot_mapping)} tokens (got {len(key)})")
        self._scatter(key, value, key_cache, value_cache, self.slot_mapping)

    def _scatter(self, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> Any:
        spec = self.spec
        if not len(slot_mapping):
            return None
        by_token = spec.layout.name in ("NHD", "KV_NHD")
        offset_stride, head_stride = key_cache.stride()[1:3] if by_token else (key_cache.stride(2), key_cache.stride(1))
        return scatter[(len(slot_mapping), triton.cdiv(spec.num_kv_heads, self.heads_tile))](
            key, value, key_cache, value_cache, slot_mapping,
            key.stride(0), value.stride(0), key_cache.stride(0), value_cache.stride(0), offset_stride, head_stride,
            num_heads=spec.num_kv_heads, head_dim=spec.head_dim, block_size=spec.block_size,
            heads_tile=self.heads_tile, dim_tile=self.dim_tile,
        )

    def _compile(self) -> tuple[dict[str, Any], ...]:
        """Launch once on a padded token, which writes nothing, so that no timed launch compiles."""
        spec = self.spec
        new = torch.empty((1, spec.num_kv_heads, spec.head_dim), dtype=torch_dtype(spec.dtype), device=spec.device)
        shape = (1, spec.num_kv_heads, spec.block_size, spec.head_dim)
        caches = spec.layout.empty(shape, torch_dtype(spec.dtype), spec.device)
        compiled = self._scatter(new, new, *caches, torch.full((1,), -1, dtype=torch.int64, device=spec.device))
        return ({
            "name": "scatter",
            "registers": compiled.n_regs,
            "shared_bytes": compiled.metadata.shared,
            "spill_bytes": compiled.n_spills * 4,
            "digest": hashlib.sha256(compiled.asm["cubin"]).hexdigest()[:12],
        },)

"""triton.cache_write: one program a token and a tile of its heads; HND, NHD and KV_NHD are three sets of strides.

fp8 is rounded by integers and not by a cast: the interpreter's cast neither saturates nor rounds halves to even, and compiled
it needs sm_89 for e4m3. So the code that a CPU tests is the code that runs on every GPU.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from harness.ops.dtypes import movable, torch_dtype
from harness.registry import Prepared, Unsupported
from impls.triton.interpreter import why_missing

if TYPE_CHECKING:
    from harness.ops.cache_write import CacheWriteSpec, CacheWriteStep

#: elements of K, and of V, that one program moves
TILE = 2048
#: bits of the mantissa, bias of the exponent, code of the largest number
FP8 = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}


@triton.jit
def quantised(x, scale, mantissa: tl.constexpr, bias: tl.constexpr, largest: tl.constexpr):
    """x / scale as codes of fp8, uint8: rounded to nearest even, what is too large the largest number; NaN stays NaN."""
    scaled = tl.div_rn(x.to(tl.float32), scale)
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    cut: tl.constexpr = 23 - mantissa
    normal = ((size + ((1 << (cut - 1)) - 1) + ((size >> cut) & 1)) >> cut) - ((127 - bias) << mantissa)
    # Below the smallest exponent numbers are steps of one size, to which adding a power of two rounds a float.
    power: tl.constexpr = (127 + cut + 1 - bias) << 23
    steps = (tl.abs(scaled) + tl.full([], power, tl.int32).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - power
    code = tl.minimum(tl.where(size < ((128 - bias) << 23), steps, normal), largest)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def scatter(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale,
    key_token_stride, value_token_stride, key_block_stride, value_block_stride, offset_stride, head_stride,
    num_heads: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr, heads_tile: tl.constexpr, dim_tile: tl.constexpr,
    scale_stride: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr, largest: tl.constexpr,
):
    """Grid (num_tokens, ceil(num_heads / heads_tile)). Strides in elements; a row [num_heads, head_dim] has no gaps.

    A quantised cache is given as bytes, with the `mantissa` of its type; that is 0 for others, which have no scales.
    """
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
        if mantissa:
            of_head = tl.minimum(head, num_heads - 1) * scale_stride
            keys = quantised(keys, tl.load(k_scale + of_head), mantissa, bias, largest)
            values = quantised(values, tl.load(v_scale + of_head), mantissa, bias, largest)
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

    def launch(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, **layer: torch.Tensor
    ) -> None:
        if len(key) != len(self.slot_mapping):
            raise ValueError(f"triton.cache_write: planned for {len(self.slot_mapping)} tokens (got {len(key)})")
        self._scatter(key, value, movable(key_cache), movable(value_cache), self.slot_mapping, **layer)

    def _scatter(self, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, **scales: Any) -> Any:
        spec = self.spec
        mantissa, bias, largest = FP8[spec.kv_dtype] if spec.kv_dtype else (0, 0, 0)
        if not len(slot_mapping):
            return None
        by_token = spec.layout.name in ("NHD", "KV_NHD")
        offset_stride, head_stride = key_cache.stride()[1:3] if by_token else (key_cache.stride(2), key_cache.stride(1))
        return scatter[(len(slot_mapping), triton.cdiv(spec.num_kv_heads, self.heads_tile))](
            key, value, key_cache, value_cache, slot_mapping, scales.get("k_scale"), scales.get("v_scale"),
            key.stride(0), value.stride(0), key_cache.stride(0), value_cache.stride(0), offset_stride, head_stride,
            num_heads=spec.num_kv_heads, head_dim=spec.head_dim, block_size=spec.block_size,
            heads_tile=self.heads_tile, dim_tile=self.dim_tile, scale_stride=int(spec.kv_scales == "head"),
            mantissa=mantissa, bias=bias, largest=largest,
        )

    def _compile(self) -> tuple[dict[str, Any], ...]:
        """Launch once on a padded token, which writes nothing, so that no timed launch compiles."""
        spec = self.spec
        new = torch.empty((1, spec.num_kv_heads, spec.head_dim), dtype=torch_dtype(spec.dtype), device=spec.device)
        shape = (1, spec.num_kv_heads, spec.block_size, spec.head_dim)
        caches = [movable(cache) for cache in spec.layout.empty(shape, torch_dtype(spec.cache_dtype), spec.device)]
        scales = {name: torch.ones(shape, device=spec.device) for name, shape in spec.layer_shapes.items()}
        compiled = self._scatter(new, new, *caches, torch.full((1,), -1, dtype=torch.int64, device=spec.device), **scales)
        return ({
            "name": "scatter",
            "registers": compiled.n_regs,
            "shared_bytes": compiled.metadata.shared,
            "spill_bytes": compiled.n_spills * 4,
            "digest": hashlib.sha256(compiled.asm["cubin"]).hexdigest()[:12],
        },)

"""Cache write: scatter new keys and values to their slots. Plain data, no torch.

    key_cache[block(slot[i]), offset(slot[i])] = key[i], the same for value; slot = block * block_size + offset

A quantised cache is given key / k_scale, divided in float32 and rounded to nearest even; what is too large for its type
becomes the largest number of it.

A slot of -1 is padding and writes nothing. No slot occurs twice; two tokens may go to one block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from harness.ops.attention import DTYPES
from harness.ops.case import Case
from harness.ops.dtypes import ITEMSIZE
from harness.ops.features import KV_DTYPES, KV_SCALES, features_of
from harness.ops.layouts import Layout

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheWriteCase(Case):
    """Write `num_tokens` new tokens, of which `num_padding` (spread among them) have slot -1.

    order    "scattered": every token to a slot of its own choosing (decode);
             "runs": tokens in order through shuffled blocks (prefill)
    dtype, kv_dtype, kv_scales    of the tokens; of the cache and its scales, as in AttentionCase
    """

    op: ClassVar[str] = "cache_write"

    num_kv_heads: int
    head_dim: int
    block_size: int
    num_tokens: int
    num_padding: int = 0
    num_blocks: int = 1024
    order: str = "scattered"
    dtype: str = "bf16"
    kv_dtype: str | None = None
    kv_scales: str = "tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("num_kv_heads", "head_dim", "block_size", "num_blocks")
        self.require_count("num_tokens", "num_padding")
        self.require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}", self.dtype)
        good = self.kv_dtype is None or self.kv_dtype in KV_DTYPES
        self.require(good, f"kv_dtype must be None or one of {', '.join(KV_DTYPES)}", self.kv_dtype)
        self.require(self.kv_scales in KV_SCALES, f"kv_scales must be one of {', '.join(KV_SCALES)}", self.kv_scales)
        good = self.kv_dtype is not None or self.kv_scales == "tensor"
        self.require(good, "kv_scales are for a cache with a kv_dtype", self.kv_scales)
        self.require(self.order in ("scattered", "runs"), "order must be 'scattered' or 'runs'", self.order)
        self.require(self.num_padding <= self.num_tokens, "num_padding must be 0 to num_tokens", self.num_padding)
        self.require(
            self.num_tokens - self.num_padding <= self.num_blocks * self.block_size,
            "num_tokens must fit the pool's slots",
            (self.num_tokens, self.num_blocks * self.block_size),
        )

    @property
    def features(self) -> tuple[str, ...]:
        """The type of a quantised cache, if it is one."""
        return features_of(self)

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def cache_bytes(self) -> int:
        """K and V of the whole pool, one layer."""
        return 2 * self.num_blocks * self.block_size * self.num_kv_heads * self.head_dim * ITEMSIZE[self.cache_dtype]

    @property
    def traffic_bytes(self) -> int:
        """Each written token is read once and written once, K and V; a slot is 8 bytes."""
        written = 2 * (self.num_tokens - self.num_padding) * self.num_kv_heads * self.head_dim
        return written * (ITEMSIZE[self.dtype] + ITEMSIZE[self.cache_dtype]) + 8 * self.num_tokens

    @property
    def flops(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheWriteSpec:
    """What `prepare` sees. `launch(key, value, key_cache, value_cache, **layer)`, key and value [num_tokens, num_kv_heads,
    head_dim]; `layer_shapes` names what comes in `layer`."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    layout: Layout
    num_blocks: int
    max_num_tokens: int
    device: str
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kv_dtype: str | None = None
    kv_scales: str = "tensor"

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that `launch` takes by keyword, float32, and their shapes."""
        scales = (self.num_kv_heads if self.kv_scales == "head" else 1,)
        return {"k_scale": scales, "v_scale": scales} if self.kv_dtype else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheWriteStep:
    """What `plan` sees: slot_mapping [num_tokens] int64 on the device, and host_slot_mapping on the host."""

    slot_mapping: torch.Tensor
    host_slot_mapping: np.ndarray

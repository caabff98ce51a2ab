"""How K and V lie in memory: an implementation's choice, made by the harness outside every timed region.

Tensors are made in the canonical order, that of `HND`:

    key, value    [num_blocks, num_kv_heads, block_size, head_dim]

A `Layout` makes its own (key_cache, value_cache) of them and back. Neither may alias the other, except that `HND`
is the canonical order itself and is not copied.

Sources: HND FlashInfer and TensorRT-LLM; NHD FlashAttention and vLLM's V1 engine; KV_NHD Ascend ATB and FlashInfer's
five-dimensional cache; X_PACKED vLLM's paged_attention_v1 and _v2; HND_SWIZZLED is ours (docs/method.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.ops.dtypes import ITEMSIZE

if TYPE_CHECKING:
    import torch

    from harness.ops.case import Case

    Pair = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A cache layout.

    arrange     canonical (key, value) -> (key_cache, value_cache) as an implementation takes them
    restore     the way back
    paged       False for CONTIGUOUS, whose tensors are gathered by the operator from the tables
    unit        bytes of which a token's head must be a whole number
    """

    name: str
    arrange: Callable[[torch.Tensor, torch.Tensor], Pair]
    restore: Callable[[torch.Tensor, torch.Tensor], Pair]
    paged: bool = True
    unit: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def head_dimension(self) -> int:
        """Which dimension of value_cache counts KV heads."""
        return 2 if self.name in ("NHD", "KV_NHD", "CONTIGUOUS") else 1

    def why_not(self, case: Case) -> str | None:
        """Return why `case` has no such layout, as a sentence, or None."""
        itemsize = ITEMSIZE[getattr(case, "cache_dtype", getattr(case, "dtype", "f32"))]
        head_dim = getattr(case, "head_dim", self.unit)
        if head_dim * itemsize % self.unit:
            return f"{self.name}: head_dim must be a multiple of {self.unit // itemsize}, {self.unit} bytes (got {head_dim})"
        return None

    def empty(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Pair:
        """Make an uninitialised cache of canonical `shape`, born in this layout."""
        import torch

        key, value = torch.empty((2, *shape), dtype=dtype, device="meta").unbind(0)
        arranged = self.arrange(key, value)
        if self is KV_NHD:
            both = torch.empty((shape[0], 2, shape[2], shape[1], shape[3]), dtype=dtype, device=device)
            return both[:, 0], both[:, 1]
        made = [torch.empty(part.shape, dtype=dtype, device=device) for part in arranged]
        return made[0], made[1]


def _copy(view: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, even of a view that is contiguous by accident (one head, or one token a block)."""
    import torch

    return view.clone(memory_format=torch.contiguous_format)


def _swap_heads(cache: torch.Tensor) -> torch.Tensor:
    return _copy(cache.transpose(1, 2))


def _kv_nhd(key: torch.Tensor, value: torch.Tensor) -> Pair:
    """One tensor [num_blocks, 2, block_size, num_kv_heads, head_dim], handed over as its two halves (strided views)."""
    num_blocks, num_heads, block_size, head_dim = key.shape
    both = key.new_empty((num_blocks, 2, block_size, num_heads, head_dim))
    both[:, 0].copy_(key.transpose(1, 2))
    both[:, 1].copy_(value.transpose(1, 2))
    return both[:, 0], both[:, 1]


def _pack(key: torch.Tensor, value: torch.Tensor) -> Pair:
    """K [num_blocks, num_kv_heads, head_dim/x, block_size, x] with x = 16 bytes, V [.., head_dim, block_size]."""
    x = 16 // key.element_size()
    num_blocks, num_heads, block_size, head_dim = key.shape
    if head_dim % x:
        raise ValueError(f"X_PACKED: head_dim must be a multiple of {x}, 16 bytes (got {head_dim})")
    packed = key.reshape(num_blocks, num_heads, block_size, head_dim // x, x).transpose(2, 3)
    return _copy(packed), _copy(value.transpose(2, 3))


def _unpack(key_cache: torch.Tensor, value_cache: torch.Tensor) -> Pair:
    num_blocks, num_heads, _, block_size, _ = key_cache.shape
    key = key_cache.transpose(2, 3).reshape(num_blocks, num_heads, block_size, -1)
    return key, _copy(value_cache.transpose(2, 3))


def _swizzle(cache: torch.Tensor) -> torch.Tensor:
    """Move 16-byte chunk c of token t to chunk c ^ (t % 8), inside each block and head; its own inverse.

    Chunks are permuted in groups of eight; a last group of fewer (head_dim not a multiple of 8 chunks) stays as it is.
    """
    import torch

    chunk = 16 // cache.element_size()
    num_blocks, num_heads, block_size, head_dim = cache.shape
    if head_dim % chunk:
        raise ValueError(f"HND_SWIZZLED: head_dim must be a multiple of {chunk}, 16 bytes (got {head_dim})")
    num_chunks = head_dim // chunk
    token = torch.arange(block_size, device=cache.device)[:, None]
    place = torch.arange(num_chunks, device=cache.device)[None, :]
    place = torch.where(place < num_chunks // 8 * 8, place ^ (token % 8), place.expand(block_size, -1))
    # As integers: torch's gather of 16-bit floats on a CPU changes the payload of a NaN.
    chunks = cache.contiguous().view(torch.int64).reshape(num_blocks, num_heads, block_size, num_chunks, 2)
    index = place[None, None, :, :, None].expand(num_blocks, num_heads, -1, -1, 2)
    return chunks.gather(3, index).reshape(num_blocks, num_heads, block_size, -1).view(cache.dtype)


def _not_paged(key: torch.Tensor, value: torch.Tensor) -> Pair:
    raise NotImplementedError("CONTIGUOUS is gathered from the block tables by the operator, not from blocks alone")


HND = Layout(name="HND", arrange=lambda key, value: (key, value), restore=lambda key, value: (key, value))
NHD = Layout(
    name="NHD",
    arrange=lambda key, value: (_swap_heads(key), _swap_heads(value)),
    restore=lambda key, value: (_swap_heads(key), _swap_heads(value)),
)
KV_NHD = Layout(name="KV_NHD", arrange=_kv_nhd, restore=lambda key, value: (_swap_heads(key), _swap_heads(value)))
X_PACKED = Layout(name="X_PACKED", arrange=_pack, restore=_unpack, unit=16)
HND_SWIZZLED = Layout(
    name="HND_SWIZZLED",
    arrange=lambda key, value: (_swizzle(key), _swizzle(value)),
    restore=lambda key, value: (_swizzle(key), _swizzle(value)),
    unit=16,
)
CONTIGUOUS = Layout(name="CONTIGUOUS", arrange=_not_paged, restore=_not_paged, paged=False)

LAYOUTS = {layout.name: layout for layout in (HND, NHD, KV_NHD, X_PACKED, HND_SWIZZLED, CONTIGUOUS)}
PAGED = (HND, NHD, KV_NHD, X_PACKED)

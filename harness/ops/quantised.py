"""fp8 caches: the scales by which a pool is stored, and what a cache write must leave: round(x / scale), saturating."""

from __future__ import annotations

import torch

#: room that a scale leaves above the largest number of what it scales, drawn within these: K and V differ, and so do heads
ROOM = {"k_scale": (1.0, 2.0), "v_scale": (2.5, 5.0)}
#: elements that are converted at a time, which takes about twelve bytes each
AT_ONCE = 1 << 26


def quantise(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x / scale in fp8, as kernels store it: divided in float32, rounded to nearest even; what is too large is the largest.

    `scale` broadcasts against x. NaN stays NaN.
    """
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-most, most).to(dtype)


def by_head(scale: torch.Tensor) -> torch.Tensor:
    """A scale of shape [1] or [num_kv_heads] against pools [num_blocks, num_kv_heads, block_size, head_dim]."""
    return scale[:, None, None]


def draw_scale(
    name: str, pool: torch.Tensor, used: torch.Tensor, kv_scales: str, dtype: torch.dtype, chance: torch.Generator
) -> torch.Tensor:
    """A scale for the slots of `pool` that are in use, [num_blocks, block_size]; [1] or, with "head", [num_kv_heads] f32.

    Nothing in use saturates; how much room is left is drawn.
    """
    largest = torch.zeros(pool.shape[1], device=pool.device)
    for some, there in _chunks(pool, used):
        wide = some.float().abs_().masked_fill_(~there[:, None, :, None], 0.0)
        largest = torch.maximum(largest, wide.amax((0, 2, 3)))
    if kv_scales == "tensor":
        largest = largest.amax(keepdim=True)
    low, high = ROOM[name]
    room = low + (high - low) * torch.rand(len(largest), generator=chance, device=pool.device)
    return largest.clamp_(min=2.0**-10) * room / torch.finfo(dtype).max


def store(pool: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Quantise a whole pool, poison and all: infinity stays where the type has it, NaN takes both signs in turn."""
    has_inf = into.dtype == torch.float8_e5m2
    signs = torch.tensor([0x00, 0x80], dtype=torch.uint8, device=pool.device).repeat(-(-pool.shape[3] // 2))[: pool.shape[3]]
    begin = 0
    for some, _ in _chunks(pool, pool[:, 0, :, 0]):
        stored = quantise(some, by_head(scale), into.dtype)
        if has_inf:
            stored = torch.where(some.isinf(), some.float(), stored.float()).to(into.dtype)
        words = stored.view(torch.uint8)
        into[begin : begin + len(some)].view(torch.uint8).copy_(torch.where(some.isnan(), words | signs, words))
        begin += len(some)
    return into


def _chunks(pool: torch.Tensor, beside: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Some blocks at a time, and the same of `beside`."""
    num_blocks = max(1, AT_ONCE // max(pool[:1].numel(), 1))
    return list(zip(torch.split(pool, num_blocks), torch.split(beside, num_blocks), strict=True))

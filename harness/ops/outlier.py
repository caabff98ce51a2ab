"""The outlier: one sequence's last KV head lies far from all others, scores near -150, values about 1000 times as large.

A softmax does not change when all scores of a row fall together, so every token still counts as much. Whoever begins the
maximum at 0, or takes -100 for minus infinity, divides 0 by 0 there or attends to what it has masked; whoever clamps or
saturates values shows, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from harness.ops.attention import AttentionCase, AttentionStep

#: what every score is moved by: its exponential is 0 in every float of at most 32 bits
MOVED = -150.0
TIMES = 1024.0  # exact in every dtype; a cache with one scale for all heads would have no digits left for the others


def plant_outlier(
    case: AttentionCase, step: AttentionStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[int, int] | None:
    """Move the last KV head of the last sequence that is asked and has keys; returns (sequence, KV head).

    None where there is no other head or sequence that would stay as it is, or where sinks would be all that is left of a row.
    """
    if case.sinks:
        return None
    seqs = [seq for seq, lens in enumerate(zip(case.seq_lens, case.q_lens, strict=True)) if all(lens)]
    if len(seqs) * case.num_kv_heads < 2:
        return None
    seq, head = seqs[-1], case.num_kv_heads - 1
    rows = slice(case.query_starts[seq], case.query_starts[seq + 1])
    heads = slice(head * case.group, (head + 1) * case.group)
    blocks = torch.from_numpy(step.host_block_tables[seq, : case.blocks_per_seq[seq]].copy()).long().to(key.device)
    # Along one direction queries and keys stand still, against each other; across it they stay N(0,1).
    direction = (1 - 2 * (torch.arange(case.head_dim, device=key.device) % 2)) / case.head_dim**0.5
    spread = 5 * case.head_dim**0.5  # of q . k across it
    along = math.sqrt(-MOVED / abs(case.softmax_scale) + spread)
    query[rows, heads] = _along(query[rows, heads], direction, along)
    key[blocks, head] = _along(key[blocks, head], direction, -math.copysign(along, case.softmax_scale))
    if not case.kv_dtype or case.kv_scales == "head":
        value[blocks, head] *= TIMES
    return seq, head


def _along(rows: torch.Tensor, direction: torch.Tensor, length: float) -> torch.Tensor:
    wide = rows.float()
    return (wide + (length - wide @ direction)[..., None] * direction).to(rows.dtype)

"""torch.blocked: walks the block tables a tile of blocks at a time, with one online softmax across all of them.

What the Ascend article's loop should have been: that one takes a softmax of every block alone and adds the results up.
All sequences, heads and query tokens go in step. Sequences stand longest first, so those that have ended drop off the end
of each tensor, and no table entry past the last block is ever touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from impls.torch_paged import Batch, Batched, gather

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep


def prepare(spec: AttentionSpec) -> Blocked:
    return Blocked(spec)


class Blocked(Batched):
    """Holds the plan's integers and the offsets 0, 1, 2, ... of a tile."""

    ledger = {
        "casts": "query once, keys and values tile by tile, to float32",
        "allocates": "one tile of K and V, its scores, and float32 sums",
    }

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.tile_blocks = max(1, spec.params["tile"] // spec.block_size)
        self.offsets = torch.arange(self.tile_blocks * spec.block_size, device=spec.device)
        self.workspace_bytes += 8 * len(self.offsets)

    def plan(self, step: AttentionStep) -> None:
        self.deal(step, lambda seq, seq_len, q_len: None)

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        self.check_tokens(query)
        for batch in self.batches:
            attended, logs = self._walk(query.index_select(0, batch.tokens), key_cache, value_cache, batch)
            out.index_copy_(0, batch.tokens, attended.to(out.dtype))
            lse.index_copy_(0, batch.tokens, logs)
        self.finish_blind(out, lse)

    def _walk(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of query [num_seqs * q_len, num_q_heads, head_dim], in float32."""
        spec, num_seqs = self.spec, len(batch.seqs)
        shape = (num_seqs, batch.q_len, spec.num_kv_heads, spec.group, spec.head_dim)
        rows = query.float().mul_(spec.scale).view(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
        largest = rows.new_full((*rows.shape[:3], 1), -torch.inf)
        total, sums = torch.zeros_like(largest), torch.zeros_like(rows)
        limits = batch.limits.repeat(1, spec.group)[:, None, :, None]
        lengths = batch.limits[:, None, -1:, None]
        for first in range(0, batch.lengths[0], len(self.offsets)):
            live = sum(length > first for length in batch.lengths)
            begin = first // spec.block_size
            table = batch.table[:live, begin : begin + self.tile_blocks]
            pair = gather(key_cache, value_cache, spec.layout, table, spec.num_kv_heads)
            key, value = (part.to(torch.float32, memory_format=torch.contiguous_format) for part in pair)
            positions = self.offsets[: key.shape[2]] + first
            scores = rows[:live] @ key.mT
            # Whole tiles that every row sees need no mask. The first key is seen by all, so `larger` is finite.
            if first + len(self.offsets) > batch.lengths[live - 1] - batch.q_len + 1:
                scores = scores.masked_fill(positions >= limits[:live], -torch.inf)
                value = value.masked_fill(positions[:, None] >= lengths[:live], 0.0)
            larger = torch.maximum(largest[:live], scores.amax(-1, keepdim=True))
            rescale = (largest[:live] - larger).exp()
            weights = (scores - larger).exp_()
            total[:live] = total[:live] * rescale + weights.sum(-1, keepdim=True)
            sums[:live] = sums[:live] * rescale + weights @ value
            largest[:live] = larger
        lse = (largest + total.log()).unflatten(2, (spec.group, -1)).permute(0, 3, 1, 2, 4)
        out = (sums / total).unflatten(2, (spec.group, -1)).permute(0, 3, 1, 2, 4)
        return out.reshape(query.shape), lse.reshape(query.shape[:2])

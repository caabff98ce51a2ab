"""torch.blocked: walks the block tables a tile of blocks at a time, with one online softmax across all of them.

What the Ascend article's loop should have been: that one takes a softmax of every block alone and adds the results up.
All sequences, heads and query tokens go in step. Sequences stand longest first, so those that have ended drop off the end
of each tensor, and no table entry past the last block is ever touched.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        **layer: torch.Tensor,
    ) -> None:
        self.check_tokens(query)
        for batch in self.batches:
            attended, logs = self._walk(query.index_select(0, batch.tokens), key_cache, value_cache, batch, layer)
            out.index_copy_(0, batch.tokens, attended.to(out.dtype))
            lse.index_copy_(0, batch.tokens, logs)
        self.finish_blind(out, lse, layer.get("sinks"))

    def _walk(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: Batch,
        layer: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of query [num_seqs * q_len, num_q_heads, head_dim], in float32."""
        spec, num_seqs = self.spec, len(batch.seqs)
        shape = (num_seqs, batch.q_len, spec.num_kv_heads, spec.group, spec.head_dim)
        rows = query.float().mul_(spec.scale).view(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
        largest = rows.new_full((*rows.shape[:3], 1), -torch.inf)
        total, sums = torch.zeros_like(largest), torch.zeros_like(rows)
        if spec.sinks:  # the score of a key without a value: the sum begins with it
            largest = self._of_rows(layer["sinks"], batch.q_len).repeat(num_seqs, 1, 1, 1)
            total = torch.ones_like(largest)
        limits = batch.limits.repeat(1, spec.group)[:, None, :, None]
        lengths = batch.limits[:, None, -1:, None]
        for first in range(0, batch.lengths[0], len(self.offsets)):
            live = sum(length > first for length in batch.lengths)
            begin = first // spec.block_size
            table = batch.table[:live, begin : begin + self.tile_blocks]
            pair = gather(key_cache, value_cache, spec.layout, table, spec.num_kv_heads)
            key, value = (part.to(torch.float32, memory_format=torch.contiguous_format) for part in pair)
            if spec.kv_dtype:
                key *= layer["k_scale"].view(-1, 1, 1)
                value *= layer["v_scale"].view(-1, 1, 1)
            positions = self.offsets[: key.shape[2]] + first
            scores = rows[:live] @ key.mT
            if spec.softcap:
                scores = (scores / spec.softcap).tanh_().mul_(spec.softcap)
            if spec.alibi:
                scores += self._of_rows(layer["alibi_slopes"], batch.q_len) * (positions - (limits[:live] - 1))
            if spec.window:
                scores = scores.masked_fill(positions < limits[:live] - spec.window, -torch.inf)
                value = value.masked_fill(positions[:, None] < lengths[:live] - batch.q_len + 1 - spec.window, 0.0)
            # Whole tiles that every row sees need no mask.
            if first + len(self.offsets) > batch.lengths[live - 1] - batch.q_len + 1:
                scores = scores.masked_fill(positions >= limits[:live], -torch.inf)
                value = value.masked_fill(positions[:, None] >= lengths[:live], 0.0)
            larger = torch.maximum(largest[:live], scores.amax(-1, keepdim=True))
            # Without a window the first key is seen by all, so `larger` is finite.
            shift = larger.masked_fill(larger == -torch.inf, 0.0) if spec.window else larger
            rescale = (largest[:live] - shift).exp()
            weights = (scores - shift).exp_()
            total[:live] = total[:live] * rescale + weights.sum(-1, keepdim=True)
            sums[:live] = sums[:live] * rescale + weights @ value
            largest[:live] = larger
        lse = (largest + total.log()).unflatten(2, (spec.group, -1)).permute(0, 3, 1, 2, 4)
        out = (sums / total).unflatten(2, (spec.group, -1)).permute(0, 3, 1, 2, 4)
        return out.reshape(query.shape), lse.reshape(query.shape[:2])

    def _of_rows(self, by_head: torch.Tensor, q_len: int) -> torch.Tensor:
        """What is given a query head as [1, num_kv_heads, group * q_len, 1]."""
        return by_head.view(1, -1, self.spec.group, 1).expand(-1, -1, -1, q_len).flatten(2)[..., None]

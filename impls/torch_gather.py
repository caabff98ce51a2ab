"""torch.gather: copy the blocks in use together, then scaled_dot_product_attention over them.

Sequences whose numbers of blocks round up to one power of two share a call, so that at most half of what is gathered is
padding. Padding repeats a sequence's own second block behind the mask; the slots past its end and before its window are set
to zero, since SDPA multiplies what it masks by 0, and 0 * NaN is NaN. What is quantised is worked on in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from harness.ops.dtypes import movable, torch_dtype
from impls.torch_paged import Batch, Batched, gather
from impls.torch_sdpa import LSE_COST, attend, attend_in_float32

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep


def prepare(spec: AttentionSpec) -> Gather:
    return Gather(spec)


class Gather(Batched):
    """Holds the plan's integers, the positions 0, 1, 2, ... of keys, and a zero."""

    ledger = {"allocates": "a copy of all K and V in use, the scores, and masks of ragged batches", "lse": LSE_COST}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        if {"softcap", "alibi", "sinks"} & set(spec.features):
            self.ledger = {"allocates": "a copy of all K and V in use, in float32, the scores, and masks"}
        elif spec.kv_dtype:
            self.ledger = {**self.ledger, "casts": "query, keys and values to float32"}
        self.positions = torch.arange(spec.max_blocks_per_seq * spec.block_size, device=spec.device)
        self.zero = torch.zeros((), dtype=torch_dtype(spec.cache_dtype), device=spec.device)
        self.workspace_bytes += 8 * len(self.positions) + self.zero.element_size()

    def plan(self, step: AttentionStep) -> None:
        self.deal(step, lambda seq, seq_len, q_len: (-(-seq_len // self.spec.block_size) - 1).bit_length())

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        **layer: torch.Tensor,
    ) -> None:
        self.check_tokens(query)
        for batch in self.batches:
            key, value = gather(key_cache, value_cache, self.spec.layout, batch.table, self.spec.num_kv_heads)
            if batch.tails.numel():
                for part in (key, value):
                    movable(part)[batch.tails[0], :, batch.tails[1]] = movable(self.zero)
            queries = query.index_select(0, batch.tokens).unflatten(0, (len(batch.seqs), batch.q_len))
            if self.spec.kv_dtype:
                queries = queries.float()
                key, value = (
                    part.float() * layer[scale].view(-1, 1, 1) for part, scale in ((key, "k_scale"), (value, "v_scale"))
                )
            attended, logs = self._attend(batch, queries, key, value, layer)
            out.index_copy_(0, batch.tokens, attended.to(out.dtype))
            lse.index_copy_(0, batch.tokens, logs)
        self.finish_blind(out, lse, layer.get("sinks"))

    def _attend(
        self, batch: Batch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spec, mask = self.spec, self._mask(batch, key.shape[2])
        if not (spec.softcap or spec.alibi or spec.sinks):
            return attend(query, key, value, mask, spec.scale)
        bias = None
        if spec.alibi:  # [num_seqs, num_q_heads, q_len, num_keys]
            ahead = self.positions[: key.shape[2]] - (batch.limits[:, :, None] - 1)
            bias = layer["alibi_slopes"][:, None, None] * ahead[:, None]
        return attend_in_float32(query, key, value, mask, spec.scale, spec.softcap, bias, layer.get("sinks"))

    def _mask(self, batch: Batch, num_keys: int) -> torch.Tensor | None:
        """[num_seqs, q_len, num_keys] bool, or None where every token sees every key."""
        if batch.q_len == 1 and batch.lengths[-1] == num_keys and not self.spec.window:
            return None
        seen = self.positions[:num_keys] < batch.limits[:, :, None]
        if self.spec.window:
            seen &= self.positions[:num_keys] >= batch.limits[:, :, None] - self.spec.window
        return seen

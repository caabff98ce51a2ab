"""torch.gather: copy the blocks in use together, then scaled_dot_product_attention over them.

Sequences whose numbers of blocks round up to one power of two share a call, so that at most half of what is gathered is
padding. Padding repeats a sequence's own first block behind the mask; the slots past its end are set to zero, since SDPA
multiplies what it masks by 0, and 0 * NaN is NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.ops.dtypes import torch_dtype
from impls.torch_paged import Batch, Batched, gather
from impls.torch_sdpa import LSE_COST, attend

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep


def prepare(spec: AttentionSpec) -> Gather:
    return Gather(spec)


class Gather(Batched):
    """Holds the plan's integers, the positions 0, 1, 2, ... of keys, and a zero."""

    ledger = {"allocates": "a copy of all K and V in use, the scores, and masks of ragged batches", "lse": LSE_COST}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.positions = torch.arange(spec.max_blocks_per_seq * spec.block_size, device=spec.device)
        self.zero = torch.zeros((), dtype=torch_dtype(spec.dtype), device=spec.device)
        self.workspace_bytes += 8 * len(self.positions) + self.zero.element_size()

    def plan(self, step: AttentionStep) -> None:
        self.deal(step, lambda seq, seq_len, q_len: (-(-seq_len // self.spec.block_size) - 1).bit_length())

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        self.check_tokens(query)
        for batch in self.batches:
            key, value = gather(key_cache, value_cache, self.spec.layout, batch.table, self.spec.num_kv_heads)
            if batch.tails.numel():
                for part in (key, value):
                    part[batch.tails[0], :, batch.tails[1]] = self.zero
            queries = query.index_select(0, batch.tokens).unflatten(0, (len(batch.seqs), batch.q_len))
            attended, logs = attend(queries, key, value, self._mask(batch, key.shape[2]), self.spec.scale)
            out.index_copy_(0, batch.tokens, attended)
            lse.index_copy_(0, batch.tokens, logs)
        self.finish_blind(out, lse)

    def _mask(self, batch: Batch, num_keys: int) -> torch.Tensor | None:
        """[num_seqs, q_len, num_keys] bool, or None where every token sees every key."""
        if batch.q_len == 1 and batch.lengths[-1] == num_keys:
            return None
        return self.positions[:num_keys] < batch.limits[:, :, None]

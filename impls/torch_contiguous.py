"""torch.contiguous: scaled_dot_product_attention over a cache that is not paged. What paging costs is torch.gather beside it.

Neighbouring sequences of equal lengths share a call. Each call looks at a view that ends where its sequences end, so
nothing is copied or masked for length; a batch in which every length is its own takes as many calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from impls.torch_paged import Batched
from impls.torch_sdpa import LSE_COST, attend

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep


def prepare(spec: AttentionSpec) -> Contiguous:
    return Contiguous(spec)


class Contiguous(Batched):
    """Caches [num_seqs, max_len, num_kv_heads, head_dim]; holds the plan's integers and the positions of keys."""

    ledger = {"allocates": "the scores, and masks where several tokens of a sequence query", "lse": LSE_COST}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.positions = torch.arange(spec.max_seq_len, device=spec.device)
        self.workspace_bytes += 8 * len(self.positions)

    def plan(self, step: AttentionStep) -> None:
        lens = np.stack([step.host_seq_lens, np.diff(step.host_query_start_loc)])
        run = np.cumsum((np.diff(lens, axis=1, prepend=-1) != 0).any(axis=0)) if step.num_seqs else lens
        self.deal(step, lambda seq, seq_len, q_len: int(run[seq]))

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        self.check_tokens(query)
        for batch in self.batches:
            first, last, length = batch.seqs[0], batch.seqs[-1], batch.lengths[0]
            key, value = (cache[first : last + 1, :length].transpose(1, 2) for cache in (key_cache, value_cache))
            queries = query.index_select(0, batch.tokens).unflatten(0, (len(batch.seqs), batch.q_len))
            mask = None if batch.q_len == 1 else self.positions[:length] < batch.limits[:, :, None]
            attended, logs = attend(queries, key, value, mask, self.spec.scale)
            out.index_copy_(0, batch.tokens, attended)
            lse.index_copy_(0, batch.tokens, logs)
        self.finish_blind(out, lse, None)

"""FlashAttention-2: flash_attn_with_kvcache over a block table, one query token a sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from impls.peers.libraries import FA2
from impls.peers.peer import Peer, Rows

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep


class FlashAttention2(Peer):
    """The library allocates its output, so a copy is part of the launch; since 2026 it also reads lengths back to the host."""

    ledger = {"allocates": "its output and log-sum-exp", "copies": "the output into the tensor given"}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._attend = FA2.load().flash_attn_with_kvcache

    def _plan(self, step: AttentionStep) -> None:
        self._rows = Rows.of(step)

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        made, logs = self._attend(
            query[:, None], key_cache, value_cache, cache_seqlens=self._rows.seq_lens, block_table=self._rows.block_tables,
            softmax_scale=self.spec.scale, causal=True, return_softmax_lse=True,
            window_size=(self.spec.window - 1, 0) if self.spec.window else (-1, -1), softcap=self.spec.softcap or 0.0,
            alibi_slopes=self.layer.get("alibi_slopes"),
        )
        out.copy_(made[:, 0])
        if self.wants_lse:
            lse.copy_(logs[:, :, 0])  # [num_seqs, num_q_heads, 1]
            lse.masked_fill_(lse.isposinf(), -math.inf)  # how it marks a token that sees no key

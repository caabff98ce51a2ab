"""FlashInfer's cache write: append_paged_kv_cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from harness.guards import workspace
from harness.registry import Prepared, Unsupported
from impls.peers.libraries import FLASHINFER
from impls.peers.peer import require_same_strides

if TYPE_CHECKING:
    from harness.ops.cache_write import CacheWriteSpec, CacheWriteStep

MOST_THREADS = 1024  # of a CTA, which has one for each 16 bytes of a token's keys


class CacheWrite(Prepared):
    """It is told sequences and positions, not slots: here all tokens are one sequence, in which each has a page of its own."""

    ledger = {"library": "pages and positions of the tokens are made in plan"}

    def __init__(self, spec: CacheWriteSpec) -> None:
        threads = spec.num_kv_heads * spec.head_dim // 8
        if threads > MOST_THREADS:
            raise Unsupported(f"has a thread for each 16 bytes of a token's keys, {MOST_THREADS} at most (got {threads})")
        self._spec = spec
        self._tables = workspace(3 * spec.max_num_tokens + 3, torch.int32, spec.device).zero_()
        self.workspace_bytes = 4 * len(self._tables)
        self._append = FLASHINFER.load("flashinfer.page").append_paged_kv_cache

    def plan(self, step: CacheWriteStep) -> None:
        slots, size = step.host_slot_mapping, self._spec.block_size
        if (slots < 0).any():
            raise Unsupported("writes every token, so no slot may be -1")
        blocks, offsets = np.divmod(slots, size)
        self._num_tokens = count = len(slots)
        tables = np.concatenate([np.zeros(count), np.arange(count) * size + offsets, blocks, [0, count, size]])
        self._tables[: len(tables)].copy_(torch.from_numpy(tables.astype(np.int32)))

    def launch(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, **layer: torch.Tensor
    ) -> None:
        if len(key) != self._num_tokens:
            raise ValueError(f"planned for {self._num_tokens} tokens (got {len(key)})")
        require_same_strides(key_cache, value_cache)
        if len(key):
            counts = (self._num_tokens,) * 3 + (2, 1)
            sequences, positions, pages, starts, last = self._tables[: sum(counts)].split(counts)
            caches, layout = (key_cache, value_cache), self._spec.layout.name
            self._append(key, value, sequences, positions, caches, pages, starts, last, kv_layout=layout)

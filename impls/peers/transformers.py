"""transformers' paged attention, as its continuous batching runs it: tokens gathered by index, then one dense call for all.

The whole batch is one sequence of queries against one of keys, and a mask of their product keeps sequences apart. So the
work grows with the square of the batch.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.ops.dtypes import ITEMSIZE, torch_dtype
from harness.registry import Unsupported
from impls.peers.libraries import TRANSFORMERS
from impls.peers.peer import Peer

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

MOST_MASK_BYTES = 8 << 30


class Paged(Peer):
    """Index and mask are made in plan, where continuous batching makes them once a step.

    read_index    [num_keys]                         int64, slots of all tokens, one sequence after the other
    mask          [1, 1, num_tokens, num_keys]       as the query, 0 where a token sees a key, else the lowest number
    """

    ledger = {"allocates": "a copy of all K and V in use, scores, and the output", "copies": "the output into the tensor given"}
    module = "transformers.integrations.sdpa_attention"
    function = "sdpa_attention_forward"
    extra: Mapping[str, Any] = {}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._attend = getattr(TRANSFORMERS.load(self.module), self.function)
        self._layer: Any = types.SimpleNamespace(num_key_value_groups=spec.group, is_causal=True, training=False, layer_idx=0)

    def _plan(self, step: AttentionStep) -> None:
        spec, lens = self.spec, step.host_seq_lens.astype(np.int64)
        size = step.num_tokens * int(lens.sum()) * ITEMSIZE[spec.dtype]
        if size > MOST_MASK_BYTES:
            raise Unsupported(f"its mask of all queries by all keys must be at most {MOST_MASK_BYTES} bytes (got {size})")
        if (lens == 0).any() or (np.diff(step.host_query_start_loc) > lens).any():
            raise Unsupported("every query token must see a key: its softmax over a row that is masked whole is even, or NaN")
        position = np.concatenate([np.arange(n) for n in lens])
        owner = np.repeat(np.arange(len(lens)), lens)
        slots = step.host_block_tables[owner, position // spec.block_size].astype(np.int64) * spec.block_size
        q_lens = np.diff(step.host_query_start_loc)
        asker = np.repeat(np.arange(len(q_lens)), q_lens)
        back = step.host_query_start_loc[1:][asker] - np.arange(step.num_tokens)  # 1 for a sequence's last token
        arrays = (slots + position % spec.block_size, position, owner, asker, lens[asker] - back)
        self._read, at, of, ask, last = (torch.from_numpy(array).to(spec.device) for array in arrays)
        seen = (of[None] == ask[:, None]) & (at[None] <= last[:, None])
        dtype = torch_dtype(spec.dtype)
        self._mask = torch.zeros(seen.shape, dtype=dtype, device=spec.device).masked_fill_(~seen, torch.finfo(dtype).min)

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        key, value = (  # [1, num_kv_heads, num_keys, head_dim]
            cache.view(-1, *cache.shape[2:]).index_select(0, self._read).transpose(0, 1)[None]
            for cache in (key_cache, value_cache)
        )
        made, _ = self._attend(
            self._layer, query.transpose(0, 1)[None], key, value, self._mask[None, None], scaling=self.spec.scale, **self.extra
        )
        out.copy_(made[0])


class Gathered:
    """Stands for its cache, whose update returns all keys and values of the batch: they come gathered already."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both as [num_keys, num_kv_heads, head_dim], from [1, num_kv_heads, num_keys, head_dim]."""
        return key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)


class EagerPaged(Paged):
    """The same by matrix products and a softmax. It insists on a cache of its own kind."""

    extra = {"cache": Gathered(), "read_index": None, "write_index": None}

    module = "transformers.integrations.eager_paged"
    function = "eager_paged_attention_forward"

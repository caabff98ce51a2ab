"""numpy.dense: attention in float64 over the gathered keys of each sequence, no cleverness. What the others are read against.

Kernels that are not in float64 are held against harness/truth.py; that page and this one were written apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.ops.dtypes import ITEMSIZE
from harness.registry import Prepared, Unsupported

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

    Array = np.ndarray[Any, np.dtype[np.float64]]


def prepare(spec: AttentionSpec) -> Dense:
    return Dense(spec)


class PerSequence(Prepared):
    """Walks the sequences; a subclass says how one of them attends."""

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.layout.name in ("X_PACKED", "HND_SWIZZLED") and spec.head_dim * ITEMSIZE[spec.dtype] % 16:
            raise Unsupported(f"{spec.layout}: head_dim must be whole chunks of 16 bytes (got {spec.head_dim} of {spec.dtype})")
        self.spec = spec

    def plan(self, step: AttentionStep) -> None:
        self.step = step

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        step, spec = self.step, self.spec
        if len(query) != step.num_tokens:
            raise ValueError(f"planned for {step.num_tokens} query tokens (got {len(query)})")
        starts = step.host_query_start_loc.tolist()
        for seq, seq_len in enumerate(step.host_seq_lens.tolist()):
            rows = slice(starts[seq], starts[seq + 1])
            out[rows], lse[rows] = 0.0, -np.inf
            if not seq_len or rows.start == rows.stop:
                continue
            blocks = step.host_block_tables[seq, : -(-seq_len // spec.block_size)]
            queries = grouped(query[rows], spec.num_kv_heads)
            attended, logs = self.attend(queries, key_cache, value_cache, blocks, seq_len)
            out[rows] = torch.from_numpy(ungrouped(attended, rows.stop - rows.start))
            lse[rows] = torch.from_numpy(ungrouped(logs, rows.stop - rows.start))

    def attend(
        self, queries: Array, key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: Any, seq_len: int
    ) -> tuple[Array, Array]:
        """Attend with queries [num_kv_heads, q_len * group, head_dim]; returns the same of out, and lse without head_dim."""
        raise NotImplementedError

    def read(self, key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: Any) -> tuple[Array, Array]:
        """Return K and V of these blocks in float64, [num_kv_heads, tokens, head_dim], from any layout."""
        ids = torch.from_numpy(blocks.astype(np.int64))
        pair = self.spec.layout.restore(key_cache.index_select(0, ids), value_cache.index_select(0, ids))
        shape = (self.spec.num_kv_heads, len(blocks) * self.spec.block_size, self.spec.head_dim)
        key, value = (part.double().numpy().transpose(1, 0, 2, 3).reshape(shape) for part in pair)
        return key, value

    def hidden(self, num_rows: int, seq_len: int, first: int, num_keys: int) -> Any:
        """Whether each row must not see each key of first..first + num_keys: [num_rows, num_keys]."""
        q_len = num_rows // self.spec.group
        token = np.arange(num_rows) // self.spec.group
        return np.arange(first, first + num_keys)[None, :] > (seq_len - q_len + token)[:, None]


class Dense(PerSequence):
    """All keys of a sequence at once, one KV head at a time."""

    ledger = {"casts": "query, keys and values to float64", "allocates": "a float64 copy of each sequence's keys and values"}

    def attend(
        self, queries: Array, key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: Any, seq_len: int
    ) -> tuple[Array, Array]:
        key, value = (part[:, :seq_len] for part in self.read(key_cache, value_cache, blocks))
        hidden = self.hidden(queries.shape[1], seq_len, 0, seq_len)
        out, lse = np.zeros(queries.shape), np.full(queries.shape[:2], -np.inf)
        sees = ~hidden.all(axis=1)
        for head in range(len(queries)):
            scores = self.spec.scale * (queries[head][sees] @ key[head].T)
            scores[hidden[sees]] = -np.inf
            largest = scores.max(axis=1, keepdims=True, initial=-np.inf)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=1, keepdims=True)
            out[head, sees] = weights / total @ value[head]
            lse[head, sees] = (largest + np.log(total))[:, 0]
        return out, lse


def grouped(query: torch.Tensor, num_kv_heads: int) -> Array:
    """Turn [q_len, num_q_heads, head_dim] into float64 [num_kv_heads, q_len * group, head_dim]."""
    rows: Array = query.double().numpy()
    q_len, num_q_heads, head_dim = rows.shape
    by_head = rows.reshape(q_len, num_kv_heads, num_q_heads // num_kv_heads, head_dim).transpose(1, 0, 2, 3)
    return by_head.reshape(num_kv_heads, -1, head_dim)


def ungrouped(rows: Array, q_len: int) -> Array:
    """The way back, with or without head_dim: [q_len, num_q_heads, ...]."""
    num_kv_heads, num_rows, *rest = rows.shape
    group = num_rows // q_len
    by_token = np.moveaxis(rows.reshape(num_kv_heads, q_len, group, *rest), 1, 0)
    return by_token.reshape(q_len, num_kv_heads * group, *rest)

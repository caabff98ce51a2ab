"""numpy.dense: attention in float64 over the gathered keys of each sequence, no cleverness. What the others are read against.

Kernels that are not in float64 are held against harness/truth.py; that page and this one were written apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.ops.dtypes import movable
from harness.registry import Prepared, Unsupported

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

    Array = np.ndarray[Any, np.dtype[np.float64]]


def prepare(spec: AttentionSpec) -> Dense:
    return Dense(spec)


class PerSequence(Prepared):
    """Walks the sequences; a subclass says how one of them attends."""

    def __init__(self, spec: AttentionSpec) -> None:
        if why := spec.layout.why_not(spec):
            raise Unsupported(why)
        self.spec = spec

    def plan(self, step: AttentionStep) -> None:
        self.step = step

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        **layer: torch.Tensor,
    ) -> None:
        step, spec = self.step, self.spec
        if len(query) != step.num_tokens:
            raise ValueError(f"planned for {step.num_tokens} query tokens (got {len(query)})")
        self.layer: dict[str, Array] = {name: tensor.double().numpy() for name, tensor in layer.items()}
        starts = step.host_query_start_loc.tolist()
        for seq, seq_len in enumerate(step.host_seq_lens.tolist()):
            rows = slice(starts[seq], starts[seq + 1])
            out[rows], lse[rows] = 0.0, layer.get("sinks", -np.inf)
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

    def first_key(self, num_rows: int, seq_len: int) -> int:
        """The first key that any row sees: with a window those before it may hold anything."""
        q_len = num_rows // self.spec.group
        return max(seq_len - q_len - self.spec.window + 1, 0) if self.spec.window else 0

    def read(self, key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: Any) -> tuple[Array, Array]:
        """Return K and V of these blocks in float64, [num_kv_heads, tokens, head_dim], from any layout."""
        ids = torch.from_numpy(blocks.astype(np.int64))
        pair = self.spec.layout.restore(*(movable(cache).index_select(0, ids) for cache in (key_cache, value_cache)))
        shape = (self.spec.num_kv_heads, len(blocks) * self.spec.block_size, self.spec.head_dim)
        wide = [part.contiguous().view(key_cache.dtype).double().numpy() for part in pair]
        key, value = (part.transpose(1, 0, 2, 3).reshape(shape) for part in wide)
        if self.spec.kv_dtype:
            key, value = (part * self.layer[name][:, None, None] for part, name in ((key, "k_scale"), (value, "v_scale")))
        return key, value

    def scores(self, queries: Array, key: Array, seq_len: int, first: int, head: Any = slice(None)) -> Array:
        """Scores of keys first, first + 1, ... of one KV head or all: [..., num_rows, num_keys], -inf where one is not seen."""
        spec, num_rows, num_keys = self.spec, queries.shape[1], key.shape[1]
        scores: Array = spec.scale * (queries[head] @ np.swapaxes(key[head], -1, -2))
        if spec.softcap:
            scores = spec.softcap * np.tanh(scores / spec.softcap)
        position = seq_len - num_rows // spec.group + np.arange(num_rows) // spec.group
        ahead = np.arange(first, first + num_keys) - position[:, None]
        if spec.alibi:
            scores += self.of_rows("alibi_slopes", num_rows)[head] * ahead
        scores[..., (ahead > 0) | (ahead <= -(spec.window or np.inf))] = -np.inf
        return scores

    def of_rows(self, name: str, num_rows: int) -> Array:
        """What is given a query head as [num_kv_heads, num_rows, 1]."""
        by_head = self.layer[name].reshape(self.spec.num_kv_heads, 1, self.spec.group)
        return np.repeat(by_head, num_rows // self.spec.group, axis=1).reshape(self.spec.num_kv_heads, num_rows, 1)

    def sinks(self, num_rows: int) -> Array:
        """Scores of the keys that have no value, [num_kv_heads, num_rows, 1]; -inf where the layer has no sinks."""
        return self.of_rows("sinks", num_rows) if self.spec.sinks else np.full((self.spec.num_kv_heads, num_rows, 1), -np.inf)


class Dense(PerSequence):
    """All keys of a sequence at once, one KV head at a time."""

    ledger = {"casts": "query, keys and values to float64", "allocates": "a float64 copy of each sequence's keys and values"}

    def attend(
        self, queries: Array, key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: Any, seq_len: int
    ) -> tuple[Array, Array]:
        num_rows, size = queries.shape[1], self.spec.block_size
        first = self.first_key(num_rows, seq_len)
        begin = first // size * size
        pair = self.read(key_cache, value_cache, blocks[first // size :])
        key, value = (part[:, first - begin : seq_len - begin] for part in pair)
        out, lse = np.empty(queries.shape), np.empty(queries.shape[:2])
        for head in range(len(queries)):  # of KV, one at a time
            scores, sink = self.scores(queries, key, seq_len, first, head), self.sinks(num_rows)[head]
            largest = np.maximum(scores.max(axis=1, keepdims=True), sink)
            # A row that sees nothing keeps -inf, from which nothing can be subtracted.
            shift = np.where(np.isneginf(largest), 0.0, largest)
            weights = np.exp(scores - shift)
            total = weights.sum(axis=1, keepdims=True) + np.exp(sink - shift)
            empty = total == 0
            out[head] = weights / np.where(empty, 1.0, total) @ value[head]
            lse[head] = np.where(empty, -np.inf, shift + np.log(np.where(empty, 1.0, total)))[:, 0]
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

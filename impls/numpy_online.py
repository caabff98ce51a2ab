"""numpy.online: block by block with the online softmax, in float64, as MiniPaged-Qwen's article derives it.

For each block t with scores s and values v, of a row with running maximum m, denominator l and sum o:

    m' = max(m, max s)
    l' = l * exp(m - m') + sum_j exp(s_j - m')
    o' = o * exp(m - m') + sum_j exp(s_j - m') * v_j

and out = o / l, lse = m + log l at the end. Normalised once, over all blocks: a softmax of each block alone is another
function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from impls.numpy_dense import PerSequence

if TYPE_CHECKING:
    import torch

    from harness.ops.attention import AttentionSpec
    from impls.numpy_dense import Array


def prepare(spec: AttentionSpec) -> Online:
    return Online(spec)


class Online(PerSequence):
    """One block at a time, all KV heads and rows of a sequence."""

    ledger = {"casts": "query, keys and values to float64", "allocates": "a float64 copy of one block at a time"}

    def attend(
        self, queries: Array, key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: Any, seq_len: int
    ) -> tuple[Array, Array]:
        num_rows, size = queries.shape[1], self.spec.block_size
        first_key = self.first_key(num_rows, seq_len)
        # A sink is the score of a key without a value: the sum begins with it, once a row.
        largest = self.sinks(num_rows)
        total, attended = np.isfinite(largest).astype(np.float64), np.zeros(queries.shape)
        for index in range(first_key // size, len(blocks)):
            first, end = max(index * size, first_key), min((index + 1) * size, seq_len)
            slots = slice(first - index * size, end - index * size)
            key, value = (part[:, slots] for part in self.read(key_cache, value_cache, blocks[index : index + 1]))
            scores = self.scores(queries, key, seq_len, first)
            larger = np.maximum(largest, scores.max(axis=2, keepdims=True))
            # A row that has seen no key yet keeps -inf, from which nothing can be subtracted.
            shift = np.where(np.isneginf(larger), 0.0, larger)
            rescale, weights = np.exp(largest - shift), np.exp(scores - shift)
            total = total * rescale + weights.sum(axis=2, keepdims=True)
            attended = attended * rescale + weights @ value
            largest = larger
        seen = total[..., 0] > 0
        out, lse = np.zeros(queries.shape), np.full(queries.shape[:2], -np.inf)
        out[seen] = attended[seen] / total[seen]
        lse[seen] = (largest + np.log(total, where=total > 0, out=np.zeros_like(total)))[..., 0][seen]
        return out, lse

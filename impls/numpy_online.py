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
        largest, total = np.full((*queries.shape[:2], 1), -np.inf), np.zeros((*queries.shape[:2], 1))
        attended = np.zeros(queries.shape)
        for index in range(len(blocks)):
            first = index * self.spec.block_size
            used = min(seq_len - first, self.spec.block_size)
            key, value = (part[:, :used] for part in self.read(key_cache, value_cache, blocks[index : index + 1]))
            scores = self.spec.scale * (queries @ key.transpose(0, 2, 1))
            scores[:, self.hidden(queries.shape[1], seq_len, first, used)] = -np.inf
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

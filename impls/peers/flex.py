"""torch's FlexAttention over a paged cache: the pool is one long sequence of keys, and a block mask says who sees which.

Only a sequence's last block, where it is not full, asks the mask of each key. On a GPU the kernel is compiled on its first
launch; on a CPU the unfused reference runs, which looks at the whole pool.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from harness.guards import workspace
from impls.peers.peer import Peer, Rows

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

Q_TILE = 128  # rows of a block mask: one query token a sequence needs one
FOREIGN = 1 << 30  # position of the tokens of a block that is another sequence's


class Flex(Peer):
    """Buffers, filled by `plan`, at which a compiled kernel looks

    lengths       [max_num_seqs]                                 int32
    positions     [max_num_seqs, num_blocks]                     int32, of each pool block's first token in the sequence
    counts        [2, max_num_seqs, 1, 1]                        int32, full blocks, and partial ones
    indices       [2, max_num_seqs, 1, 1, max_blocks_per_seq]    int32, which
    """

    ledger = {"allocates": "its output and log-sum-exp", "copies": "both into the tensors given"}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        seqs, width = max(spec.max_num_seqs, 1), spec.max_blocks_per_seq
        shapes = ((seqs,), (seqs, spec.num_blocks), (2, seqs, 1, 1), (2, seqs, 1, 1, width))
        buffers = [workspace(shape, torch.int32, spec.device) for shape in shapes]
        self._lengths, self._positions, self._counts, self._indices = buffers
        self.workspace_bytes = sum(4 * buffer.numel() for buffer in buffers)
        on_gpu = torch.device(spec.device).type == "cuda"
        self._attend: Any = torch.compile(flex_attention, dynamic=False) if on_gpu else unfused

    def _plan(self, step: AttentionStep) -> None:
        rows, block_size = Rows.of(step), self.spec.block_size
        tables, lens = rows.host_block_tables, rows.host_seq_lens
        count, width = tables.shape
        full, owned = lens // block_size, -(-lens // block_size)
        column = np.arange(width)[None]
        positions = np.full((count, self.spec.num_blocks), FOREIGN, np.int32)
        seq, place = np.nonzero(column < owned[:, None])
        positions[seq, tables[seq, place]] = place * block_size
        indices = np.zeros((2, count, 1, 1, width), np.int32)
        indices[0, :, 0, 0] = np.where(column < full[:, None], tables, 0)
        last = np.maximum(owned - 1, 0)
        indices[1, :, 0, 0, 0] = np.where(owned > full, tables[np.arange(count), last], 0)
        counts = np.stack([full, owned - full]).astype(np.int32)[..., None, None]
        for buffer, array in ((self._lengths, lens), (self._positions, positions)):
            buffer[:count].copy_(torch.from_numpy(np.ascontiguousarray(array)))
        for buffer, array in ((self._counts, counts), (self._indices, indices)):
            buffer[:, :count, ..., : array.shape[-1]].copy_(torch.from_numpy(array))
        self._mask = self._block_mask(count)

    def _block_mask(self, count: int) -> BlockMask:
        lengths, positions, block_size = self._lengths, self._positions, self.spec.block_size

        def sees(seq: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return positions[seq, key // block_size] + key % block_size < lengths[seq]

        (full, partial), (full_indices, partial_indices) = self._counts[:, :count], self._indices[:, :count]
        return BlockMask.from_kv_blocks(
            partial, partial_indices, full, full_indices, BLOCK_SIZE=(Q_TILE, block_size), mask_mod=sees,
            seq_lengths=(1, self.spec.num_blocks * block_size), compute_q_blocks=False,
        )  # fmt: skip

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        key, value = (  # [1, num_kv_heads, slots of the pool, head_dim]
            cache.view(1, -1, *cache.shape[2:]).transpose(1, 2) for cache in (key_cache, value_cache)
        )
        made, aux = self._attend(
            query[:, :, None], key, value, block_mask=self._mask, scale=self.spec.scale, enable_gqa=self.spec.group > 1,
            return_aux=AuxRequest(lse=True),
        )
        out.copy_(made[:, :, 0])
        lse.copy_(aux.lse[:, :, 0])


def unfused(*arguments: Any, **fields: Any) -> Any:
    """The reference, without its advice to compile it: a CPU's compiled kernel gives no log-sum-exp."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        return flex_attention(*arguments, **fields)

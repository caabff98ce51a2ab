"""ceiling.torch_read: what this CPU reads from the case's own blocks at best, by torch's fastest sum over scattered rows.

`embedding_bag` reads each listed row once, with all threads, and keeps only a sum: as fast as a sum over one long tensor,
while a gather would write what it reads. It adds floats, so what it returns proves nothing; `checksum` sums the same rows
as integers, when asked, outside the timed launch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from harness.ops.dtypes import ITEMSIZE
from harness.ops.layouts import NHD
from harness.ops.sharing import blocks_to_read
from harness.registry import Prepared, Unsupported

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

WORD_BYTES = 4
LONGEST_ROW = 8192  # words; the sums of a bag stay in a core's own cache
BAGS_PER_THREAD = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows to read of a cache seen as [..., width] words: `index` [num_rows] int64, cut into bags that begin at `offsets`."""

    width: int
    index: torch.Tensor
    offsets: torch.Tensor


def prepare(spec: AttentionSpec) -> Reader:
    return Reader(spec)


class Reader(Prepared):
    """Reads full blocks in long rows, and of a sequence's last block the rows of its tokens."""

    ledger = {"checksum": "summed over the same rows when asked, not by the timed launch"}

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        row_words, rest = divmod(spec.head_dim * ITEMSIZE[spec.cache_dtype], WORD_BYTES)
        if rest:
            raise Unsupported(f"head_dim must be whole words of 4 bytes (got {spec.head_dim} of {spec.cache_dtype})")
        self.block_words = spec.num_kv_heads * spec.block_size * row_words
        self.heads = 1 if spec.layout is NHD else spec.num_kv_heads  # in NHD the heads of a token are one row
        self.token_words = row_words * spec.num_kv_heads // self.heads

    def plan(self, step: AttentionStep) -> None:
        blocks, tokens = blocks_to_read(step, self.spec.block_size, self.spec.window)
        is_full = tokens == self.spec.block_size
        full, tails = blocks[is_full], list(zip(blocks[~is_full].tolist(), tokens[~is_full].tolist(), strict=True))
        parts = num_parts(self.block_words)
        listed = (
            (self.block_words // parts, (full[:, None] * parts + np.arange(parts)).reshape(-1)),
            (self.token_words, token_rows(tails, self.heads, self.spec.block_size)),
        )
        self.rows = [
            Rows(width=width, index=torch.from_numpy(index), offsets=bag_offsets(len(index), torch.get_num_threads()))
            for width, index in listed if len(index)
        ]

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        **layer: torch.Tensor,
    ) -> None:
        """Read; all but the caches is left alone."""
        self._caches = (key_cache, value_cache)
        for cache in self._caches:
            words = cache.view(torch.float32)
            for rows in self.rows:
                embedding_bag(rows.index, words.view(-1, rows.width), rows.offsets, mode="sum")

    @property
    def checksum(self) -> torch.Tensor:
        """Sum of the 32-bit words of all rows that the last launch read, [1] int64."""
        total = torch.zeros(1, dtype=torch.int64)
        for cache in self._caches:
            words = cache.view(torch.int32)
            for rows in self.rows:
                for some in rows.index.split(1024):  # a little at a time: a gather of all would double the memory held
                    total += words.view(-1, rows.width).index_select(0, some).sum(dtype=torch.int64)
        return total


def token_rows(tails: list[tuple[int, int]], heads: int, block_size: int) -> np.ndarray:
    """Rows of the first `tokens` slots of each block in a cache seen as [num_blocks * heads * block_size, ...]."""
    listed = [np.empty(0, np.int64)]
    for block, tokens in tails:
        head = np.arange(heads)[:, None]
        listed.append(((block * heads + head) * block_size + np.arange(tokens)).reshape(-1))
    return np.concatenate(listed)


def num_parts(block_words: int) -> int:
    """Least number of equal rows to cut a block into, none longer than LONGEST_ROW."""
    fewest = -(-block_words // LONGEST_ROW)
    return next(parts for parts in range(fewest, block_words + 1) if block_words % parts == 0)


def bag_offsets(num_rows: int, num_threads: int) -> torch.Tensor:
    """Where bags begin: equal shares, several a thread, so that none waits long for another."""
    share = -(-num_rows // (BAGS_PER_THREAD * num_threads))
    return torch.arange(0, num_rows, share)

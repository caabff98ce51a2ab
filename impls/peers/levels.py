"""What neighbours of a batch share, in levels, as a cascade takes it. Found on block ids, in plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from harness.ops.attention import AttentionStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """Groups of neighbours and the tokens that each group's query tokens see at this level.

    starts            first query token of each group, and the end of the last one
    rows, blocks      whose table has a group's blocks, and from which on
    tokens            of each group; 0 where it shares nothing more
    """

    starts: Sequence[int]
    rows: Sequence[int]
    blocks: Sequence[int]
    tokens: Sequence[int]

    def tensors(self, tables: np.ndarray, block_size: int) -> tuple[torch.Tensor, ...]:
        """As a prefill wrapper takes them, int32 on the host: qo_indptr, paged_kv_indptr, indices, last_page_len."""
        tokens = np.array(self.tokens, np.int64)
        counts = -(-tokens // block_size)
        indices = [tables[row, block : block + n] for row, block, n in zip(self.rows, self.blocks, counts, strict=True)]
        last = tokens - np.maximum(counts - 1, 0) * block_size
        arrays = (self.starts, [0, *np.cumsum(counts)], np.concatenate(indices), last)
        return tuple(torch.from_numpy(np.asarray(array, np.int32)) for array in arrays)


def find_levels(step: AttentionStep, block_size: int, most: int) -> list[Level]:
    """Cut a step into `most` levels at most: blocks with which neighbours begin, then what fewer of them go on with, and so on.

    The last level is each sequence's own. A shared block is one that all query tokens of its sequences see.
    """
    tables, seq_lens, starts = step.host_block_tables, step.host_seq_lens, step.host_query_start_loc
    seen_by_all = np.maximum(seq_lens - np.diff(starts), 0) // block_size
    same = _same_blocks(tables, seen_by_all)
    groups, done, levels = [(0, step.num_seqs)], np.zeros(step.num_seqs, np.int64), list[Level]()
    while len(levels) < most - 1:
        groups = [part for group in groups for part in _neighbours(group, same, done)]
        ends = [int(same[begin : end - 1].min()) if end - begin > 1 else int(done[begin]) for begin, end in groups]
        firsts = [begin for begin, _ in groups]
        blocks = [int(done[begin]) for begin in firsts]
        if ends == blocks:
            break
        tokens = [(end - begin) * block_size for begin, end in zip(blocks, ends, strict=True)]
        levels.append(Level(starts=[*starts[firsts], starts[-1]], rows=firsts, blocks=blocks, tokens=tokens))
        for (begin, end), reached in zip(groups, ends, strict=True):
            done[begin:end] = reached
    own = Level(starts=starts, rows=range(step.num_seqs), blocks=done.tolist(), tokens=(seq_lens - done * block_size).tolist())
    return [*levels, own]


def _same_blocks(tables: np.ndarray, most: np.ndarray) -> np.ndarray:
    """With how many same blocks each sequence and the next one begin, at most as many as both may share."""
    differ = tables[1:] != tables[:-1]
    first = np.where(differ.any(axis=1), differ.argmax(axis=1), tables.shape[1]) if tables.shape[1] else np.zeros(len(differ))
    return np.minimum(first, np.minimum(most[1:], most[:-1]))


def _neighbours(group: tuple[int, int], same: np.ndarray, done: np.ndarray) -> list[tuple[int, int]]:
    """Cut a group where neighbours share no more than what is done."""
    begin, end = group
    cuts = [seq for seq in range(begin + 1, end) if same[seq - 1] <= done[begin]]
    return list(zip([begin, *cuts], [*cuts, end], strict=True))

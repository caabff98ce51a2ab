"""What one step does: rows, what they feed and where it goes, and who is sampled from what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.groups import Group, Sequence
from runtime.manager import BlockManager
from runtime.preemption import NO_PAIRS

Pairs = NDArray[np.int32]
Pick = tuple[Sequence, int]  # who feeds, and how many tokens


@dataclass(kw_only=True)
class Batch:
    """One step's work. Rows with one token stand first.

    rows            the sequences
    q_lens          [num_rows] int32, tokens that each feeds
    seq_lens        [num_rows] int32, tokens in the cache, these included
    tokens          [num_tokens] int64, -1 where the device has it, in the row's state
    slots           [num_tokens] int64
    block_tables    [num_rows, width] int32, a view that the manager's next call invalidates
    sampled         sequences that get a token, and the index of the query token that it is sampled from
    searched        beam searches, and the query tokens of their beams
    copies          [n, 2] int32 pairs of blocks to copy first, after the scheduler's swap_out and swap_in
    """

    rows: list[Sequence]
    q_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    tokens: NDArray[np.int64]
    slots: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    sampled: list[Sequence] = field(default_factory=list)
    sampled_from: list[int] = field(default_factory=list)
    searched: list[tuple[Group, list[int]]] = field(default_factory=list)
    copies: Pairs = field(default_factory=lambda: NO_PAIRS)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_decode(self) -> bool:
        """Whether every row feeds one token."""
        return len(self.tokens) == len(self.rows)

    @property
    def num_ones(self) -> int:
        """Rows that feed one token."""
        return int(np.count_nonzero(self.q_lens == 1))


def make_batch(manager: BlockManager, picks: list[Pick], slots: NDArray[np.int64]) -> Batch:
    """Arrange what was picked and appended, rows of one token first. `slots` are run behind run, in the order of `picks`."""
    counts = np.array([count for _, count in picks], np.int32)
    order = np.argsort(counts != 1, kind="stable").tolist()
    if order != list(range(len(picks))):
        ends = np.cumsum(counts)
        slots = np.concatenate([slots[ends[i] - counts[i] : ends[i]] for i in order])
        picks, counts = [picks[i] for i in order], counts[order]
    rows = [sequence for sequence, _ in picks]
    tokens = np.fromiter(_fed_tokens(picks), np.int64, len(slots))
    ids = [row.sequence_id for row in rows]
    return Batch(
        rows=rows, q_lens=counts, tokens=tokens, slots=slots, copies=manager.take_copies(),
        seq_lens=manager.get_seq_lens_tensor(ids).numpy(), block_tables=manager.get_block_tables_tensor(ids).numpy(),
    )  # fmt: skip


def _fed_tokens(picks: list[Pick]) -> Iterator[int]:
    """Ids of what each pick feeds, -1 for one that only the device knows."""
    for sequence, count in picks:
        fed, tokens = sequence.num_fed, sequence.tokens
        if count == 1:
            yield tokens[fed - 1] if fed <= len(tokens) else -1
        else:
            yield from tokens[fed - count : fed]

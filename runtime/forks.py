"""Forks made while tokens are in flight: they share the slots of these, and must say the same of each.

Nothing is kept but who has still to say. What a slot holds is known once another sequence that names its block is further.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.errors import TokenMismatch
from runtime.prefix import PrefixIndex
from runtime.sequences import SequenceTable

Ints = NDArray[np.int64]


class InFlight:
    """Sequences that share uncommitted slots, each with its length when it was forked."""

    def __init__(self) -> None:
        self._until: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._until)

    def fork(self, sequence_id: int, new_id: int, length: int) -> None:
        """Both await the same tokens below `length`."""
        self._until[sequence_id] = self._until[new_id] = length

    def land(self, table: SequenceTable) -> None:
        """Forget who is gone, and who awaits nothing any more that it shares."""
        for sequence_id, length in list(self._until.items()):
            row = table.row_of.get(sequence_id)
            if row is None or table.committed[row] >= min(length, table.length[row]):
                del self._until[sequence_id]

    def check(self, table: SequenceTable, index: PrefixIndex, counts: Ints, slots: Ints, tokens: NDArray[np.int32]) -> None:
        """Refuse counts[i] tokens of row i, into `slots` run behind run, if a slot was or is given another token too."""
        ends = np.cumsum(counts)
        by_slot = np.argsort(slots, kind="stable")
        twice = (np.diff(slots[by_slot]) == 0) & (np.diff(tokens[by_slot]) != 0)
        if np.count_nonzero(twice):
            first, second = by_slot[np.argmax(twice) :][:2].tolist()
            row, other = (table.order[int(np.searchsorted(ends, at, side="right"))] for at in (second, first))
            _refuse(row, slots[second], other, tokens[first], tokens[second])
        for row, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
            if table.order[row] in self._until:
                self._check_row(table, index, row, slots[end - count : end], tokens[end - count : end])

    def _check_row(self, table: SequenceTable, index: PrefixIndex, row: int, slots: Ints, tokens: NDArray[np.int32]) -> None:
        """Hold one row's tokens against those that others have committed in the same blocks."""
        size, begin = index.block_size, int(table.committed[row])
        for logical in range(begin // size, (begin + slots.size - 1) // size + 1):
            holders = (table.blocks[:, logical] == table.blocks[row, logical]) & (table.num_blocks > logical)
            known = int(table.committed[holders].max(initial=0)) - begin  # of this row's tokens, those before it
            run = slice(max(logical * size - begin, 0), max(min(known, (logical + 1) * size - begin), 0))
            changed = index.flat_tokens[slots[run]] != tokens[run]
            if np.count_nonzero(changed):
                at = run.start + int(np.argmax(changed))
                furthest = int(np.argmax(np.where(holders, table.committed, -1)))
                held = int(index.flat_tokens[slots[at]])
                _refuse(table.order[row], slots[at], table.order[furthest], held, tokens[at])


def _refuse(sequence_id: int, slot: int, other: int, held: int, got: int) -> None:
    raise TokenMismatch(
        f"commit_tokens: sequence {sequence_id} shares slot {slot} with sequence {other}, which says that it holds token "
        f"{held}, got token {got}: what was in flight when a sequence was forked is the same for both; "
        "fork before append_tokens where they are to differ"
    )

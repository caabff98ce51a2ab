"""Everything the manager knows, in one place, and the two moves that touch more than one of its parts."""

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from runtime.blocks import BlockPool
from runtime.copies import PendingCopies
from runtime.forks import InFlight
from runtime.prefix import PrefixIndex
from runtime.sequences import SequenceTable
from runtime.swap import HostPool, Preempted


class Books:
    """Pool, index, sequences, copies and swap of one manager."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self.index = PrefixIndex(num_blocks, block_size)
        self.pool = BlockPool(num_blocks, self.index)
        self.table = SequenceTable()
        self.copies = PendingCopies()
        self.in_flight = InFlight()
        self.host = HostPool(num_host_blocks)
        self.preempted: dict[int, Preempted] = {}
        self.salts: dict[int, Hashable] = {}  # of resident sequences that have one

    def admit(self, sequence_id: int, blocks: NDArray[np.int32], salt: Hashable) -> int:
        """A row for a new sequence that shares `blocks`."""
        row = self.table.add(sequence_id)
        if blocks.size:
            self.pool.hold(blocks)
            self.table.reserve_width(blocks.size)
            self.table.blocks[row, : blocks.size] = blocks
            self.table.num_blocks[row] = blocks.size
        if salt is not None:
            self.salts[sequence_id] = salt
        return row

    def dismiss(self, sequence_id: int, row: int) -> None:
        """Give back a sequence's blocks and its row."""
        blocks = self.table.table(row)
        if len(self.copies):
            self.drop(blocks)
        else:
            self.pool.drop_table(blocks, int(self.table.committed[row]) // self.block_size)
        if self.salts:
            self.salts.pop(sequence_id, None)
        self.table.remove(sequence_id)

    def drop(self, blocks: NDArray[np.integer]) -> None:
        """Give `blocks` back, parents first; a copy into a block nobody will hold any more is not made.

        Its source goes first: what stands before the source stands before the copy too, and is evicted after both.
        """
        if len(self.copies):
            self.drop_each(self.copies.cancel(blocks[self.pool.refs[blocks] == 1]))
        self.pool.drop(blocks)

    def drop_each(self, blocks: list[int]) -> None:
        """Drop blocks one by one, for one may stand there several times."""
        for block in blocks:
            self.pool.drop(np.array([block], np.int32))

    def settle(self, row: int) -> None:
        """Let the next append look at the row's last block again, and keep next_slot behind the last token."""
        table = self.table
        table.room[row] = 0
        last = int(table.length[row]) - 1
        if last >= 0:
            block, offset = divmod(last, self.block_size)
            table.next_slot[row] = int(table.blocks[row, block]) * self.block_size + offset + 1

    def cut(self, row: int, num_blocks: int) -> None:
        """Shorten a row's table to `num_blocks`."""
        table = self.table
        used = int(table.num_blocks[row])
        if num_blocks < used:
            tail = table.blocks[row, num_blocks:used]
            self.drop(tail.copy())
            tail[:] = 0
            table.num_blocks[row] = num_blocks

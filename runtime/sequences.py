"""The table of sequences: one row each, and the rows stand in the order in which they are asked for.

A batch keeps its order from step to step, so the table is kept in that order: `arrange(ids)` moves rows until row i is
ids[i]'s, and usually has nothing to move. Then what a kernel reads (block tables, lengths) *is* the first rows of the
books, and a step copies nothing, however long the context.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.block_tables import BlockTables, Run, runs_of
from runtime.ids import as_id, twice, unknown

EMPTY: Any = object()  # in the place of an id: nobody's row. Not None, which a caller could hand in


@dataclass(frozen=True)
class SequenceState:
    """What is known of a sequence, at the moment it was asked for."""

    sequence_id: int
    sequence_length: int = 0  # tokens with a slot
    block_table: list[int] = field(default_factory=list)  # physical block of each logical block


class SequenceTable:
    """Rows of per-sequence numbers. Row r < n is the r-th of the batch last arranged; other rows are others', or empty.

    Arrays
        blocks     [rows, width]  int32 physical block ids; 0 behind num_blocks[r]
        length     [rows]         int32 tokens with a slot
        num_blocks [rows]         int64 used entries of blocks[r]
        committed  [rows]         int64 tokens whose keys, values and ids are settled
        room       [rows]         int64 tokens that can be appended from next_slot on without looking at anything else
        next_slot  [rows]         int64 slot of the next token where room > 0; the last token's slot + 1
        found      [rows]         int64 tokens found in the pool when the sequence was created or resumed
        present    [rows]         int64 tokens whose keys and values are in the blocks already: more than `length` only after
                                  a full hit, whose last token is computed again and written nowhere
    """

    def __init__(self) -> None:
        self.order: list[int] = []  # whose row it is, or EMPTY
        self.row_of: dict[int, int] = {}
        self._holes: list[int] = []  # heap of empty rows; may name a row twice, or one that is taken
        self.generation = 0  # changes when the arrays do
        self.blocks: NDArray[np.int32]
        self.length: NDArray[np.int32]
        self.numbers: NDArray[np.int64]
        self._end = 0  # no row from here on is anybody's
        self._tables = BlockTables(16, 16)
        self._allocate(16)

    def __len__(self) -> int:
        return len(self.row_of)

    def add(self, sequence_id: int) -> int:
        """A zeroed row for a new sequence."""
        if len(self.row_of) == len(self.order):
            self._grow(2 * len(self.order), self._tables.width)
        row = heapq.heappop(self._holes)
        while self.order[row] is not EMPTY:
            row = heapq.heappop(self._holes)
        self.order[row] = sequence_id
        self.row_of[sequence_id] = row
        self._end = max(self._end, row + 1)
        return row

    def remove(self, sequence_id: int) -> None:
        """Empty a row."""
        row = self.row_of.pop(sequence_id)
        self.order[row] = EMPTY
        heapq.heappush(self._holes, row)
        self.blocks[row, : self.num_blocks[row]] = 0
        self.length[row] = 0
        self.numbers[:, row] = 0

    def reserve_width(self, num_blocks: int) -> None:
        """Make room for tables of `num_blocks` entries."""
        if num_blocks > self._tables.width:  # by little, for what is not used is moved with the rest
            self._grow(len(self.order), num_blocks + num_blocks // 16 + 16)

    def table(self, row: int) -> NDArray[np.int32]:
        """The used part of a row's block table: a view."""
        return self.blocks[row, : self.num_blocks[row]]

    def in_order(self, ids: list[int]) -> bool:
        """Whether the first rows are those of `ids` already."""
        return self.order[: len(ids)] == ids

    def arrange(self, ids: list[int]) -> int:
        """Make row i the row of ids[i]; returns how many. The ids are known and all different."""
        count = len(ids)
        if self.order[:count] == ids:
            return count
        source = np.fromiter(map(self.row_of.__getitem__, ids), np.int64, count)
        while self._end and self.order[self._end - 1] is EMPTY:
            self._end -= 1
        staying = np.zeros(self._end, np.bool_)
        staying[source] = True
        if np.count_nonzero(staying) != count:
            raise twice(count)
        vacated: list[int] = []
        tenants: list[int] = []
        if count < self._end:  # whoever is in the way goes to where one of these came from
            displaced, outside = np.flatnonzero(~staying[:count]), source[source >= count]
            vacated, tenants = outside.tolist(), [self.order[row] for row in displaced.tolist()]
            source = np.concatenate((source, np.arange(count, self._end)))
            source[outside] = displaced
        runs = runs_of(source)
        for begin, end, at in runs or [(0, count, -1)]:
            if begin != at and begin < count:
                self._name(ids, begin, min(end, count))
        self._name_others(vacated, tenants)
        self._move(source, runs)
        return count

    def _name(self, ids: list[int], begin: int, end: int) -> None:
        """Write down whose rows [begin, end) are now."""
        if end - begin == 1:  # faster so
            self.order[begin] = ids[begin]
            self.row_of[ids[begin]] = begin
            return
        self.order[begin:end] = ids[begin:end]
        self.row_of.update(zip(ids[begin:end], range(begin, end), strict=True))

    def _name_others(self, rows: list[int], tenants: list[int]) -> None:
        """Write down who moves to `rows`, behind the batch."""
        for row, tenant in zip(rows, tenants, strict=True):
            self.order[row] = tenant
            if tenant is EMPTY:
                heapq.heappush(self._holes, row)
            else:
                self.row_of[tenant] = row
        if len(self._holes) > 2 * len(self.order):  # the same rows, noted again and again
            self._holes = [row for row, tenant in enumerate(self.order) if tenant is EMPTY]

    def _move(self, source: NDArray[np.int64], runs: list[Run]) -> None:
        """Give row r all that row source[r] has."""
        self._tables.permute(source, runs)
        if self.blocks is not self._tables.rows:
            self.blocks = self._tables.rows
            self.generation += 1
        self.length[: source.size] = self.length[source]
        self.numbers[:, : source.size] = self.numbers.take(source, axis=1)

    def _allocate(self, rows: int) -> None:
        self.blocks = self._tables.rows
        self.length = np.zeros(rows, np.int32)
        self.numbers = np.zeros((6, rows), np.int64)
        self.num_blocks, self.committed, self.room, self.next_slot, self.found, self.present = self.numbers
        for row in range(len(self.order), rows):
            heapq.heappush(self._holes, row)
        self.order += [EMPTY] * (rows - len(self.order))
        self.generation += 1

    def _grow(self, rows: int, width: int) -> None:
        length, numbers = self.length, self.numbers
        self._tables = self._tables.grown(rows, width)
        self._allocate(rows)
        self.length[: length.size] = length
        self.numbers[:, : length.size] = numbers


class Sequences(Mapping[int, SequenceState]):
    """The resident sequences by id, each read when asked for."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table

    def __getitem__(self, sequence_id: int) -> SequenceState:
        sequence_id = as_id(sequence_id, "sequences")
        row = self._table.row_of.get(sequence_id)
        if row is None:
            raise unknown("sequences", sequence_id, {})
        return SequenceState(sequence_id, int(self._table.length[row]), self._table.table(row).tolist())

    def __iter__(self) -> Iterator[int]:
        return iter(self._table.row_of)

    def __len__(self) -> int:
        return len(self._table)

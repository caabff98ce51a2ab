"""Slots for new tokens: into the room of the last block, else into a new block, else into a copy of a shared one.

A step of decoding is `append_one_each`. It looks only at rows without room, one in block_size of them.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.books import Books
from runtime.slots import slots_of_runs

Rows = NDArray[np.int64]


def append_one_each(books: Books, count: int, who: str) -> NDArray[np.int64]:
    """The slot of one new token for each of the first `count` rows."""
    table = books.table
    recomputed: list[int] = []
    full = (table.room[:count] == 0).nonzero()[0]
    if full.size:
        recomputed = _make_room(books, full, who)  # may move the arrays
    room, next_slot, length = table.room[:count], table.next_slot[:count], table.length[:count]
    slots: NDArray[np.int64] = next_slot.copy()
    np.add(next_slot, 1, out=next_slot)
    np.subtract(room, 1, out=room)
    np.add(length, 1, out=length)
    for row in recomputed:
        slots[row], room[row], next_slot[row] = -1, 0, 0
    return slots


def append_runs(books: Books, rows: Rows, counts: Rows, who: str) -> NDArray[np.int64]:
    """The slots of counts[i] >= 1 new tokens for each of `rows`, run behind run."""
    table, block_size = books.table, books.block_size
    recomputed = _reserve(books, rows, counts, who)
    begins = table.length[rows].astype(np.int64)
    slots = slots_of_runs(table.blocks, block_size, rows, begins, counts)
    ends, lengths = np.cumsum(counts), begins + counts
    table.length[rows] = lengths
    table.next_slot[rows] = slots[ends - 1] + 1
    table.room[rows] = -lengths % block_size
    for row in recomputed:
        run = int(np.flatnonzero(rows == row)[0])
        slots[ends[run] - counts[run]] = -1
        if counts[run] == 1:
            table.next_slot[row] = table.room[row] = 0
    return slots


def num_missing_blocks(books: Books, rows: Rows, counts: Rows) -> int:
    """Blocks that `append_runs` would take."""
    table = books.table
    new = -(-(table.length[rows] + counts) // books.block_size) - table.num_blocks[rows]
    return int(new.sum()) + len(_plan_copies(books, _open_rows(books, rows))[0])


def _make_room(books: Books, rows: Rows, who: str) -> list[int]:
    """Give each of `rows`, which have no room, room for a token; returns those whose token is computed again."""
    table = books.table
    used = table.num_blocks[rows]
    if np.count_nonzero(used * books.block_size != table.length[rows]):
        recomputed = _reserve(books, rows, np.ones(rows.size, np.int64), who)
        for row in rows.tolist():
            block, offset = divmod(int(table.length[row]), books.block_size)
            table.next_slot[row] = int(table.blocks[row, block]) * books.block_size + offset
            table.room[row] = books.block_size - offset
        return recomputed
    blocks = books.pool.take(rows.size, who)
    table.reserve_width(int(used.max()) + 1)
    table.blocks[rows, used] = blocks
    table.num_blocks[rows] = used + 1
    table.next_slot[rows] = blocks * books.block_size
    table.room[rows] = books.block_size
    return []


def _reserve(books: Books, rows: Rows, counts: Rows, who: str) -> list[int]:
    """Give each of `rows` blocks of its own for counts[i] tokens; returns those whose first token is computed again."""
    table = books.table
    used = table.num_blocks[rows]
    new = -(-(table.length[rows] + counts) // books.block_size) - used
    to_copy, to_write, recomputed = _plan_copies(books, _open_rows(books, rows))
    blocks = books.pool.take(int(new.sum()) + len(to_copy), who)
    for row, destination in zip(to_copy, blocks.tolist(), strict=False):
        _copy_tail(books, row, destination)
    if to_write:
        books.index.forget(np.array(to_write))
    table.reserve_width(int((used + new).max()))
    ends = np.cumsum(new)
    columns = np.arange(ends[-1]) + np.repeat(used - (ends - new), new)
    table.blocks[np.repeat(rows, new), columns] = blocks[len(to_copy) :]
    table.num_blocks[rows] = used + new
    return recomputed


def _open_rows(books: Books, rows: Rows) -> list[int]:
    """Those of `rows` that go on in a block which others may hold, or which is indexed."""
    table = books.table
    partial = (table.num_blocks[rows] * books.block_size != table.length[rows]) & (table.room[rows] == 0)
    found: list[int] = rows[partial].tolist()
    return found


def _plan_copies(books: Books, rows: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Rows whose last block must be copied, indexed blocks that may be written once forgotten, rows that only recompute.

    Of k rows that share a block and all go on, the last writes in place.
    """
    table, index, copies = books.table, books.index, books.copies
    holders: dict[int, int] = {}
    to_copy, to_write, recomputed = [], [], []
    for row in rows:
        if table.present[row] > table.length[row]:
            recomputed.append(row)
            continue
        block = int(table.blocks[row, table.num_blocks[row] - 1])
        left = holders.setdefault(block, int(books.pool.refs[block]) - copies.holds(block))
        if left > 1 or index.has_child(block):
            to_copy.append(row)
            holders[block] -= 1
        elif index.is_held(block):
            to_write.append(block)
    return to_copy, to_write, recomputed


def _copy_tail(books: Books, row: int, destination: int) -> None:
    """Put `destination` in the place of the row's last block, its contents to be copied."""
    table, index = books.table, books.index
    last = int(table.num_blocks[row]) - 1
    source = int(table.blocks[row, last])
    origin = books.copies.origin(source)
    books.pool.hold(np.array([origin], np.int32))
    books.copies.add(origin, destination)
    index.tokens[destination] = index.tokens[source]
    table.blocks[row, last] = destination
    books.drop(np.array([source], np.int32))

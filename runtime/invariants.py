"""What must hold after every operation, and the sentence for each way in which it does not."""

from collections.abc import Iterator

import numpy as np

from runtime.books import Books
from runtime.prefix import ABSENT, ROOT
from runtime.sequences import EMPTY


def broken_invariants(books: Books) -> list[str]:
    """Everything that is broken, in words; empty if nothing is."""
    return [*_conservation(books), *_references(books), *_tables(books), *_index(books), *_host(books)]


def _conservation(books: Books) -> Iterator[str]:
    pool = books.pool
    free, cached, live = pool.free_blocks(), pool.cached_blocks(), np.flatnonzero(pool.refs > 0)
    if free.size + cached.size + live.size != pool.num_blocks:
        yield f"{free.size} free + {cached.size} cached + {live.size} live is not {pool.num_blocks}"
    if cached.size != pool.num_cached:
        yield f"{cached.size} blocks are queued, {pool.num_cached} are counted"
    seen = np.bincount(np.concatenate((free, cached, live)), minlength=pool.num_blocks)
    for block in np.flatnonzero(seen != 1).tolist():
        yield f"block {block} is in {seen[block]} of the states free, cached and live"
    for block in cached[~books.index.holds(cached)].tolist():
        yield f"block {block} is cached and cannot be found"
    for block in free[books.index.holds(free)].tolist():
        yield f"block {block} is free and can still be found"


def _references(books: Books) -> Iterator[str]:
    table, pool = books.table, books.pool
    wanted = np.zeros(pool.num_blocks, np.int64)
    for sequence_id, row in table.row_of.items():
        blocks = table.table(row)
        if blocks.size != np.unique(blocks).size:
            yield f"sequence {sequence_id} names a block twice"
        np.add.at(wanted, blocks, 1)
    for block, holds in books.copies.all_holds().items():
        wanted[block] += holds
    for block in np.flatnonzero(wanted != pool.refs).tolist():
        yield f"block {block} has {pool.refs[block]} references and {wanted[block]} holders"


def _tables(books: Books) -> Iterator[str]:
    table, size = books.table, books.block_size
    for row, sequence_id in enumerate(table.order):
        used, length = int(table.num_blocks[row]), int(table.length[row])
        if table.blocks[row, used:].any():
            yield f"row {row} has entries behind its {used} blocks"
        if sequence_id is EMPTY:
            if used or length:
                yield f"empty row {row} has {used} blocks and {length} tokens"
            continue
        if table.row_of.get(sequence_id) != row:
            yield f"row {row} says sequence {sequence_id}, whose row is {table.row_of.get(sequence_id)}"
        if used != -(-length // size):
            yield f"sequence {sequence_id} has {used} blocks for {length} tokens of which {size} fit in one"
        if not 0 <= table.committed[row] <= length:
            yield f"sequence {sequence_id} has {table.committed[row]} committed of {length} tokens"
        full = table.blocks[row, : table.committed[row] // size]
        if not books.index.holds(full).all():
            yield f"sequence {sequence_id} has a full block that cannot be found"
        yield from _room(books, row)


def _room(books: Books, row: int) -> Iterator[str]:
    table, size = books.table, books.block_size
    room, length = int(table.room[row]), int(table.length[row])
    if room == 0:
        return
    block = int(table.blocks[row, length // size])
    if room != size - length % size or table.next_slot[row] != block * size + length % size:
        yield f"sequence {table.order[row]} has room {room} at slot {table.next_slot[row]} for token {length}"
    if books.pool.refs[block] - books.copies.holds(block) != 1 or books.index.is_held(block):
        yield f"sequence {table.order[row]} has room in block {block}, which is shared or indexed"


def _index(books: Books) -> Iterator[str]:
    parents, refs = books.index.parents(), books.pool.refs
    order = np.full(refs.size, refs.size, np.int64)  # live blocks leave after all cached ones
    cached = books.pool.cached_blocks()
    order[cached] = np.arange(cached.size)
    for block in books.index.strays().tolist():
        yield f"block {block} is indexed and cannot be reached"
    for block in np.flatnonzero(parents != ABSENT).tolist():
        parent = int(parents[block])
        if parent == ROOT:
            continue
        if parents[parent] == ABSENT:
            yield f"block {block} is indexed behind block {parent}, which is not"
        if order[parent] < order[block]:
            yield f"block {parent} would be evicted before block {block}, which stands behind it"


def _host(books: Books) -> Iterator[str]:
    taken = sum(away.host_blocks.size for away in books.preempted.values())
    if books.host.num_free + taken != books.host.num_blocks:
        yield f"{books.host.num_free} free + {taken} used host blocks is not {books.host.num_blocks}"

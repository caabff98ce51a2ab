"""Tokens that went through the forward pass: their ids are written down, and blocks that they fill become findable."""

import numpy as np
from numpy.typing import NDArray

from runtime.books import Books
from runtime.errors import InvalidLength, TokenMismatch
from runtime.prefix import ROOT
from runtime.slots import slots_of_runs

Rows = NDArray[np.int64]


def commit_one_each(books: Books, count: int, tokens: NDArray[np.int32]) -> bool:
    """Commit one token for each of the first `count` rows, where that is all they await; else do nothing and say so."""
    table, index = books.table, books.index
    committed, length = table.committed[:count], table.length[:count]
    if len(books.in_flight) or np.count_nonzero(length - committed == 1) != count:
        return False
    full = (table.room[:count] == 0).nonzero()[0]
    full = full[length[full] % books.block_size == 0]
    last = table.num_blocks[full] - 1
    blocks = table.blocks[full, last]
    if np.count_nonzero(index.holds(blocks)):
        return False
    index.flat_tokens[table.next_slot[:count] - 1] = tokens
    np.add(committed, 1, out=committed)
    if full.size:
        _index_heads(books, full, last, blocks)
    return True


def commit_runs(books: Books, count: int, counts: Rows, tokens: NDArray[np.int32]) -> None:
    """Commit counts[i] tokens for each of the first `count` rows."""
    table, index, block_size = books.table, books.index, books.block_size
    begins = table.committed[:count].copy()
    _check_awaited(books, counts, table.length[:count] - begins)
    slots = slots_of_runs(table.blocks, block_size, np.arange(count), begins, counts)
    _check_known(books, counts, slots, tokens)
    if len(books.in_flight):
        books.in_flight.check(table, index, counts, slots, tokens)
    index.flat_tokens[slots] = tokens
    table.committed[:count] += counts
    books.in_flight.land(table)
    first, last = begins // block_size, table.committed[:count] // block_size
    full = np.flatnonzero(last > first)
    if full.size:
        _index_runs(books, full, first[full], last[full])


def index_run(books: Books, row: int, first: int, last: int) -> None:
    """Make logical blocks [first, last) of `row` findable."""
    if last > first:
        _index_runs(books, np.array([row]), np.array([first]), np.array([last]))


def _index_runs(books: Books, rows: Rows, first: Rows, last: Rows) -> None:
    """Make logical blocks [first[i], last[i]) of each of `rows` findable."""
    table = books.table
    ours = _index_heads(books, rows, first, table.blocks[rows, first])
    for i in np.flatnonzero(last - first > 1).tolist():
        row, begin, end = int(rows[i]), int(first[i]), int(last[i])
        chain = table.blocks[row, begin:end]
        if ours[i] and not books.index.has_child(int(chain[0])) and not books.index.holds(chain[1:]).any():
            books.index.extend(chain)  # the first block may be a fork's too, which has gone on from it already
            continue
        for logical in range(begin + 1, end):
            _index_block(books, row, logical)


def _index_heads(books: Books, rows: Rows, logical: Rows, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Make one block of each of `rows` findable; says which were new to the index."""
    new = np.zeros(rows.size, np.bool_)
    inner = np.flatnonzero(logical)
    if inner.size == rows.size:
        new = books.index.insert_fresh(blocks, books.table.blocks[rows, logical - 1])
    elif inner.size:
        new[inner] = books.index.insert_fresh(blocks[inner], books.table.blocks[rows[inner], logical[inner] - 1])
    if np.count_nonzero(new) != rows.size:
        for i in np.flatnonzero(~new).tolist():
            new[i] = _index_block(books, int(rows[i]), int(logical[i]))
    return new


def _index_block(books: Books, row: int, logical: int) -> bool:
    """Make one block findable. Where its twin is already, the row takes the twin and frees its own."""
    table, index, pool = books.table, books.index, books.pool
    own = int(table.blocks[row, logical])
    if index.is_held(own):
        return False
    parent = int(table.blocks[row, logical - 1]) if logical else ROOT
    salt = books.salts.get(table.order[row]) if books.salts else None
    twin = index.insert(own, parent, salt)
    if twin == own:
        return True
    pool.hold(np.array([twin], np.int32))
    table.blocks[row, logical] = twin
    books.drop(np.array([own], np.int32))
    return False


def _check_awaited(books: Books, counts: Rows, awaited: Rows) -> None:
    """Refuse tokens that were not appended."""
    if np.count_nonzero(counts > awaited):
        row = int(np.argmax(counts > awaited))
        raise InvalidLength(
            f"commit_tokens: sequence {books.table.order[row]} awaits {awaited[row]} tokens, got {counts[row]}: "
            "append_tokens comes first, and a token is committed once"
        )


def _check_known(books: Books, counts: Rows, slots: Rows, tokens: NDArray[np.int32]) -> None:
    """Refuse tokens other than those of a block that others may find."""
    index, block_size = books.index, books.block_size
    if counts.size == 1:  # a long prompt: looking at its blocks is cheaper than at its tokens
        begin = int(books.table.committed[0])
        blocks = books.table.blocks[0, begin // block_size : -(-(begin + tokens.size) // block_size)]
        if not np.count_nonzero(index.holds(blocks)):
            return
    changed = index.holds(slots // block_size) & (index.flat_tokens[slots] != tokens)
    if not np.count_nonzero(changed):
        return
    at = int(np.argmax(changed))
    row = int(np.searchsorted(np.cumsum(counts), at, side="right"))
    position = int(books.table.committed[row]) + at - int(counts[:row].sum())
    raise TokenMismatch(
        f"commit_tokens: position {position} of sequence {books.table.order[row]} lies in block "
        f"{slots[at] // block_size}, which holds keys and values of token {index.flat_tokens[slots[at]]}, "
        f"got token {tokens[at]}: commit the tokens of the prompt that the sequence was created with"
    )

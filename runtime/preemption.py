"""A sequence leaves the pool and comes back: with its bytes by way of host memory, or with its tokens to be computed again."""

import numpy as np
from numpy.typing import NDArray

from runtime import committing
from runtime.books import Books
from runtime.errors import InvalidLength
from runtime.swap import Preempted

NO_PAIRS = np.zeros((0, 2), np.int32)


def preempt(books: Books, sequence_id: int, row: int, by: str) -> NDArray[np.int32]:
    """Put a resident sequence away; returns the pairs (block, host block) to copy."""
    table, block_size = books.table, books.block_size
    if not isinstance(by, str) or by not in ("swap", "recompute"):
        raise InvalidLength(f'preempt: by must be "swap" or "recompute", got {by!r}')
    blocks = table.table(row)
    committed = int(table.committed[row])
    host_blocks = books.host.take(blocks.size if by == "swap" else 0, f"preempt: sequence {sequence_id}")
    books.preempted[sequence_id] = Preempted(
        tokens=books.index.tokens[blocks[: -(-committed // block_size)]].reshape(-1)[:committed],
        length=int(table.length[row]) if by == "swap" else 0,
        host_blocks=host_blocks,
        salt=books.salts.get(sequence_id),
    )
    pairs = NO_PAIRS
    if by == "swap":  # what is still to be copied into a block is read where it stands
        sources = [books.copies.origin(block) for block in blocks.tolist()]
        pairs = np.column_stack((np.array(sources, np.int32), host_blocks))
    books.dismiss(sequence_id, row)
    return pairs


def resume(books: Books, sequence_id: int) -> NDArray[np.int32]:
    """Bring a preempted sequence back; returns the pairs (host block, block) to copy. Blocks still in the index are shared."""
    table, index, pool, block_size = books.table, books.index, books.pool, books.block_size
    away = books.preempted[sequence_id]
    chain = index.match(away.tokens, away.salt)
    missing = max(away.host_blocks.size - chain.size, 0)
    revived = int(np.count_nonzero(pool.refs[chain] == 0))
    pool.require(missing + revived, f"resume: sequence {sequence_id}")
    del books.preempted[sequence_id]
    row = books.admit(sequence_id, chain, away.salt)
    blocks = pool.take(missing, "resume")
    table.reserve_width(chain.size + missing)
    table.blocks[row, chain.size : chain.size + missing] = blocks
    table.num_blocks[row] = chain.size + missing
    found = chain.size * block_size
    table.length[row] = table.found[row] = table.present[row] = max(found, away.length)
    table.committed[row] = found
    books.settle(row)
    books.host.give_back(away.host_blocks)
    if missing and found < away.tokens.size:
        _write_down(books, row, found, away.tokens)
    return np.column_stack((away.host_blocks[chain.size :], blocks.astype(np.int32))) if missing else NO_PAIRS


def _write_down(books: Books, row: int, found: int, tokens: NDArray[np.int32]) -> None:
    """Commit again, in its new blocks, what a swapped sequence had committed."""
    table, block_size = books.table, books.block_size
    positions = np.arange(found, tokens.size)
    blocks = table.blocks[row, positions // block_size].astype(np.int64)
    books.index.flat_tokens[blocks * block_size + positions % block_size] = tokens[found:]
    table.committed[row] = tokens.size
    committing.index_run(books, row, found // block_size, tokens.size // block_size)

"""Which block holds a given prefix: an index over the tokens of full blocks, exact by construction.

A block is known by its parent block and its own tokens, so equal tokens behind different prefixes never meet, and no hash
can collide because tokens are compared. Most blocks have one child. That child stands in an array, written and
followed without touching a dictionary; first blocks (which have a salt for a parent) and later siblings stand in a dictionary
keyed by (parent, token bytes).

Why a child never outlives its parent here: whoever holds a child holds its parent too (tables are chains of the index),
and releases queue the deeper block first, so that eviction meets children before parents.
"""

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

ABSENT = -1  # _parent: the block is not indexed
ROOT = -2  # _parent: the block begins a prompt
CHILDLESS = -1  # _child
BRANCHED = -2  # _child: children, if any, are in the dictionary
NO_BLOCKS = np.zeros(0, np.int32)


class PrefixIndex:
    """A forest of full blocks.

    Arrays
        tokens   [num_blocks + 1, block_size]  int32; the last row takes what slot -1 writes, and is never read
        _parent  [num_blocks]                  int32 block id, ROOT or ABSENT
        _child   [num_blocks]                  int32 first child, CHILDLESS or BRANCHED
        _keyed   [num_blocks]                  whether the block stands in the dictionary
        _branches  [num_blocks]                int32 children in the dictionary
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.zeros((num_blocks + 1, block_size), np.int32)
        self.flat_tokens = self.tokens.reshape(-1)  # by slot
        self._parent = np.full(num_blocks, ABSENT, np.int32)
        self._child = np.full(num_blocks, CHILDLESS, np.int32)
        # The same memory, twice as fast to read one by one.
        self._child_of: memoryview[int] = memoryview(self._child)  # type: ignore[arg-type]
        self._parent_of: memoryview[int] = memoryview(self._parent)  # type: ignore[arg-type]
        self._keyed = np.zeros(num_blocks, np.bool_)
        self._branches = np.zeros(num_blocks, np.int32)
        self._by_key: dict[tuple[Hashable, ...], int] = {}
        self._key_of: dict[int, tuple[Hashable, ...]] = {}

    def holds(self, blocks: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of `blocks` can be found."""
        found: NDArray[np.bool_] = self._parent[blocks] != ABSENT
        return found

    def is_held(self, block: int) -> bool:
        """Whether `block` can be found."""
        return self._parent_of[block] != ABSENT

    def has_child(self, block: int) -> bool:
        """Whether removing `block` could strand others."""
        return self._child_of[block] != CHILDLESS

    def match(self, tokens: NDArray[np.int32], salt: Hashable) -> NDArray[np.int32]:
        """The longest chain of blocks that holds the beginning of `tokens`, in whole blocks."""
        limit = tokens.size // self.block_size
        block = self._by_key.get((None, salt, tokens[: self.block_size].tobytes())) if limit else None
        if block is None:
            return NO_BLOCKS
        rows = tokens[: limit * self.block_size].reshape(limit, self.block_size)
        chain: list[int] = []
        stride = 8
        while block is not None:
            chain.append(block)
            checked = len(chain)
            self._follow(chain, min(limit, checked + stride))
            stride *= 4
            agreed = self._agree(chain, rows, checked)
            whole = agreed == len(chain)
            del chain[agreed:]
            if len(chain) == limit or (whole and self._child_of[chain[-1]] == CHILDLESS):
                break
            block = self._child_with(chain[-1], rows[len(chain)])
        return np.array(chain, np.int32)

    def insert(self, block: int, parent: int, salt: Hashable) -> int:
        """Make `block` findable behind `parent` (or ROOT); returns the block that already holds these tokens, if one does."""
        row = self.tokens[block]
        if parent == ROOT:
            known = self._by_key.get((None, salt, row.tobytes()))
        else:
            known = self._child_with(parent, row)
        if known is not None:
            return known
        self._parent[block] = parent
        if parent != ROOT and self._child_of[parent] == CHILDLESS:
            self._child[parent] = block
            return block
        key: tuple[Hashable, ...] = (None, salt, row.tobytes())
        if parent != ROOT:
            key = (parent, row.tobytes())
            self._branches[parent] += 1
        self._by_key[key] = block
        self._key_of[block] = key
        self._keyed[block] = True
        return block

    def insert_fresh(self, blocks: NDArray[np.integer], parents: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Insert at once those of `blocks` that are their parent's first child; says which those were."""
        blocks, parents = blocks.astype(np.int64, copy=False), parents.astype(np.int64, copy=False)
        fresh: NDArray[np.bool_] = (self._child[parents] == CHILDLESS) & (self._parent[blocks] == ABSENT)
        if np.count_nonzero(fresh) != blocks.size:
            some = np.zeros(blocks.size, np.bool_)
            chosen = np.flatnonzero(fresh)
            if chosen.size:
                some[chosen] = self.insert_fresh(blocks[chosen], parents[chosen])
            return some
        self._child[parents] = blocks
        fresh = self._child[parents] == blocks  # of two with one parent, the later stands
        if np.count_nonzero(fresh) == blocks.size:
            self._parent[blocks] = parents
        else:
            self._parent[blocks[fresh]] = parents[fresh]
        return fresh

    def extend(self, chain: NDArray[np.int32]) -> None:
        """Insert chain[1:] behind chain[0], which has no child."""
        self._child[chain[:-1]] = chain[1:]
        self._parent[chain[1:]] = chain[:-1]

    def forget(self, blocks: NDArray[np.int64]) -> None:
        """Remove `blocks`, children before or together with their parents."""
        parents = self._parent[blocks].astype(np.int64)
        keyed = self._keyed[blocks]
        any_keyed = np.count_nonzero(keyed)
        above = parents
        if any_keyed:  # their parents' first children are others, or they have no parents
            above = parents[~keyed]
        self._child[above] = np.where(self._branches[above], BRANCHED, CHILDLESS)
        if any_keyed:
            for block, parent in zip(blocks[keyed].tolist(), parents[keyed].tolist(), strict=True):
                self._forget_key(block, parent)
        self._parent[blocks] = ABSENT
        self._child[blocks] = CHILDLESS

    def _forget_key(self, block: int, parent: int) -> None:
        """Remove a block that stands in the dictionary."""
        del self._by_key[self._key_of.pop(block)]
        self._keyed[block] = False
        if parent == ROOT:
            return
        self._branches[parent] -= 1
        if self._branches[parent] == 0 and self._child[parent] == BRANCHED:
            self._child[parent] = CHILDLESS

    def parents(self) -> NDArray[np.int32]:
        """The parent of every block: a block id, ROOT or ABSENT."""
        return self._parent.copy()

    def strays(self) -> NDArray[np.int64]:
        """Blocks that are indexed and yet cannot be reached; there are none."""
        indexed = np.flatnonzero((self._parent != ABSENT) & ~self._keyed)
        found: NDArray[np.int64] = indexed[self._child[self._parent[indexed]] != indexed]
        return found

    def _follow(self, chain: list[int], length: int) -> None:
        """Extend `chain` by first children, unchecked, to at most `length` blocks."""
        child_of = self._child_of
        block = child_of[chain[-1]]
        for _ in range(length - len(chain)):
            if block < 0:
                return
            chain.append(block)
            block = child_of[block]

    def _agree(self, chain: list[int], rows: NDArray[np.int32], checked: int) -> int:
        """How many blocks of `chain` hold what `rows` says, the first `checked` known to."""
        wanted = rows[checked : len(chain)]
        held = self.tokens[chain[checked:]]
        if held.tobytes() == wanted.tobytes():
            return len(chain)
        return checked + int(np.argmin((held == wanted).all(axis=1)))

    def _child_with(self, parent: int, row: NDArray[np.int32]) -> int | None:
        """The child of `parent` that holds the tokens `row`."""
        child = self._child_of[parent]
        if child == CHILDLESS:
            return None
        wanted = row.tobytes()
        if child >= 0 and self.tokens[child].tobytes() == wanted:
            return child
        return self._by_key.get((parent, wanted))

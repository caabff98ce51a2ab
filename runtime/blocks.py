"""The pool of physical blocks: which are free, which are live, and which are cached.

A block is in exactly one of three states, and free + cached + live = total:

    free     refs 0, not indexed   on the free stack
    cached   refs 0, indexed       its keys and values can be found again; on the eviction queue
    live     refs > 0              that many block tables name it, or copies not yet taken read it

A table of 8,192 blocks that is given back costs as much as its blocks, if each is looked at. So only its last blocks are,
which nobody can find and which are free at once; its full ones are booked later, in the order in which tables were given
back: when blocks are to be evicted, or when somebody asks how they stand. Until then they count as held.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ForeignBlock, OutOfBlocks
from runtime.eviction import EvictionQueue
from runtime.prefix import PrefixIndex


class BlockPool:
    """Blocks by number. Takes from the free stack first, then evicts the least recently used.

    Ids are int64 here, with which NumPy finds its way five times faster than with a table's int32.

    Arrays
        refs    [num_blocks]  int32 holders; _refs counts tables still to be booked too
        _stack  [num_blocks]  int64 block ids, of which the first num_free are free; the last freed is the first taken
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self._refs = np.zeros(num_blocks, np.int32)
        self._refs_of: memoryview[int] = memoryview(self._refs)  # type: ignore[arg-type]  # the same, faster one by one
        self._unbooked: deque[NDArray[np.int32]] = deque()
        self._num_unbooked = 0  # blocks of all of them
        self._stack = np.arange(num_blocks - 1, -1, -1)
        self._queue = EvictionQueue(num_blocks)
        self._index = index
        self.num_free = num_blocks

    @property
    def refs(self) -> NDArray[np.int32]:
        """Holders of every block."""
        self.book()
        return self._refs

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds that can be found again, and evicted."""
        self.book()
        return self._queue.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be taken."""
        return self.num_free + self.num_cached

    def can_take(self, count: int) -> bool:
        """Whether `count` blocks can be taken; books no more than it takes to say so."""
        while self._unbooked and count > self.num_free + self._queue.num_blocks:
            self._book_first()
        return count <= self.num_free + self._queue.num_blocks

    def require(self, count: int, who: str) -> None:
        """Raise OutOfBlocks in the name of `who` unless `count` blocks can be taken."""
        if not self.can_take(count):
            raise OutOfBlocks(
                f"{who} needs {count} blocks, and {self.num_available} of {self.num_blocks} can be taken "
                f"({self.num_free} free, {self.num_cached} cached): release, truncate or preempt a sequence"
            )

    def take(self, count: int, who: str) -> NDArray[np.int64]:
        """`count` blocks with one holder each; raises OutOfBlocks in the name of `who`, and then changes nothing."""
        missing = count - self.num_free
        if missing > 0:
            self.require(count, who)
            blocks = np.concatenate((self._pop(self.num_free), self._evict(missing)))
        else:
            blocks = self._pop(count)
        self._refs[blocks] = 1
        return blocks

    def hold(self, blocks: NDArray[np.integer]) -> None:
        """Add a holder to each of `blocks` (all different), which are live or cached."""
        if blocks.size == 0:
            return
        held: NDArray[np.int64] = blocks.astype(np.int64, copy=False)
        if self._queue.num_blocks:
            self._queue.remove(held)
        self._refs[held] += 1

    def drop(self, blocks: NDArray[np.integer]) -> None:
        """Remove a holder from each of `blocks` (all different, parents first).

        Blocks are queued for eviction the last first, so that a child goes before its parent.
        """
        if blocks.size == 1:
            self._drop_one(int(blocks[0]))
            return
        self.book()  # what was given back before is evicted before
        idle = self._without_holder(blocks.astype(np.int64, copy=False))
        cached = self._index.holds(idle)
        self._push(idle[~cached])
        self._queue.push(idle[cached][::-1])

    def drop_table(self, blocks: NDArray[np.int32], num_full: int) -> None:
        """Remove a holder from each block of a table, of which the first `num_full` are indexed: those are booked later."""
        tail = blocks[num_full:]
        if tail.size > 1:
            self.drop(blocks)
            return
        if tail.size:
            self._drop_one(int(tail[0]))
        self._unbooked.append(blocks[:num_full].copy())
        self._num_unbooked += num_full
        while self._num_unbooked > self.num_blocks:  # shared blocks, given back by one after another
            self._book_first()

    def book(self) -> None:
        """Book the tables that were given back."""
        while self._unbooked:
            self._book_first()

    def free_blocks(self) -> NDArray[np.int64]:
        """The free blocks, the next to be taken last."""
        return self._stack[: self.num_free].copy()

    def cached_blocks(self) -> NDArray[np.int64]:
        """The cached blocks, the next to be evicted first."""
        self.book()
        return self._queue.blocks()

    def _book_first(self) -> None:
        blocks = self._unbooked.popleft().astype(np.int64)
        self._num_unbooked -= blocks.size
        self._queue.push(self._without_holder(blocks)[::-1])

    def _without_holder(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of `blocks` that nobody holds any more, once each has a holder less."""
        refs = self._refs[blocks] - 1
        held = np.count_nonzero(refs)
        if held and refs.min() < 0:
            self._refuse(blocks[refs < 0])
        self._refs[blocks] = refs
        return blocks[refs == 0] if held else blocks

    def _drop_one(self, block: int) -> None:
        cached = self._index.is_held(block)
        if cached:
            self.book()
        refs = self._refs_of[block] - 1
        if refs < 0:
            self._refuse(np.array([block]))
        self._refs_of[block] = refs
        if refs == 0 and cached:
            self._queue.push(np.array([block]))
        elif refs == 0:
            self._stack[self.num_free] = block
            self.num_free += 1

    def _pop(self, count: int) -> NDArray[np.int64]:
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def _push(self, blocks: NDArray[np.int64]) -> None:
        self._stack[self.num_free : self.num_free + blocks.size] = blocks[::-1]
        self.num_free += blocks.size

    def _evict(self, count: int) -> NDArray[np.int64]:
        blocks = self._queue.pop(count)
        self._index.forget(blocks)
        return blocks

    def _refuse(self, blocks: NDArray[np.int64]) -> None:
        names = " ".join(map(str, blocks.tolist()))
        raise ForeignBlock(f"BlockPool.drop: block {names} has no holder (a double free?): drop only what was taken or held")

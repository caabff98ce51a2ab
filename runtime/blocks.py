"""The pool of physical blocks: which are free, which are live, and which are cached.

A block is in exactly one of three states, and free + cached + live = total:

    free     refs 0, not indexed   on the free stack
    cached   refs 0, indexed       its keys and values can be found again; on the eviction queue
    live     refs > 0              that many block tables name it, or copies not yet taken read it
"""

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ForeignBlock, OutOfBlocks
from runtime.eviction import EvictionQueue
from runtime.prefix import PrefixIndex


class BlockPool:
    """Blocks by number. Takes from the free stack first, then evicts the least recently used.

    Ids are int64 here, with which NumPy finds its way five times faster than with a table's int32.

    Arrays
        refs    [num_blocks]  int32 holders
        _stack  [num_blocks]  int64 block ids, of which the first num_free are free; the last freed is the first taken
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, np.int32)
        self._stack = np.arange(num_blocks - 1, -1, -1)
        self._queue = EvictionQueue(num_blocks)
        self._index = index
        self.num_free = num_blocks

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds that can be found again, and evicted."""
        return self._queue.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be taken."""
        return self.num_free + self._queue.num_blocks

    def require(self, count: int, who: str) -> None:
        """Raise OutOfBlocks in the name of `who` unless `count` blocks can be taken."""
        if count > self.num_available:
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
        self.refs[blocks] = 1
        return blocks

    def hold(self, blocks: NDArray[np.integer]) -> None:
        """Add a holder to each of `blocks` (all different), which are live or cached."""
        if blocks.size == 0:
            return
        held: NDArray[np.int64] = blocks.astype(np.int64, copy=False)
        if self._queue.num_blocks:
            self._queue.remove(held)
        self.refs[held] += 1

    def drop(self, blocks: NDArray[np.integer]) -> None:
        """Remove a holder from each of `blocks` (all different, parents first).

        Blocks are queued for eviction the last first, so that a child goes before its parent.
        """
        if blocks.size == 0:
            return
        dropped: NDArray[np.int64] = blocks.astype(np.int64, copy=False)
        refs = self.refs[dropped] - 1
        idle = dropped
        if np.count_nonzero(refs):
            if refs.min() < 0:
                self._refuse(dropped[refs < 0])
            idle = dropped[refs == 0]
        self.refs[dropped] = refs
        cached = self._index.holds(idle)
        num_cached = np.count_nonzero(cached)
        if num_cached == 0:
            self._push(idle)
        elif num_cached == idle.size:
            self._queue.push(idle[::-1])
        else:
            self._queue.push(idle[cached][::-1])
            self._push(idle[~cached])

    def free_blocks(self) -> NDArray[np.int64]:
        """The free blocks, the next to be taken last."""
        return self._stack[: self.num_free].copy()

    def cached_blocks(self) -> NDArray[np.int64]:
        """The cached blocks, the next to be evicted first."""
        return self._queue.blocks()

    def clear(self) -> None:
        """Free every block."""
        self.refs.fill(0)
        self._stack[:] = np.arange(self.num_blocks - 1, -1, -1)
        self._queue.clear()
        self.num_free = self.num_blocks

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

"""Cached blocks in the order in which they were last used: the first in is the first evicted.

A ring would need removal from the middle, whenever a cached block is found again. This queue leaves the old entry where
it is and only forgets it: an entry counts while `_place[block]` still names its position. So everything is a slice or
a gather, and 8,192 blocks of a finished sequence cost one call.
"""

import numpy as np
from numpy.typing import NDArray

GONE = -1


class EvictionQueue:
    """Blocks nobody holds but whose contents may be wanted again.

    Arrays
        _entries  [capacity]    int64 block ids, of which [_head, _tail) may count
        _place    [num_blocks]  int64 position of the block's entry that counts, or GONE
    """

    def __init__(self, num_blocks: int) -> None:
        self._entries = np.zeros(max(2 * num_blocks, 2), np.int64)
        self._place = np.full(num_blocks, GONE, np.int64)
        self._head = 0
        self._tail = 0
        self.num_blocks = 0

    def push(self, blocks: NDArray[np.int64]) -> None:
        """Append `blocks`, the first to be evicted first."""
        if self._tail + blocks.size > self._entries.size:
            self._compact()
        end = self._tail + blocks.size
        self._entries[self._tail : end] = blocks
        self._place[blocks] = np.arange(self._tail, end)
        self._tail = end
        self.num_blocks += blocks.size

    def remove(self, blocks: NDArray[np.int64]) -> None:
        """Forget those of `blocks` that are queued."""
        queued = blocks[self._place[blocks] != GONE]
        self._place[queued] = GONE
        self.num_blocks -= queued.size

    def pop(self, count: int) -> NDArray[np.int64]:
        """Take the `count` least recently used blocks; the caller has seen that there are so many."""
        end = self._head + count
        if end <= self._tail and self._counting(self._head, end).size == count:  # nothing in between was found again
            blocks = self._entries[self._head : end].copy()
            self._head = end
        else:
            blocks = self._pick(count)
        self._place[blocks] = GONE
        self.num_blocks -= count
        return blocks

    def _pick(self, count: int) -> NDArray[np.int64]:
        """The first `count` entries that count; the head moves behind them."""
        found = 0
        parts = []
        while found < count:
            end = min(self._head + max(2 * (count - found), 16), self._tail)
            counting = self._counting(self._head, end)[: count - found]
            self._head = int(counting[-1]) + 1 if found + counting.size == count else end
            parts.append(self._entries[counting])
            found += counting.size
        return np.concatenate(parts)

    def blocks(self) -> NDArray[np.int64]:
        """All queued blocks, the least recently used first."""
        return self._entries[self._counting(self._head, self._tail)]

    def _counting(self, begin: int, end: int) -> NDArray[np.int64]:
        """Positions in [begin, end) whose entries count."""
        positions = np.arange(begin, end)
        found: NDArray[np.int64] = positions[self._place[self._entries[begin:end]] == positions]
        return found

    def _compact(self) -> None:
        """Move the entries that count to the front; they are at most half of the array."""
        blocks = self.blocks()
        self._entries[: blocks.size] = blocks
        self._place[blocks] = np.arange(blocks.size)
        self._head, self._tail = 0, blocks.size

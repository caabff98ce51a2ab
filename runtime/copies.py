"""Copy-on-write pairs that the device has not made yet.

The pairs taken at once are independent of one another: no block is both read and written, and none is written twice, so
a kernel may copy them in any order. A source is held until then, so that nobody else is given it.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray


class PendingCopies:
    """Destinations and the blocks that they are to be copied from.

    A copy holds its source. It need not hold what stands before the source: who holds the destination does.
    """

    def __init__(self) -> None:
        self._source_of: dict[int, int] = {}
        self._holds: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._source_of)

    def add(self, origin: int, destination: int) -> None:
        """Note a copy from `origin`, to which the caller has added a holder."""
        self._source_of[destination] = origin
        self._holds[origin] += 1

    def origin(self, block: int) -> int:
        """Where the contents of `block` stand until the copies are made."""
        return self._source_of.get(block, block)

    def holds(self, block: int) -> int:
        """How many of the holders of `block` are copies."""
        return self._holds[block]

    def cancel(self, destinations: NDArray[np.integer]) -> list[int]:
        """Forget the copies into `destinations`, which nobody holds any more; returns their sources, to be dropped in turn."""
        sources = [self._source_of.pop(block) for block in destinations.tolist() if block in self._source_of]
        self._holds.subtract(sources)
        return sources

    def take(self) -> tuple[NDArray[np.int32], list[int]]:
        """All pairs [n, 2] of (source, destination), now the caller's to make, and the sources, to be dropped in turn."""
        pairs = np.array([(source, to) for to, source in self._source_of.items()], np.int32).reshape(-1, 2)
        return pairs, self.cancel(pairs[:, 1])

    def all_holds(self) -> Counter[int]:
        """How many copies hold each block."""
        return +self._holds

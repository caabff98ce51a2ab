"""Where a preempted sequence goes: into blocks of host memory, or into a list of tokens to be computed again.

The manager moves no bytes. It says which blocks to copy, and the caller copies them before the next call.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.errors import OutOfBlocks


@dataclass(frozen=True, kw_only=True)
class Preempted:
    """A sequence without blocks in the pool.

    tokens       int32 [committed] ids of the committed tokens
    length       tokens in host memory; 0 after preemption by recompute
    host_blocks  int32 host blocks that hold them, in logical order
    """

    tokens: NDArray[np.int32]
    length: int
    host_blocks: NDArray[np.int32]
    salt: Hashable


class HostPool:
    """Host blocks by number: taken and given back, never shared."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Host blocks that can be taken."""
        return len(self._free)

    def take(self, count: int, who: str) -> NDArray[np.int32]:
        """`count` host blocks; raises OutOfBlocks in the name of `who`."""
        if count > len(self._free):
            raise OutOfBlocks(
                f"{who} needs {count} host blocks, and {len(self._free)} of {self.num_blocks} are free: "
                'preempt by "recompute", or give the manager more num_host_blocks'
            )
        return np.array([self._free.pop() for _ in range(count)], np.int32)

    def give_back(self, blocks: NDArray[np.int32]) -> None:
        """Free `blocks`, which were taken."""
        self._free.extend(blocks[::-1].tolist())

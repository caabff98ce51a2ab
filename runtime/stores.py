"""What a replay asks of an allocator, whichever it is: open a request, give every open one a token, close it."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.contiguous import ContiguousManager
from runtime.manager import BlockManager
from runtime.traces import Trace

WATERMARK = 0.01  # of the blocks stay free when a request is let in beside others, so that those can go on


class Store(Protocol):
    """An allocator as a replay sees it.

    num_slots       slots of the pool
    num_samples     sequences of one request
    copied_tokens   tokens moved so far
    """

    num_slots: int
    num_samples: int
    copied_tokens: int

    def can_ever(self, prompt: int, final: int) -> bool:
        """Whether an empty pool would hold the request to its end."""

    def open(self, request: int, length: int, final: int, *, alone: bool) -> bool:
        """Give a request slots for its `length` tokens; or say that there are none, and change nothing."""

    def grow(self, requests: Iterable[int]) -> None:
        """A slot more for each open request; raises OutOfBlocks and changes nothing."""

    def close(self, request: int) -> None:
        """Free a request's slots."""

    def reserved(self) -> int:
        """Slots that are not free."""

    def held_back(self, length: int, final: int) -> int:
        """Free slots, if a request that was not let in would fit into as many in one piece."""

    def stored(self, tokens: int) -> int:
        """Slots with a token in them, where sequences have `tokens` tokens."""


class ContiguousStore:
    """Runs of slots. `max_length` bounds what is let in."""

    num_samples = 1

    def __init__(self, manager: ContiguousManager, *, max_length: int) -> None:
        self._manager = manager
        self._max_length = max_length
        self.num_slots = manager.num_free_slots
        self._largest = manager.largest_hole
        self.copied_tokens = 0

    def can_ever(self, prompt: int, final: int) -> bool:
        return final <= self._max_length and self._manager.num_slots_for(prompt, final) <= self._largest

    def open(self, request: int, length: int, final: int, *, alone: bool) -> bool:
        if not self._manager.can_create(length, final):
            return False
        self._manager.create_sequence(np.zeros(length, np.int32), request, final_length=final)
        self._manager.append_tokens([request], [length])
        return True

    def grow(self, requests: Iterable[int]) -> None:
        self._manager.append_one_each()
        self.copied_tokens += int(self._manager.take_copies()[:, 2].sum())

    def close(self, request: int) -> None:
        self._manager.release_sequence(request)

    def reserved(self) -> int:
        return self._manager.num_reserved_slots

    def held_back(self, length: int, final: int) -> int:
        free = self._manager.num_free_slots
        return free if self._manager.num_slots_for(length, final) <= free else 0

    def stored(self, tokens: int) -> int:
        return tokens


class PagedStore:
    """Blocks of the real manager.

    max_length    the longest request that is let in, or None: what the pool holds
    prefixes      the trace whose prefixes are shared, or None: nothing is
    num_samples   answers to each prompt
    forked        whether they share its blocks
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_length: int | None = None,
        prefixes: Trace | None = None,
        num_samples: int = 1,
        forked: bool = False,
    ) -> None:
        self._manager = manager
        self._max_length = manager.num_physical_blocks * manager.block_size if max_length is None else max_length
        self._prefixes = prefixes
        self._forked = forked
        self._ids: list[int] = []
        self._order: list[int] | None = None
        self.num_samples = num_samples
        self.num_slots = manager.num_physical_blocks * manager.block_size
        self._watermark = int(WATERMARK * manager.num_physical_blocks)
        self.copied_tokens = 0

    def can_ever(self, prompt: int, final: int) -> bool:
        blocks = self.num_samples * -(-final // self._manager.block_size)
        return final <= self._max_length and blocks <= self._manager.num_physical_blocks

    def open(self, request: int, length: int, final: int, *, alone: bool) -> bool:
        manager, first = self._manager, request * self.num_samples
        tokens = self._tokens(request, length)
        manager.create_sequence(tokens, first)
        rest = length - int(manager.sequences[first].sequence_length)
        wanted = manager.num_missing_blocks([first], [rest + 1])
        size = manager.block_size
        wanted += (self.num_samples - 1) * (1 if self._forked else -(-(length + 1) // size))
        if wanted > manager.num_available_blocks - (0 if alone else self._watermark):
            manager.release_sequence(first)
            return False
        manager.append_tokens([first], [rest])
        if tokens.size:
            manager.commit_tokens([first], tokens[length - rest :], [rest])
        for sample in range(first + 1, first + self.num_samples):
            if self._forked:
                manager.fork(first, sample)
            else:
                manager.create_sequence((), sample)
                manager.append_tokens([sample], [length])
        self._order = None
        return True

    def grow(self, requests: Iterable[int]) -> None:
        if self._order is None:
            n = self.num_samples
            self._order = list(requests) if n == 1 else [request * n + sample for request in requests for sample in range(n)]
        self._manager.append_tokens(self._order)
        if self._forked:
            self.copied_tokens += len(self._manager.take_copies()) * self._manager.block_size

    def close(self, request: int) -> None:
        for sample in range(request * self.num_samples, (request + 1) * self.num_samples):
            self._manager.release_sequence(sample)
        self._order = None

    def reserved(self) -> int:
        return self._manager.num_live_blocks * self._manager.block_size

    def held_back(self, length: int, final: int) -> int:
        return 0  # any free block will do

    def stored(self, tokens: int) -> int:
        if self._prefixes is None and not self._forked:
            return tokens
        return self.reserved() - self._manager.num_empty_slots

    def _tokens(self, request: int, length: int) -> NDArray[np.int32]:
        """Token ids where they matter: a shared prefix, then what no other request has."""
        trace = self._prefixes
        if trace is None or trace.prefix is None:
            return np.zeros(0, np.int32)
        tokens = np.empty(length, np.int32)
        tokens[: trace.prefix_length] = trace.prefix[request]
        tokens[trace.prefix_length :] = len(trace) + request
        return tokens

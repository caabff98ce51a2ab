"""The caches that paging replaces: every sequence in one run of slots. The same door as the block manager's.

reserve_max           as long as a sequence may ever get
reserve_power_of_two  its final length rounded up to a power of two, from a buddy allocator
grow_and_copy         as long as it is; when full, a run twice as long elsewhere, and the tokens are copied
oracle                exactly its final length, which nobody knows beforehand
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runtime.arena import Arena, Buddy, FirstFit
from runtime.errors import BrokenInvariant, InvalidLength, OutOfBlocks, SequenceExists
from runtime.ids import as_id, as_ids, twice, unknown
from runtime.tokens import as_counts, as_integer, as_tokens, grouped


@dataclass(slots=True)
class Run:
    """A sequence's slots [address, address + capacity), of which the first `length` hold tokens."""

    address: int
    capacity: int
    length: int = 0


class ContiguousManager:
    """Sequences in runs of slots.

    reserve    slots for a new sequence, from its prompt's length and its final one
    grows      whether a full sequence moves to a longer run, or is refused
    """

    def __init__(self, arena: Arena, *, reserve: Callable[[int, int], int], grows: bool = False) -> None:
        self._arena = arena
        self._reserve = reserve
        self._grows = grows
        self._runs: dict[int, Run] = {}
        self._moves: list[tuple[int, int, int]] = []
        self._next_id = 0

    @property
    def sequences(self) -> Mapping[int, Run]:
        """The run of every sequence."""
        return MappingProxyType(self._runs)

    @property
    def num_reserved_slots(self) -> int:
        """Slots that nobody else can have."""
        return self._arena.num_slots - self._arena.num_free

    @property
    def num_free_slots(self) -> int:
        """Slots outside every run, in however many pieces."""
        return self._arena.num_free

    @property
    def largest_hole(self) -> int:
        """The largest run that could be had."""
        return self._arena.largest_hole()

    def num_slots_for(self, prompt_length: int, final_length: int) -> int:
        """Slots that a new sequence takes."""
        prompt_length = as_integer(prompt_length, "num_slots_for: prompt_length", 0)
        return self._arena.size_of(self._reserve(prompt_length, as_integer(final_length, "num_slots_for: final_length", 0)))

    def can_create(self, prompt_length: int, final_length: int) -> bool:
        """Whether `create_sequence` would find room."""
        return self.num_slots_for(prompt_length, final_length) <= self._arena.largest_hole()

    def create_sequence(
        self, prompt: ArrayLike | Iterable[int] = (), sequence_id: int | None = None, *, final_length: int | None = None
    ) -> int:
        """Reserve a run; returns the sequence's id. `final_length` is what the prompt and the answer will come to."""
        num_tokens = as_tokens(prompt, "create_sequence").size
        if sequence_id is None:
            sequence_id = self._next_id = max(self._next_id, max(self._runs, default=-1) + 1)
            self._next_id += 1
        sequence_id = as_id(sequence_id, "create_sequence")
        if sequence_id in self._runs:
            raise SequenceExists(f"create_sequence: sequence {sequence_id} exists: release it first, or give another id")
        final = num_tokens if final_length is None else as_integer(final_length, "create_sequence: final_length", num_tokens)
        wanted = self._reserve(num_tokens, final)
        self._runs[sequence_id] = Run(
            self._take(wanted, f"create_sequence: sequence {sequence_id}"), self._arena.size_of(wanted)
        )
        return sequence_id

    def append_token(self, sequence_id: int) -> int:
        """The slot of one new token."""
        return int(self.append_tokens([sequence_id])[0])

    def append_tokens(self, ids: Iterable[int], counts: int | Sequence[int] | None = None) -> NDArray[np.int64]:
        """The slots of new tokens, in the order of `ids`: counts[i] for ids[i], one each if not said. All, or none."""
        ids = [as_id(sequence_id, "append_tokens") for sequence_id in as_ids(ids, "append_tokens")]
        runs, origin = as_counts(1 if counts is None else counts, len(ids), "append_tokens"), None
        if len(set(ids)) != len(ids):
            if counts is not None:
                raise twice(len(ids))
            ids, runs, origin = grouped(ids)
        self._make_room(ids, runs.tolist())
        slots = np.empty(int(runs.sum()), np.int64)
        end = 0
        for sequence_id, count in zip(ids, runs.tolist(), strict=True):
            run = self._runs[sequence_id]
            slots[end : end + count] = np.arange(run.address + run.length, run.address + run.length + count)
            run.length += count
            end += count
        if origin is not None:
            slots[origin] = slots.copy()
        return slots

    def append_one_each(self) -> None:
        """One token for every sequence, without the slots: for a study that counts."""
        self._make_room(list(self._runs), [1] * len(self._runs))
        for run in self._runs.values():
            run.length += 1

    def commit_tokens(
        self, ids: Iterable[int], token_ids: ArrayLike | Iterable[int], counts: int | Sequence[int] | None = None
    ) -> None:
        """Nothing: tokens are not shared, so nobody asks which they are."""

    def take_copies(self) -> NDArray[np.int64]:
        """Moves (from slot, to slot, tokens) [n, 3] since the last call: make them in order, before any write of the step."""
        moves = np.array(self._moves, np.int64).reshape(-1, 3)
        self._moves.clear()
        return moves

    def release_sequence(self, sequence_id: int) -> None:
        """Free a sequence's run."""
        sequence_id = as_id(sequence_id, "release_sequence")
        self._arena.give_back(self._run(sequence_id, "release_sequence").address)
        del self._runs[sequence_id]

    def invariants_ok(self) -> bool:
        """Whether nothing is broken."""
        return not self._broken()

    def check_invariants(self) -> None:
        """Raise BrokenInvariant, which says all that is broken."""
        broken = self._broken()
        if broken:
            raise BrokenInvariant("ContiguousManager: " + "; ".join(broken))

    def _broken(self) -> list[str]:
        broken = []
        if self._arena.runs() != {run.address: run.capacity for run in self._runs.values()}:
            broken.append("runs of the arena and of the sequences differ")
        end = 0
        for address, size in sorted(self._arena.runs().items()):
            if address < end:
                broken.append(f"the run at {address} begins before {end}, where the one before it ends")
            end = address + size
        if self.num_reserved_slots != sum(self._arena.runs().values()) or end > self._arena.num_slots:
            broken.append(f"{self.num_reserved_slots} slots are reserved, runs of {sum(self._arena.runs().values())}, to {end}")
        broken += [
            f"sequence {i} has {r.length} tokens in {r.capacity}" for i, r in self._runs.items() if r.length > r.capacity
        ]
        return broken

    def _make_room(self, ids: list[int], counts: list[int]) -> None:
        """Move each sequence that outgrows its run; where one cannot be, none is."""
        runs = [self._run(sequence_id, "append_tokens") for sequence_id in ids]
        full = [(run, run.length + count) for run, count in zip(runs, counts, strict=True) if run.length + count > run.capacity]
        if full and not self._grows:
            run, length = full[0]
            raise InvalidLength(f"append_tokens: a run of {run.capacity} slots was reserved, got {length} tokens")
        before = [(run, run.address, run.capacity) for run, _ in full]
        taken: list[int] = []
        try:
            for run, length in full:  # the old run is read, so it is not free yet
                wanted = max(2 * run.capacity, length)
                taken.append(self._take(wanted, "append_tokens"))
                run.address, run.capacity = taken[-1], self._arena.size_of(wanted)
        except OutOfBlocks:
            for run, address, capacity in before:
                run.address, run.capacity = address, capacity
            for address in taken:
                self._arena.give_back(address)
            raise
        for run, address, _ in before:
            self._arena.give_back(address)
            self._moves.append((address, run.address, run.length))

    def _take(self, wanted: int, who: str) -> int:
        address = self._arena.take(wanted)
        if address is None:
            raise OutOfBlocks(
                f"{who} needs {self._arena.size_of(wanted)} slots in one piece; {self._arena.num_free} of "
                f"{self._arena.num_slots} are free, the largest piece is {self.largest_hole}: release a sequence"
            )
        return address

    def _run(self, sequence_id: int, who: str) -> Run:
        run = self._runs.get(as_id(sequence_id, who))
        if run is None:
            raise unknown(who, sequence_id, {})
        return run


def reserve_max(num_slots: int, max_length: int) -> ContiguousManager:
    """Every sequence gets `max_length` slots."""
    max_length = as_integer(max_length, "reserve_max: max_length", 1)
    return ContiguousManager(FirstFit(num_slots), reserve=lambda prompt, final: max_length)


def reserve_power_of_two(num_slots: int) -> ContiguousManager:
    """Every sequence gets its final length, rounded up to a power of two."""
    return ContiguousManager(Buddy(num_slots), reserve=lambda prompt, final: max(final, 1))


def grow_and_copy(num_slots: int) -> ContiguousManager:
    """Every sequence begins with its prompt and one token more, and doubles when that is full."""
    return ContiguousManager(FirstFit(num_slots), reserve=lambda prompt, final: prompt + 1, grows=True)


def oracle(num_slots: int) -> ContiguousManager:
    """Every sequence gets exactly its final length."""
    return ContiguousManager(FirstFit(num_slots), reserve=lambda prompt, final: max(final, 1))

"""Contiguous memory by address: where a run of slots lies, and what is left between the runs."""

from bisect import bisect_left, insort

from runtime.errors import ForeignBlock
from runtime.tokens import as_integer


class FirstFit:
    """Runs of any size, at the lowest address where they fit. Neighbouring holes are one."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots = as_integer(num_slots, "Arena: num_slots", 0, 2**62)
        self.num_free = num_slots
        self._holes: list[tuple[int, int]] = [(0, num_slots)] if num_slots else []  # (address, size), by address
        self._runs: dict[int, int] = {}  # address -> size

    def size_of(self, wanted: int) -> int:
        """Slots that a run of `wanted` takes."""
        return wanted

    def largest_hole(self) -> int:
        """The largest run that fits."""
        return max((size for _, size in self._holes), default=0)

    def take(self, wanted: int) -> int | None:
        """The address of a new run of `wanted` slots, or None where it fits nowhere."""
        for at, (address, size) in enumerate(self._holes):
            if size >= wanted:
                self._holes[at : at + 1] = [(address + wanted, size - wanted)] if size > wanted else []
                self._runs[address] = wanted
                self.num_free -= wanted
                return address
        return None

    def give_back(self, address: int) -> None:
        """Free the run at `address`."""
        size = _run_of(self._runs, address)
        self.num_free += size
        at = bisect_left(self._holes, (address, 0))
        if at < len(self._holes) and self._holes[at][0] == address + size:
            size += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == address:
            address, before = self._holes.pop(at - 1)
            size += before
        insort(self._holes, (address, size))

    def runs(self) -> dict[int, int]:
        """Address and size of every run."""
        return dict(self._runs)


class Buddy:
    """Runs whose size is a power of two and divides their address; a freed run joins its other half when that is free."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots = as_integer(num_slots, "Arena: num_slots", 0, 2**62)
        self.num_free = num_slots
        self._holes: dict[int, set[int]] = {1 << order: set() for order in range(num_slots.bit_length())}
        self._runs: dict[int, int] = {}
        address = 0
        while address < num_slots:  # as few whole runs as the pool divides into
            size = 1 << ((num_slots - address).bit_length() - 1)
            self._holes[size].add(address)
            address += size

    def size_of(self, wanted: int) -> int:
        """Slots that a run of `wanted` takes: the next power of two."""
        return 1 << max(wanted - 1, 0).bit_length()

    def largest_hole(self) -> int:
        """The largest run that fits."""
        return max((size for size, holes in self._holes.items() if holes), default=0)

    def take(self, wanted: int) -> int | None:
        """The address of a new run of `wanted` slots or the next power of two, or None where it fits nowhere."""
        size = self.size_of(wanted)
        fitting = next((found for found, holes in self._holes.items() if found >= size and holes), None)
        if fitting is None:
            return None
        address = min(self._holes[fitting])
        self._holes[fitting].remove(address)
        while fitting > size:
            fitting //= 2
            self._holes[fitting].add(address + fitting)
        self._runs[address] = size
        self.num_free -= size
        return address

    def give_back(self, address: int) -> None:
        """Free the run at `address`."""
        size = _run_of(self._runs, address)
        self.num_free += size
        while 2 * size in self._holes and address ^ size in self._holes[size]:
            self._holes[size].remove(address ^ size)
            address &= ~size
            size *= 2
        self._holes[size].add(address)

    def runs(self) -> dict[int, int]:
        """Address and size of every run."""
        return dict(self._runs)


Arena = FirstFit | Buddy


def _run_of(runs: dict[int, int], address: int) -> int:
    """Take the run at `address` off the list; returns its size."""
    size = runs.pop(address, None)
    if size is None:
        raise ForeignBlock(f"Arena.give_back: no run begins at slot {address} (a double free?): give back what take returned")
    return size

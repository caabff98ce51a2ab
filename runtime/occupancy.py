"""How the blocks of a manager stand: free, cached and live ones, and what waits in host memory."""

from runtime.books import Books


class Occupancy:
    """What there is. To ask for more than the free blocks has all that was given back booked: `can_append` does not."""

    num_physical_blocks: int
    block_size: int
    _books: Books

    @property
    def free_blocks(self) -> list[int]:
        """Blocks that are neither held nor cached, the next to be taken last."""
        free: list[int] = self._books.pool.free_blocks().tolist()
        return free

    @property
    def cached_blocks(self) -> list[int]:
        """Blocks nobody holds whose contents can still be found, the next to be evicted first."""
        cached: list[int] = self._books.pool.cached_blocks().tolist()
        return cached

    @property
    def num_free_blocks(self) -> int:
        """Blocks that are neither held nor cached."""
        return self._books.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """How many blocks are cached; they are evicted when there are no free ones."""
        return self._books.pool.num_cached

    @property
    def num_live_blocks(self) -> int:
        """Blocks that sequences, or copies not yet taken, hold."""
        return self.num_physical_blocks - self._books.pool.num_available

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be taken: free ones, then cached ones."""
        return self._books.pool.num_available

    @property
    def num_empty_slots(self) -> int:
        """Slots behind the ends of the sequences, in their last blocks."""
        table = self._books.table
        return int(table.num_blocks.sum()) * self.block_size - int(table.length.sum())

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that preemption by swap can still use."""
        return self._books.host.num_free

    @property
    def preempted(self) -> tuple[int, ...]:
        """Ids that wait for `resume`."""
        return tuple(self._books.preempted)

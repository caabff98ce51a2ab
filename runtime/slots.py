"""From logical to physical: the slots of runs of tokens, by way of the block tables."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def slots_of_runs(tables: NDArray[np.int32], block_size: int, rows: Ints, begins: Ints, counts: Ints) -> Ints:
    """Slots of tokens begins[i], begins[i] + 1, ... (counts[i] of them) of rows[i] of `tables`, run behind run."""
    if rows.size == 1:
        return _slots_of_run(tables[rows[0]], block_size, int(begins[0]), int(counts[0]))
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1]) + np.repeat(begins - (ends - counts), counts)
    logical = positions // block_size
    slots: Ints = tables[np.repeat(rows, counts), logical].astype(np.int64)
    slots -= logical
    slots *= block_size
    slots += positions  # block * block_size + position - logical * block_size
    return slots


def _slots_of_run(table: NDArray[np.int32], block_size: int, begin: int, count: int) -> Ints:
    """The same for one row: whole blocks, cut at both ends."""
    first, last = begin // block_size, -(-(begin + count) // block_size)
    starts = table[first:last].astype(np.int64) * block_size
    slots = (starts[:, None] + np.arange(block_size)).reshape(-1)
    skipped = begin - first * block_size
    return slots[skipped : skipped + count]

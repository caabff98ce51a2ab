"""What a kernel reads, as tensors over the books' own memory. Of the block manager's pages only this one needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runtime.sequences import SequenceTable

if TYPE_CHECKING:
    import torch


class TensorViews:
    """Tensors of the first rows of a table, kept while they need not be made anew."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._generation = -1
        self._tensors: dict[tuple[str, int, int], torch.Tensor] = {}
        self._starts = np.zeros(1, np.int32)

    def block_tables(self, count: int) -> torch.Tensor:
        """int32 [count, the longest table among them]; rows are table.width apart."""
        width = int(self._table.num_blocks[:count].max(initial=0))
        return self._kept("block_tables", count, width)

    def seq_lens(self, count: int) -> torch.Tensor:
        """int32 [count]."""
        return self._kept("seq_lens", count, 0)

    def query_start_loc(self, count: int) -> torch.Tensor:
        """int32 [count + 1]: running sum of the tokens appended and not committed."""
        if self._starts.size <= count:
            self._starts = np.zeros(2 * count + 1, np.int32)
            self._generation = -1
        tensor = self._kept("query_start_loc", count, 0)
        awaited = self._table.length[:count] - self._table.committed[:count]
        np.cumsum(awaited, out=self._starts[1 : count + 1])
        return tensor

    def _kept(self, what: str, count: int, width: int) -> torch.Tensor:
        if self._generation != self._table.generation or len(self._tensors) > 64:
            self._tensors.clear()
            self._generation = self._table.generation
        tensor = self._tensors.get((what, count, width))
        if tensor is None:
            tensor = self._tensors[what, count, width] = self._make(what, count, width)
        return tensor

    def _make(self, what: str, count: int, width: int) -> torch.Tensor:
        import torch  # here and not above: the pool is NumPy

        if what == "block_tables":
            return torch.from_numpy(self._table.blocks[:count, :width])
        if what == "seq_lens":
            return torch.from_numpy(self._table.length[:count])
        return torch.from_numpy(self._starts[: count + 1])

"""The block tables of all rows in one array, which is kept in the order of the rows however often that changes.

A line of a long context is wide (8,192 entries for 131,072 tokens in blocks of 16), so a change of order costs the bytes
that it moves. Where sequences leave the middle of a batch the others keep their order: runs of lines move, each in one
piece and in place. And the longest run does not move at all: the first row need not be the first line, so the rows slide
along the lines instead.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Run = tuple[int, int, int]  # rows [begin, end) take what as many rows from the third on have
SHORT = 8  # rows: what comes in shorter runs is moved row by row
MANY = 64  # runs: a change of order in more is a shuffle


class BlockTables:
    """Lines of physical block ids, one for each row; entries behind a row's blocks are 0.

    Arrays
        rows    [num_rows, width]      int32, the lines from _first on
        _lines  [2 * num_rows, width]  int32; those outside of `rows` are 0
        _whole  [2 * num_rows]         the same memory, a line an element: NumPy moves such runs of lines at the speed of memory
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self.width = width
        self._lines = np.zeros((2 * num_rows, width), np.int32)
        self._whole = self._lines.view(np.dtype((np.void, 4 * width)))[:, 0]
        self._first = 0
        self.rows = self._lines[:num_rows]

    def grown(self, num_rows: int, width: int) -> "BlockTables":
        """The same tables with room for more rows, or for longer ones."""
        larger = BlockTables(num_rows, width)
        larger.rows[: len(self.rows), : self.width] = self.rows
        return larger

    def permute(self, source: Rows, runs: list[Run]) -> None:
        """Give row r the table of row source[r]; rows behind all these have none. `runs` are runs_of(source)."""
        long = [run for run in runs if run[1] - run[0] >= SHORT]
        if not long or any(one[2] > other[2] for one, other in pairwise(long)):
            long, rows = [], np.arange(source.size)  # a shuffle: all by way of a copy
        else:
            rows = np.array([row for begin, end, _ in runs if end - begin < SHORT for row in range(begin, end)], np.int64)
        tables = self._whole[self._first + source[rows]]
        if long:
            self._move(long, source.size)
        self._whole[self._first + rows] = tables

    def _move(self, runs: list[Run], count: int) -> None:
        """Move each run of lines in one piece. None is written before it is read, for the runs keep their order."""
        whole, before = self._whole, self._first
        after = self._slide(runs)
        if after == before and all(begin == source for begin, _, source in runs):
            return
        moves = [(after + begin, before + source, end - begin) for begin, end, source in runs]
        for to, at, size in moves:
            if to < at:
                whole[to : to + size] = whole[at : at + size]
        for to, at, size in reversed(moves):
            if to > at:
                whole[to : to + size] = whole[at : at + size]
        self._lines[before : min(after, before + count)] = 0  # lines that are no row's any more
        self._lines[max(after + count, before) : before + count] = 0

    def _slide(self, runs: list[Run]) -> int:
        """Choose the first line so that the longest run stays where it is; at the end of the lines, begin anew."""
        begin, _, source = max(runs, key=lambda run: run[1] - run[0])
        if begin != source:
            first, last = self._first + source - begin, len(self._lines) - len(self.rows)
            self._first = first if 0 <= first <= last else last if first < 0 else 0
            self.rows = self._lines[self._first : self._first + len(self.rows)]
        return self._first


def runs_of(source: Rows) -> list[Run]:
    """Rows that take the tables of others in runs of neighbours; empty if these are many."""
    last = (source[1:] - source[:-1] != 1).nonzero()[0]
    if last.size >= MANY:
        return []
    edges = [0, *(last + 1).tolist(), source.size]
    return [(begin, end, int(source[begin])) for begin, end in pairwise(edges)]

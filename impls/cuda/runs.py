"""Runs of blocks that several sequences' tables have in common: found on block ids, cut into pieces, listed for two kernels.

Plain data and NumPy; see prefix.cuh for what the kernels do with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

MAX_DEPTH = 3  # runs that a sequence may have, one after another
WASTE = 1.5    # what reading a run costs more than its bytes: few sequences leave warps without rows
MORE_WAVES = 3  # of all CTAs, that cuts of runs may make of the fewest that are needed
PIECE_COST = 2  # tiles whose time a piece takes besides its own, to begin and to leave its sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Tokens begin .. end - 1 of `seqs`, whose tables are the same there; `depth` runs come before it."""

    seqs: tuple[int, ...]
    begin: int
    end: int
    depth: int

    @property
    def saved(self) -> float:
        """Tokens that are not read, less what it costs."""
        return (self.end - self.begin) * (len(self.seqs) - 1 - WASTE)


def find_runs(tables: np.ndarray, most: Sequence[int], block_size: int, unit: int, always: bool = False) -> list[Run]:
    """Find runs of shared blocks that are worth it.

    tables    [num_seqs, max_blocks_per_seq] block ids
    most      tokens of each sequence that all of its query tokens see; no run goes further
    unit      tokens of which a run is a whole number; a multiple of block_size
    always    any run is worth it

    Runs of a sequence follow one another from its first token on.
    """
    blocks = unit // block_size
    limits = np.asarray(most) // unit * blocks
    found: list[Run] = []

    def visit(seqs: np.ndarray, begin: int, reached: int, depth: int) -> None:
        """`seqs` have the same blocks up to `reached`, and runs up to `begin`."""
        for members in _alike(tables, seqs[limits[seqs] > reached], reached):
            end = reached + _common(tables[members, reached : int(limits[members].min())]) // blocks * blocks
            if end == reached:
                continue
            run = Run(seqs=tuple(members.tolist()), begin=begin * block_size, end=end * block_size, depth=depth)
            taken = always or run.saved > 0
            if taken:
                found.append(run)
            if depth + taken < MAX_DEPTH:
                visit(members, end if taken else begin, end, depth + taken)

    visit(np.arange(len(tables)), 0, 0, 0)
    return found


def _alike(tables: np.ndarray, seqs: np.ndarray, at: int) -> Iterator[np.ndarray]:
    """Those of `seqs`, two at least, whose tables have the same block there."""
    if len(seqs) < 2:
        return
    order = seqs[np.argsort(tables[seqs, at], kind="stable")]
    ids = tables[order, at]
    for members in np.split(order, np.flatnonzero(ids[1:] != ids[:-1]) + 1):
        if len(members) > 1:
            yield members


def _common(rows: np.ndarray) -> int:
    """How many first columns are the same in all rows."""
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else rows.shape[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How runs are cut into pieces, for a kernel whose CTAs take one piece at a time, for one KV head.

    at_once    query tokens of a piece
    tile       tokens that a run is cut by; 0: it is not cut, since the kernel shares out its tiles itself
    columns    CTAs for one KV head: how many pieces are taken at the same time
    """

    at_once: int
    tile: int = 0
    columns: int = 0

    def most_places(self, max_num_tokens: int) -> int:
        """Pieces' query tokens, of all runs, at most."""
        return MAX_DEPTH * max_num_tokens + (MORE_WAVES * self.columns * self.at_once if self.tile else 0)

    def most_pieces(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Of all runs, at most."""
        uncut = MAX_DEPTH * (math.ceil(max_num_tokens / self.at_once) + max_num_seqs // 2)
        return uncut + (MORE_WAVES * self.columns if self.tile else 0)

    def lengths(self, tokens: Sequence[int], queries: Sequence[int]) -> list[int]:
        """Tokens of a piece, at most, for each of several runs of so many tokens and query tokens.

        Pieces are of about the same length, which is the one by which CTAs are the soonest done.
        """
        if not self.tile or not tokens:
            return list(tokens)
        tiles, parts = -(-np.asarray(tokens) // self.tile), -(-np.asarray(queries) // self.at_once)
        fewest = -(-int(parts.sum()) // self.columns)
        lengths = [self._shortest(tiles, parts, waves * self.columns) for waves in range(fewest, fewest + MORE_WAVES)]
        waves = [math.ceil(int((parts * -(-tiles // length)).sum()) / self.columns) for length in lengths]
        best = min(zip(waves, lengths, strict=True), key=lambda pair: pair[0] * (pair[1] + PIECE_COST))
        pieces = -(-tiles // best[1])
        return (-(-tiles // pieces) * self.tile).tolist()

    @staticmethod
    def _shortest(tiles: np.ndarray, parts: np.ndarray, most: int) -> int:
        """The fewest tiles of a piece that make no more than `most` pieces, of `parts` that may not be fewer."""
        low, high = 1, int(tiles.max())
        while low < high:
            middle = (low + high) // 2
            if (parts * -(-tiles // middle)).sum() <= most:
                high = middle
            else:
                low = middle + 1
        return low


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """Pieces of runs, as prefix.cuh has them.

    starts       [pieces + 1] places: those of a piece's query tokens follow one another
    ends, firsts [pieces] tokens of the piece: firsts .. ends - 1
    table_rows   [pieces] the sequence by whose table it is read
    tokens       [places] which query token
    own_firsts   [num_seqs] the first token that is in no run of the sequence
    lists        [num_seqs + 1] where a sequence's part of `left` begins
    left         [lists[-1]] of each piece of a sequence, the place of its first query token
    """

    starts: np.ndarray
    ends: np.ndarray
    firsts: np.ndarray
    table_rows: np.ndarray
    tokens: np.ndarray
    own_firsts: np.ndarray
    lists: np.ndarray
    left: np.ndarray


def list_pieces(runs: Sequence[Run], query_start_loc: np.ndarray, cut: Cut) -> Listing:
    """Cut runs of sequences whose query tokens begin at `query_start_loc` [num_seqs + 1]; long pieces come first."""
    num_seqs = len(query_start_loc) - 1
    own_firsts = np.zeros(num_seqs, np.int32)
    counts = np.diff(query_start_loc)
    lengths = cut.lengths([run.end - run.begin for run in runs], [int(counts[list(run.seqs)].sum()) for run in runs])
    pieces: list[tuple[int, int, int]] = []
    starts, tokens, seqs, left = [0], [np.zeros(0, np.int32)], [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    for run, length in sorted(zip(runs, lengths, strict=True), key=lambda pair: -pair[1]):
        members = np.array(run.seqs, np.int32)
        own_firsts[members] = np.maximum(own_firsts[members], run.end)
        queries = np.concatenate([np.arange(*query_start_loc[seq : seq + 2]) for seq in run.seqs])
        befores = np.cumsum(counts[members]) - counts[members]
        for first in range(run.begin, run.end, length):
            place = starts[-1]
            tokens.append(queries)
            seqs.append(members)
            left.append(place + befores)
            for at in range(0, len(queries), cut.at_once):
                pieces.append((min(first + length, run.end), first, run.seqs[0]))
                starts.append(place + min(at + cut.at_once, len(queries)))
    ends, firsts, table_rows = np.array(pieces, np.int32).reshape(-1, 3).T
    of_seqs = np.concatenate(seqs)
    return Listing(
        starts=np.array(starts, np.int32), ends=ends, firsts=firsts, table_rows=table_rows, tokens=np.concatenate(tokens),
        own_firsts=own_firsts, lists=np.concatenate([[0], np.bincount(of_seqs, minlength=num_seqs).cumsum()]),
        left=np.concatenate(left)[np.argsort(of_seqs, kind="stable")],
    )

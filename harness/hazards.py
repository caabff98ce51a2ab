"""What lies in memory that must not be read, and what is done to inputs so that a fault shows."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hazards:
    """One family of inputs.

    name       as records show it
    fill       what every slot holds that no kernel may let through: "nan", or "decoy": finite, large values
    needles    one key in each row carries most of the weight, at first or last token, block edge or split edge
    seed       families of one case differ in all values and tables
    """

    name: str
    fill: str
    needles: bool
    seed: int

    def __post_init__(self) -> None:
        if self.fill not in ("nan", "decoy"):
            raise ValueError(f"fill must be 'nan' or 'decoy' (got {self.fill!r})")


#: Every token counts, and NaN lies wherever nothing may be read.
PLAIN = Hazards(name="plain", fill="nan", needles=False, seed=1)
#: A needle shows its own edge and blinds everything else, so it never runs alone. Decoys are finite: a kernel that
#: drops NaN but reads too far is caught by them.
NEEDLES = Hazards(name="needles", fill="decoy", needles=True, seed=2)
#: What is timed: as PLAIN, but other values, tables and addresses than any that were checked before.
TIMED = Hazards(name="timed", fill="nan", needles=False, seed=3)

#: Value of every V element in a decoy slot: a weight of one in ten thousand still moves an output by more than f16 rounds.
DECOY_VALUE = 30000.0


def seed_of(digest: str, hazards: Hazards, layer: int = 0) -> int:
    """A seed for one layer of one family of one case."""
    return (int(digest, 16) * 1000003 + hazards.seed * 10007 + layer) % (1 << 62)


def deal_blocks(blocks_per_seq: tuple[int, ...], num_blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Deal shuffled blocks to sequences.

    Returns the block tables, [num_seqs, max(blocks) + 1] int32. Every row has an unused entry at least; unused entries
    name a block that no sequence owns.
    """
    deck = rng.permutation(num_blocks).astype(np.int32)
    unowned = int(deck[-1])
    width = max(blocks_per_seq, default=0) + 1
    tables = np.full((len(blocks_per_seq), width), unowned, dtype=np.int32)
    used = np.arange(width)[None, :] < np.asarray(blocks_per_seq, dtype=np.int64).reshape(-1, 1)
    tables[used] = deck[: int(used.sum())]
    return tables


def needle_positions(num_visible: int, block_size: int, num_rows: int, start: int) -> np.ndarray:
    """Positions of the needles of `num_rows` rows that see `num_visible` keys; `start` rotates them between sequences.

    Half of the rows take an edge in turn: first and last token, both sides of the first and last block edge, and of a
    cut in 2, 4 and 8 splits. The other half walk through the blocks, first or last slot in turn.
    """
    edges = {0, num_visible - 1, block_size - 1, block_size}
    last_edge = (num_visible - 1) // block_size * block_size
    edges |= {last_edge, last_edge - 1}
    for splits in (2, 4, 8):
        edges |= {num_visible // splits, num_visible // splits - 1}
    sorted_edges = np.array(sorted(edge for edge in edges if 0 <= edge < num_visible))
    turn = start + np.arange(num_rows)
    at_edges = sorted_edges[(turn // 2) % len(sorted_edges)]
    in_blocks = np.minimum((turn // 2) * block_size + (turn // 2 % 2) * (block_size - 1), 1 << 40) % num_visible
    return np.where(turn % 2 == 0, at_edges, in_blocks)

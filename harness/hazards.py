"""What lies in memory that must not be read, and what is done to inputs so that a fault shows."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hazards:
    """One family of inputs.

    name       as records show it
    fill       what every slot holds that no kernel may let through: "nan"; or "mixed", in turn: large and finite, infinite,
               65504, the dtype's largest number; or "stale": ordinary tokens, as an engine leaves them
    foreign    unused table entries name a live block of another sequence; else a block that nobody owns, poisoned
    needles    one key in each row carries most of the weight, at first or last token, block edge or split edge
    outlier    one head's scores and values lie far from all others' (harness/ops/outlier.py)
    behind     slots before every window of a sequence hold what `fill` says, too; else the tokens that were there
    seed       families of one case differ in all values and tables
    """

    name: str
    fill: str
    needles: bool
    seed: int
    foreign: bool = False
    outlier: bool = False
    behind: bool = True

    def __post_init__(self) -> None:
        if self.fill not in ("nan", "mixed", "stale"):
            raise ValueError(f"fill must be 'nan', 'mixed' or 'stale' (got {self.fill!r})")


#: Every token counts, and NaN lies wherever nothing may be read.
PLAIN = Hazards(name="plain", fill="nan", needles=False, outlier=True, seed=1)
#: A needle shows its own edge and blinds everything else, so it never runs alone. A kernel that drops NaN, by a maximum or
#: on purpose, has met none here: infinities and large numbers lie where PLAIN has NaN, and decoys just past each end.
NEEDLES = Hazards(name="needles", fill="mixed", needles=True, seed=2, foreign=True)
#: Another batch of the same shape: as PLAIN, but other values and tables.
OTHER = Hazards(name="other", fill="nan", needles=False, seed=4)
#: What is timed: as PLAIN, but other values, tables and addresses than any that were checked before.
TIMED = Hazards(name="timed", fill="nan", needles=False, seed=3)


def finite(family: Hazards) -> Hazards:
    """The family for entries that say `tails="finite"`: the same values and tables, and no poison."""
    return dataclasses.replace(family, name=f"{family.name}.finite", fill="stale")


def as_asked(family: Hazards, tails: str, has_window: bool) -> Hazards:
    """The family for entries that say these `tails` (harness/impl.py)."""
    if tails == "window" and has_window:
        return dataclasses.replace(family, name=f"{family.name}.window", behind=False)
    return finite(family) if tails == "finite" else family


#: Value of every V element in a decoy: a weight of one in ten thousand still moves an output by more than f16 rounds.
DECOY_VALUE = 30000.0
#: bytes of one pool that are poisoned at a time, which takes as much again
POISON_BYTES = 256 << 20


def seed_of(digest: str, hazards: Hazards, layer: int = 0) -> int:
    """A seed for one layer of one family of one case."""
    return (int(digest, 16) * 1000003 + hazards.seed * 10007 + layer) % (1 << 62)


def deal_blocks(
    blocks_per_seq: tuple[int, ...], num_blocks: int, rng: np.random.Generator, shared: Sequence[tuple[int, int]] = ()
) -> np.ndarray:
    """Deal shuffled blocks to sequences; `shared` holds the leader of each and how many blocks it has from it.

    Returns the block tables, [num_seqs, max(blocks) + 1] int32. Every row has an unused entry at least; unused entries
    name a block that no sequence owns.
    """
    deck = rng.permutation(num_blocks).astype(np.int32)
    unowned = int(deck[-1])
    width = max(blocks_per_seq, default=0) + 1
    tables = np.full((len(blocks_per_seq), width), unowned, dtype=np.int32)
    column = np.arange(width)[None, :]
    used = column < np.asarray(blocks_per_seq, dtype=np.int64).reshape(-1, 1)
    if shared:
        used &= column >= np.asarray([count for _, count in shared], dtype=np.int64).reshape(-1, 1)
    tables[used] = deck[: int(used.sum())]
    for seq, (leader, count) in enumerate(shared):
        tables[seq, :count] = tables[leader, :count]
    return tables


def foreign_entries(tables: np.ndarray, blocks_per_seq: tuple[int, ...]) -> np.ndarray:
    """Let unused entries name a block in the middle of the next sequence that has one, or the last of its blocks where it
    shares that one; tables of one owner, and of those that share all, stay as they are."""
    owners = [seq for seq, count in enumerate(blocks_per_seq) if count]
    filled = tables.copy()
    for seq, count in enumerate(blocks_per_seq):
        after = bisect.bisect_right(owners, seq)
        other = next((owner for owner in (*owners[after : after + 1], *owners[:1]) if owner != seq), None)
        if other is not None:
            middle, last = tables[other, [blocks_per_seq[other] // 2, blocks_per_seq[other] - 1]]
            foreign = next((block for block in (middle, last) if block not in tables[seq, :count]), None)
            if foreign is not None:
                filled[seq, count:] = foreign
    return filled


def wild_entries(tables: np.ndarray, blocks_per_seq: tuple[int, ...], num_blocks: int) -> np.ndarray:
    """Fill unused entries with ids of no block, in turn: -1, one past the last, the largest int32."""
    column = np.arange(tables.shape[1])[None, :]
    used = column < np.asarray(blocks_per_seq, dtype=np.int64).reshape(-1, 1)
    ids = np.array([-1, num_blocks, 2**31 - 1], dtype=np.int32)
    turn = column + np.arange(len(tables))[:, None]
    return np.where(used, tables, ids[turn % len(ids)]).astype(np.int32)


def poison(key: torch.Tensor, value: torch.Tensor, unused: torch.Tensor, fill: str) -> None:
    """Overwrite unused slots of pools [num_blocks, num_kv_heads, block_size, head_dim]; `unused` is [num_blocks, block_size].

    The kinds of "mixed" take turns from slot to slot and from head to head; "stale" leaves what was made.
    """
    if fill == "stale":
        return
    if fill == "nan":
        for pool in (key, value):
            pool.masked_fill_(unused[:, None, :, None], math.nan)
        return
    largest = torch.finfo(key.dtype).max
    of_key = (0.0, math.inf, 65504.0, -math.inf, largest, -65504.0)  # the first stays an ordinary key: a decoy
    of_value = (DECOY_VALUE, -math.inf, 65504.0, math.inf, -largest, -65504.0)
    slots = max(1, POISON_BYTES // (key[:1, :, :1].numel() * key.element_size()))
    for block, offset in (part.unbind(1) for part in torch.split(unused.nonzero(), slots)):
        turn = (block * key.shape[2] + offset)[:, None] + torch.arange(key.shape[1], device=key.device)
        kind = (turn % len(of_key))[..., None]  # [slots, num_kv_heads, 1]
        keys, values = (torch.tensor(kinds, dtype=key.dtype, device=key.device)[kind] for kinds in (of_key, of_value))
        key[block, :, offset] = torch.where(kind == 0, key[block, :, offset], keys)
        value[block, :, offset] = values.expand(*kind.shape[:2], value.shape[3])

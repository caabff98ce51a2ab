"""What the torch implementations of attention share: sequences dealt into batches, and blocks gathered from any layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.guards import workspace
from harness.ops.dtypes import movable
from harness.registry import Prepared, Unsupported

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep
    from harness.ops.layouts import Layout

    Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences worked on at once, longest first, that have equally many query tokens which see a key.

    seqs, lengths    of each sequence, on the host: its index, its tokens in the cache
    q_len            query tokens of each
    tokens           [num_seqs * q_len]         int64, their place in `query` and `out`
    limits           [num_seqs, q_len]          int64, keys that each sees
    table            [num_seqs, num_blocks]     int64, block ids; past a sequence's own blocks, its second one again
    tails            [2, num_tails]             int64, (sequence, token) of the slots past the end in last blocks, and of
                     those before the window in first ones
                     (table and tails have no columns where nothing is paged)

    With a window a sequence begins, here, with the first block that holds a key which some row sees: tokens are counted from
    that block on, in `lengths`, `limits` and `tails`.
    """

    seqs: list[int]
    lengths: list[int]
    q_len: int
    tokens: Any
    limits: Any
    table: Any
    tails: Any

    def arrays(self) -> dict[str, Any]:
        """What goes to the device."""
        return {name: getattr(self, name) for name in ("tokens", "limits", "table", "tails")}


class Batched(Prepared):
    """Deals a step's sequences into batches; all their integers lie in one buffer, filled by one copy a plan.

    batches    the plan; arrays on the device
    blind      [num_blind] int64, query tokens that see no key: out 0, lse -inf
    """

    def __init__(self, spec: AttentionSpec) -> None:
        if why := spec.layout.why_not(spec):
            raise Unsupported(why)
        self.spec = spec
        num_integers = 2 * spec.max_num_tokens
        if spec.layout.paged:
            tails = (4 if spec.window else 2) * spec.block_size
            num_integers += spec.max_num_seqs * (spec.max_blocks_per_seq + tails)
        self.integers = workspace(num_integers, torch.int64, spec.device)
        self.workspace_bytes = 8 * len(self.integers)

    def deal(self, step: AttentionStep, key: Callable[[int, int, int], Any]) -> None:
        """Put sequences of equal `key(seq, seq_len, q_len)` into one batch."""
        host, blind = batches_of(step, self.spec.block_size if self.spec.layout.paged else None, key, self.spec.window)
        arrays = [array for batch in host for array in batch.arrays().values()]
        flat = np.concatenate([array.ravel() for array in (*arrays, blind)])
        self.integers[: len(flat)].copy_(torch.from_numpy(flat))
        sizes = [array.size for array in arrays]
        *parts, self.blind = self.integers[: len(flat)].split([*sizes, blind.size])
        shaped = iter([part.view(array.shape) for part, array in zip(parts, arrays, strict=True)])
        self.batches = [dataclasses.replace(batch, **{name: next(shaped) for name in batch.arrays()}) for batch in host]
        self.num_tokens = step.num_tokens

    def check_tokens(self, query: torch.Tensor) -> None:
        if len(query) != self.num_tokens:
            raise ValueError(f"planned for {self.num_tokens} query tokens (got {len(query)})")

    def finish_blind(self, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
        """Write the rows that see no key."""
        if len(self.blind):
            out.index_fill_(0, self.blind, 0.0)
            if sinks is None:
                lse.index_fill_(0, self.blind, -math.inf)
            else:
                lse.index_copy_(0, self.blind, sinks.expand(len(self.blind), -1))


def batches_of(
    step: AttentionStep, block_size: int | None, key: Callable[[int, int, int], Any], window: int | None = None
) -> tuple[list[Batch], Ints]:
    """Deal the sequences; returns the batches, arrays on the host, and the query tokens that see no key.

    `block_size` None is a cache without pages.
    """
    seq_lens, starts = step.host_seq_lens.astype(np.int64), step.host_query_start_loc.astype(np.int64)
    firsts = np.maximum(seq_lens - np.diff(starts) - window + 1, 0) if window else np.zeros_like(seq_lens)
    begins = firsts // block_size if block_size else firsts  # blocks before them are not looked at
    seq_lens, firsts = seq_lens - begins * (block_size or 0), firsts - begins * (block_size or 0)
    dealt: dict[Any, list[int]] = {}
    blind: list[Ints] = [np.empty(0, np.int64)]
    for seq in np.argsort(-seq_lens, kind="stable").tolist():
        q_len, seq_len = int(starts[seq + 1] - starts[seq]), int(seq_lens[seq])
        if q_len > seq_len:  # the first ones stand before the sequence's first token
            blind.append(np.arange(starts[seq], starts[seq] + q_len - seq_len))
        sighted = min(q_len, seq_len)
        if sighted:
            dealt.setdefault((sighted, key(seq, seq_len, sighted)), []).append(seq)
    batches = []
    for (q_len, _), chosen in dealt.items():
        seqs = np.array(chosen)
        back = np.arange(-q_len, 0)
        batches.append(Batch(
            seqs=chosen, lengths=seq_lens[seqs].tolist(), q_len=q_len,
            tokens=(starts[seqs + 1][:, None] + back).ravel(), limits=seq_lens[seqs][:, None] + back + 1,
            **_pages(step.host_block_tables[seqs], seq_lens[seqs], block_size, begins[seqs], firsts[seqs]),
        ))  # fmt: skip
    return batches, np.concatenate(blind)


def _pages(tables: Any, seq_lens: Ints, block_size: int | None, begins: Ints, firsts: Ints) -> dict[str, Ints]:
    """`table` and `tails` of the sequences whose rows of the block tables are given, from column `begins` on; of their
    `seq_lens` tokens those before `firsts` are behind the window."""
    if block_size is None:
        return {"table": np.empty((len(seq_lens), 0), np.int64), "tails": np.empty((2, 0), np.int64)}
    num_blocks = -(-seq_lens // block_size)
    column = np.arange(num_blocks.max())
    # Never read an entry past a sequence's own blocks: it may hold anything. The second of three has no slot that does.
    owned = np.where(column[None, :] < num_blocks[:, None], column[None, :], np.minimum(num_blocks - 1, 1)[:, None])
    used = seq_lens - (num_blocks - 1) * block_size
    slot = np.arange(block_size)
    row, offset = np.nonzero(slot >= used[:, None])
    hidden = np.nonzero(slot < firsts[:, None])
    return {
        "table": np.take_along_axis(tables, begins[:, None] + owned, axis=1).astype(np.int64),
        "tails": np.concatenate([np.stack([row, (num_blocks[row] - 1) * block_size + offset]), np.stack(hidden)], axis=1),
    }


def gather(
    key_cache: torch.Tensor, value_cache: torch.Tensor, layout: Layout, table: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the blocks of `table` [num_seqs, num_blocks] out of a cache: K and V [num_seqs, num_kv_heads, tokens, head_dim].

    One copy each in most layouts; HND_SWIZZLED is put in order by another. The results may be strided.
    """
    key, value = _gather(movable(key_cache), movable(value_cache), layout, table, num_kv_heads)
    return key.view(key_cache.dtype), value.view(value_cache.dtype)


def _by_head(cache: torch.Tensor, table: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Copy the blocks of `table` out of a cache [num_blocks, num_kv_heads, ...]: [num_seqs * num_kv_heads, num_blocks, ...].

    A cache whose blocks are strided is not copied whole: its blocks are, and put in order by another copy.
    """
    if cache.stride(0) != num_kv_heads * cache.stride(1):
        return cache.index_select(0, table.flatten()).unflatten(0, table.shape).transpose(1, 2).flatten(0, 1)
    place = table[:, None, :] * num_kv_heads + torch.arange(num_kv_heads, device=table.device)[:, None]
    return cache.flatten(0, 1).index_select(0, place.flatten()).unflatten(0, (-1, table.shape[1]))


def _gather(
    key_cache: torch.Tensor, value_cache: torch.Tensor, layout: Layout, table: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if layout.name in ("HND", "HND_SWIZZLED"):
        key, value = _by_head(key_cache, table, num_kv_heads), _by_head(value_cache, table, num_kv_heads)
        if layout.name == "HND_SWIZZLED":
            key, value = layout.restore(key, value)
        return tuple(blocks.reshape(len(table), num_kv_heads, -1, blocks.shape[-1]) for blocks in (key, value))
    if layout.name == "X_PACKED":
        key_cache, value_cache = key_cache.permute(0, 3, 1, 2, 4), value_cache.permute(0, 3, 1, 2)
    pair = [cache.index_select(0, table.flatten()) for cache in (key_cache, value_cache)]
    key, value = (blocks.reshape(len(table), -1, num_kv_heads, value_cache.shape[-1]).transpose(1, 2) for blocks in pair)
    return key, value

"""Paged attention: what a problem is, and the bytes and FLOPs it must move. Plain data, no torch.

    out[i,h,:] = sum_t softmax_t(scale * query[i,h,:] . key[t,g,:]) * value[t,g,:],   g = h // (num_q_heads // num_kv_heads)

Token i of a sequence with q_len queries sees keys t <= seq_len - q_len + i; where there is none, out = 0, lse = -inf.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from harness.ops.case import Case
from harness.ops.dtypes import ITEMSIZE
from harness.ops.layouts import HND, Layout

if TYPE_CHECKING:
    import numpy as np
    import torch

DTYPES = ("f32", "f16", "bf16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """One attention problem.

    seq_lens       tokens in the cache of each sequence, the new ones included; () is an empty batch
    q_lens         query tokens of each sequence; () is decode, one each
    dtype          of query, caches and out
    pool_slack     blocks in the pool for each block in use; the rest are poisoned
    scale          of the scores; None is head_dim ** -0.5

    Raises CaseError, naming the rule and what was got, for a problem that cannot be.
    """

    op: ClassVar[str] = "attention"

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...] = ()
    dtype: str = "bf16"
    pool_slack: float = 1.25
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("num_q_heads", "num_kv_heads", "head_dim", "block_size")
        self.require(
            self.num_q_heads % self.num_kv_heads == 0,
            "num_q_heads must be a multiple of num_kv_heads",
            (self.num_q_heads, self.num_kv_heads),
        )
        self.require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}", self.dtype)
        for field in ("seq_lens", "q_lens"):
            lens = getattr(self, field)
            good = isinstance(lens, tuple) and all(type(n) is int and n >= 0 for n in lens)
            self.require(good, f"{field} must be a tuple of whole numbers of at least 0", lens)
        if not self.q_lens:
            object.__setattr__(self, "q_lens", (1,) * len(self.seq_lens))
        self.require(
            len(self.q_lens) == len(self.seq_lens),
            "q_lens must have one entry a sequence",
            (len(self.q_lens), len(self.seq_lens)),
        )
        self.require_fraction("pool_slack", lambda slack: 1.0 <= slack < 1e6, "must be at least 1, and below a million")
        if self.scale is not None:
            self.require_fraction("scale", lambda scale: scale != 0, "must be None or a finite number other than 0")

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the whole batch."""
        return sum(self.q_lens)

    @property
    def max_q_len(self) -> int:
        return max(self.q_lens, default=0)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens, default=0)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def blocks_per_seq(self) -> tuple[int, ...]:
        """Blocks that each sequence's tokens fill."""
        return tuple(-(-n // self.block_size) for n in self.seq_lens)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool: those in use, the slack, and two that no sequence owns."""
        return math.ceil(sum(self.blocks_per_seq) * self.pool_slack) + 2

    @property
    def cache_bytes(self) -> int:
        """K and V of the whole pool, one layer."""
        return 2 * self.num_blocks * self.block_size * self.num_kv_heads * self.head_dim * ITEMSIZE[self.dtype]

    def staged_bytes(self, sets: int, layouts: Collection[Layout]) -> int:
        """As Case.staged_bytes. Caches are only read: HND is what was made. Without pages every sequence takes as much as
        the longest. One and a half caches pass through while slots are poisoned and layouts arranged."""
        longest = 2 * self.num_seqs * self.max_seq_len * self.num_kv_heads * self.head_dim * ITEMSIZE[self.dtype]
        copies = [self.cache_bytes if layout.paged else longest for layout in layouts if layout is not HND]
        return sets * (self.cache_bytes + sum(copies)) + 3 * self.cache_bytes // 2

    @property
    def traffic_bytes(self) -> int:
        """Bytes that must cross memory: K and V of every token once, query in, out and lse out.

        The table entries of blocks in use (4 bytes each) are counted too; they matter at block size 1.
        """
        size = ITEMSIZE[self.dtype]
        kv = 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_dim * size
        rows = self.num_tokens * self.num_q_heads
        return kv + rows * (2 * self.head_dim * size + 4) + 4 * sum(self.blocks_per_seq)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products over the visible keys."""
        visible = 0
        for seq_len, q_len in zip(self.seq_lens, self.q_lens, strict=True):
            first = max(seq_len - q_len + 1, 0)  # keys that the first query token sees; the last sees seq_len
            visible += (first + seq_len) * (seq_len - first + 1) // 2
        return 4 * visible * self.num_q_heads * self.head_dim

    @property
    def query_starts(self) -> tuple[int, ...]:
        """query_start_loc as plain numbers: num_seqs + 1 of them."""
        return (0, *itertools.accumulate(self.q_lens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What `prepare` sees: shapes, types, capacities and the device; never values.

    max_num_seqs, max_num_tokens, max_q_len, max_seq_len, max_blocks_per_seq    capacities that no step exceeds
    num_blocks    of each cache
    params        the entry's declared parameters, defaults filled in
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    scale: float
    layout: Layout
    num_blocks: int
    max_num_seqs: int
    max_num_tokens: int
    max_q_len: int
    max_seq_len: int
    max_blocks_per_seq: int
    device: str
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionStep:
    """One step of the serving loop: what `plan` sees, once for all layers.

    Shapes, on the device
        block_tables      [num_seqs, max_blocks_per_seq]    int32, block ids; entries past a sequence's blocks are unused
        seq_lens          [num_seqs]                        int32, tokens
        query_start_loc   [num_seqs + 1]                    int32, query tokens before each sequence
    and the same on the host, as NumPy arrays: host_block_tables, host_seq_lens, host_query_start_loc.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    host_block_tables: np.ndarray
    host_seq_lens: np.ndarray
    host_query_start_loc: np.ndarray

    @property
    def num_seqs(self) -> int:
        return len(self.host_seq_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.host_query_start_loc[-1])

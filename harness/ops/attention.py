"""Paged attention: what a problem is, and the bytes and FLOPs it must move. Plain data, no torch.

    out[i,h,:] = sum_t softmax_t(scale * query[i,h,:] . key[t,g,:]) * value[t,g,:],   g = h // (num_q_heads // num_kv_heads)

Token i of a sequence with q_len queries stands at position p = seq_len - q_len + i and sees keys t <= p; where there is
none, out = 0, lse = -inf. A case may ask for more, in this order:

    softcap    cap * tanh(score / cap) in place of the score
    alibi      slopes[h] * (t - p) is added to it
    window     keys t <= p - window are not seen: exactly `window` keys, the current one included
    sinks      exp(sinks[h]) joins the sum of a row once, and with it lse; a row without keys then has lse = sinks[h]
    kv_dtype   caches are fp8: key = float(key_cache) * k_scale, the same for values
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from harness.ops.case import Case
from harness.ops.dtypes import ITEMSIZE
from harness.ops.features import KV_DTYPES, KV_SCALES, features_of
from harness.ops.layouts import HND, Layout
from harness.ops.sharing import count_tokens

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
    window         keys that a token sees at most, itself included; None is all before it
    softcap        bound of the scores; None is none
    alibi, sinks   whether the layer has slopes, and sinks, [num_q_heads] f32 each
    kv_dtype       "e4m3" or "e5m2" of a quantised cache; None is `dtype`
    kv_scales      whether a quantised cache has one scale for K and for V ("tensor") or one a KV head ("head")
    prefix         () or one (leader, tokens) a sequence: its table begins with the first tokens / block_size blocks of the
                   sequence `leader` before it; (i, 0) shares nothing

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
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    kv_dtype: str | None = None
    kv_scales: str = "tensor"
    prefix: tuple[tuple[int, int], ...] = ()

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
        self._check_features()
        self._check_prefix()

    def _check_features(self) -> None:
        good = self.window is None or (type(self.window) is int and self.window >= 1)
        self.require(good, "window must be None or a whole number of at least 1, the current key included", self.window)
        if self.softcap is not None:
            self.require_fraction("softcap", lambda cap: cap > 0, "must be None or a finite number above 0")
        for field in ("alibi", "sinks"):
            self.require(type(getattr(self, field)) is bool, f"{field} must be true or false", getattr(self, field))
        good = self.kv_dtype is None or self.kv_dtype in KV_DTYPES
        self.require(good, f"kv_dtype must be None or one of {', '.join(KV_DTYPES)}", self.kv_dtype)
        self.require(self.kv_scales in KV_SCALES, f"kv_scales must be one of {', '.join(KV_SCALES)}", self.kv_scales)
        good = self.kv_dtype is not None or self.kv_scales == "tensor"
        self.require(good, "kv_scales are for a cache with a kv_dtype", self.kv_scales)

    def _check_prefix(self) -> None:
        prefix, size = self.prefix, self.block_size
        good = isinstance(prefix, tuple) and all(
            isinstance(part, tuple) and len(part) == 2 and all(type(n) is int and n >= 0 for n in part) for part in prefix
        )
        self.require(good, "prefix must be a tuple of (leader, tokens), whole numbers of at least 0", prefix)
        self.require(len(prefix) in (0, self.num_seqs), "prefix must have one (leader, tokens) a sequence", len(prefix))
        for seq, (leader, tokens) in enumerate(prefix):
            self.require(leader < seq or not tokens, f"the leader of sequence {seq}'s prefix must stand before it", leader)
            if tokens:
                rule = f"the prefix of sequence {seq} must be whole blocks of {size} that it and its leader {leader} fill"
                most = min(self.seq_lens[seq], self.seq_lens[leader])
                self.require(tokens % size == 0 and tokens <= most, rule, tokens)
        if not any(tokens for _, tokens in prefix):  # one question, one digest
            object.__setattr__(self, "prefix", ())

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
    def features(self) -> tuple[str, ...]:
        """What it asks besides softmax(scale * q.k) v, by the names of harness/ops/features.py."""
        return features_of(self)

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @functools.cached_property
    def first_keys(self) -> tuple[int, ...]:
        """Position of the first key that any token of each sequence sees; those before it are behind every window."""
        if self.window is None:
            return (0,) * self.num_seqs
        lens = zip(self.seq_lens, self.q_lens, strict=True)
        return tuple(max(seq_len - q_len - self.window + 1, 0) for seq_len, q_len in lens)

    @functools.cached_property
    def blocks_per_seq(self) -> tuple[int, ...]:
        """Blocks that each sequence's tokens fill."""
        return tuple(-(-n // self.block_size) for n in self.seq_lens)

    @functools.cached_property
    def shared_blocks(self) -> tuple[int, ...]:
        """Of blocks_per_seq, those that belong to the sequence's leader."""
        return tuple(tokens // self.block_size for _, tokens in self.prefix) or (0,) * self.num_seqs

    @functools.cached_property
    def seen_blocks(self) -> int:
        """Table entries of all sequences whose block holds a key that some token sees."""
        return sum(n - first // self.block_size for n, first in zip(self.blocks_per_seq, self.first_keys, strict=True))

    @functools.cached_property
    def num_blocks(self) -> int:
        """Blocks of the pool: those in use, the slack, and two that no sequence owns."""
        return math.ceil((sum(self.blocks_per_seq) - sum(self.shared_blocks)) * self.pool_slack) + 2

    @property
    def cache_bytes(self) -> int:
        """K and V of the whole pool, one layer."""
        return 2 * self.num_blocks * self.block_size * self.num_kv_heads * self.head_dim * ITEMSIZE[self.cache_dtype]

    def staged_bytes(self, sets: int, layouts: Collection[Layout]) -> int:
        """As Case.staged_bytes. Caches are only read: HND is what was made. Without pages every sequence takes as much as
        the longest. One and a half caches pass through while slots are poisoned and layouts arranged, and one of `dtype`
        before it is quantised."""
        size = ITEMSIZE[self.cache_dtype]
        longest = 2 * self.num_seqs * self.max_seq_len * self.num_kv_heads * self.head_dim * size
        copies = [self.cache_bytes if layout.paged else longest for layout in layouts if layout is not HND]
        passing = 3 * self.cache_bytes // 2
        if self.kv_dtype:
            passing += self.cache_bytes * ITEMSIZE[self.dtype] // size
        return sets * (self.cache_bytes + sum(copies)) + passing

    @functools.cached_property
    def traffic_bytes(self) -> int:
        """Bytes that must cross memory: K and V of every token that is seen once, query in, out and lse out.

        Tokens that sequences share count once. The table entries of their blocks (4 bytes each) are counted too; they
        matter at block size 1. Sinks, slopes and scales, some hundred bytes, are not.
        """
        tokens = count_tokens(self.first_keys, self.seq_lens, self.prefix)
        kv = 2 * tokens * self.num_kv_heads * self.head_dim * ITEMSIZE[self.cache_dtype]
        rows = self.num_tokens * self.num_q_heads
        return kv + rows * (2 * self.head_dim * ITEMSIZE[self.dtype] + 4) + 4 * self.seen_blocks

    @functools.cached_property
    def flops(self) -> int:
        """Multiplications and additions of both products over the visible keys."""
        visible = 0
        for seq_len, q_len in zip(self.seq_lens, self.q_lens, strict=True):
            visible += self._seen_by_first(seq_len) - self._seen_by_first(max(seq_len - q_len, 0))
        return 4 * visible * self.num_q_heads * self.head_dim

    def _seen_by_first(self, num_positions: int) -> int:
        """Keys that tokens at the first so many positions see, all together."""
        growing = num_positions if self.window is None else min(num_positions, self.window)
        return growing * (growing + 1) // 2 + (num_positions - growing) * growing

    @functools.cached_property
    def query_starts(self) -> tuple[int, ...]:
        """query_start_loc as plain numbers: num_seqs + 1 of them."""
        return (0, *itertools.accumulate(self.q_lens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What `prepare` sees: shapes, types, capacities and the device; never values.

    max_num_seqs, max_num_tokens, max_q_len, max_seq_len, max_blocks_per_seq    capacities that no step exceeds
    num_blocks    of each cache
    params        the entry's declared parameters, defaults filled in
    window, softcap, alibi, sinks, kv_dtype, kv_scales    as of the case; `layer_shapes` says what launch takes for them
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
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    kv_dtype: str | None = None
    kv_scales: str = "tensor"

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def features(self) -> tuple[str, ...]:
        """As of the case."""
        return features_of(self)

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that `launch` takes by keyword, all float32, and their shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.alibi:
            shapes["alibi_slopes"] = (self.num_q_heads,)
        if self.sinks:
            shapes["sinks"] = (self.num_q_heads,)
        if self.kv_dtype:
            scales = (self.num_kv_heads if self.kv_scales == "head" else 1,)
            shapes |= {"k_scale": scales, "v_scale": scales}
        return shapes


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

"""Block copy: whole blocks from one place of the pool to another, in every layer's caches. Plain data, no torch.

    for source, destination in copies: cache[destination] = cache[source]        as if in list order

Copy-on-write and defragmentation make such lists. A chain (a block written by one pair and read by a later one) is
rare and legal; an implementation that copies all pairs at once must cut the list into waves, see `waves`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from harness.ops.attention import DTYPES
from harness.ops.case import Case
from harness.ops.dtypes import ITEMSIZE
from harness.ops.features import KV_DTYPES
from harness.ops.layouts import Layout

if TYPE_CHECKING:
    import numpy as np
    import torch

#: bytes are bytes: what a cache holds, quantised or not
COPIED = (*DTYPES, *KV_DTYPES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCopyCase(Case):
    """Copy `num_copies` blocks in each of `num_layers` caches; `chained` lists read what they wrote before."""

    op: ClassVar[str] = "block_copy"

    num_kv_heads: int
    head_dim: int
    block_size: int
    num_copies: int
    num_layers: int = 1
    num_blocks: int = 1024
    chained: bool = False
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("num_kv_heads", "head_dim", "block_size", "num_blocks", "num_layers")
        self.require(self.dtype in COPIED, f"dtype must be one of {', '.join(COPIED)}", self.dtype)
        self.require_count("num_copies")
        self.require(isinstance(self.chained, bool), "chained must be true or false", self.chained)
        self.require(
            2 * self.num_copies <= self.num_blocks,
            "num_copies must be at most half of num_blocks",
            (self.num_copies, self.num_blocks),
        )

    @property
    def block_bytes(self) -> int:
        """One block of K, or of V."""
        return self.block_size * self.num_kv_heads * self.head_dim * ITEMSIZE[self.dtype]

    @property
    def cache_bytes(self) -> int:
        """K and V of the whole pool, all layers."""
        return 2 * self.num_layers * self.num_blocks * self.block_bytes

    @property
    def traffic_bytes(self) -> int:
        """Each block is read once and written once, K and V, every layer; a pair is 8 bytes."""
        return 4 * self.num_layers * self.num_copies * self.block_bytes + 8 * self.num_copies

    @property
    def flops(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCopySpec:
    """What `prepare` sees. `launch(key_caches, value_caches)`: a tuple of caches each, one a layer, equal in shape."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    num_layers: int
    dtype: str
    layout: Layout
    num_blocks: int
    max_num_copies: int
    device: str
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCopyStep:
    """What `plan` sees: copies [num_copies, 2] int32 (source, destination) on the device, host_copies on the host."""

    copies: torch.Tensor
    host_copies: np.ndarray


def waves(host_copies: np.ndarray) -> list[tuple[int, int]]:
    """Cut a list of (source, destination) into ranges [begin, end) whose pairs may run in any order.

    A new wave starts at a pair that reads or writes a block written in the present one, or writes one read in it.
    """
    ranges: list[tuple[int, int]] = []
    begin, read, written = 0, set[int](), set[int]()
    for index, (source, destination) in enumerate(host_copies.tolist()):
        if source in written or destination in written or destination in read:
            ranges.append((begin, index))
            begin, read, written = index, set(), set()
        read.add(source)
        written.add(destination)
    if begin < len(host_copies):
        ranges.append((begin, len(host_copies)))
    return ranges

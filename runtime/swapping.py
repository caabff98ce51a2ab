"""The bytes that the block manager only names: blocks copied within the pool, out to host memory and back.

All on the current stream, so a copy comes after the steps launched before it and before those launched after it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from harness.ops.block_copy import BlockCopyStep
from harness.ops.dtypes import torch_dtype
from runtime.kernels import Kernels
from runtime.sampler import upload

Pairs = NDArray[np.int32]
Caches = tuple[torch.Tensor, ...]


class BlockMover:
    """Moves blocks of all layers' caches.

    num_host_blocks    blocks of host memory, pinned where there is a GPU
    """

    def __init__(self, kernels: Kernels, key_caches: Caches, value_caches: Caches, num_host_blocks: int) -> None:
        shape = kernels.shape
        self._caches = (key_caches, value_caches)
        self._device = shape.device
        self._capacity = shape.num_blocks // 2
        self._copy = kernels.block_copy(self._capacity) if self._capacity else None
        self._host: list[torch.Tensor] = []
        if num_host_blocks:
            canonical = (num_host_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
            pairs = [kernels.layout.empty(canonical, torch_dtype(shape.dtype), "cpu") for _ in range(shape.num_layers)]
            host = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
            self._host = [cache.pin_memory() for cache in host] if shape.kind == "cuda" else host

    def copy(self, pairs: Pairs) -> None:
        """Copy blocks (source, destination) within the pool."""
        if len(pairs):
            assert self._copy is not None, "a pool of one block has nothing to copy into"
            for begin in range(0, len(pairs), self._capacity):
                some = np.ascontiguousarray(pairs[begin : begin + self._capacity])
                self._copy.plan(BlockCopyStep(copies=upload(torch.from_numpy(some), self._device), host_copies=some))
                self._copy.launch(*self._caches)

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks (block, host block) to host memory."""
        for blocks, host_blocks in runs(pairs):
            for cache, host in zip((*self._caches[0], *self._caches[1]), self._host, strict=True):
                host[host_blocks].copy_(cache[blocks], non_blocking=True)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy blocks (host block, block) back."""
        for host_blocks, blocks in runs(pairs):
            for cache, host in zip((*self._caches[0], *self._caches[1]), self._host, strict=True):
                cache[blocks].copy_(host[host_blocks], non_blocking=True)


def runs(pairs: Pairs) -> list[tuple[slice, slice]]:
    """Pairs as runs of neighbours on both sides: one copy each."""
    if not len(pairs):
        return []
    edges = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    return [
        (slice(int(run[0, 0]), int(run[-1, 0]) + 1), slice(int(run[0, 1]), int(run[-1, 1]) + 1))
        for run in np.split(pairs, edges)
    ]

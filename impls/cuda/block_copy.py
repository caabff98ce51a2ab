"""cuda.block_copy: the blocks of all layers in one launch a wave, cache addresses by value."""

from __future__ import annotations

import array
from typing import TYPE_CHECKING

from harness.ops.block_copy import waves
from harness.ops.dtypes import ITEMSIZE
from harness.registry import Prepared, Unsupported
from impls.cuda.attention import load
from impls.cuda.builds import Build
from impls.cuda.launch import device_index, raw_stream

if TYPE_CHECKING:
    import torch

    from harness.ops.block_copy import BlockCopySpec, BlockCopyStep

THREADS = 256
VECTOR_BYTES = 16
MAX_CACHES = 480  # addresses of 8 bytes that leave room in 4 KB of parameters

#: caches by value | pairs | block stride in vectors
SIGNATURE = f"{8 * MAX_CACHES}s P q"


class BlockCopy(Prepared):
    """Holds no memory: `plan` keeps the step's own list of pairs."""

    ledger = {"graph": "a captured launch repeats the waves it was captured with"}

    def __init__(self, spec: BlockCopySpec) -> None:
        block_bytes = spec.num_kv_heads * spec.block_size * spec.head_dim * ITEMSIZE[spec.dtype]
        if block_bytes % VECTOR_BYTES:
            raise Unsupported(f"a block of K must be whole vectors of 16 bytes (got {block_bytes} bytes)")
        self._block_vectors = block_bytes // VECTOR_BYTES
        self._kernel, resources = load(build(self._block_vectors), spec.device, SIGNATURE)
        self.kernels = (resources,)
        self._device_index = device_index(spec.device)

    def plan(self, step: BlockCopyStep) -> None:
        self._copies = step.copies
        self._waves = waves(step.host_copies)

    def launch(self, key_caches: tuple[torch.Tensor, ...], value_caches: tuple[torch.Tensor, ...]) -> None:
        caches = (*key_caches, *value_caches)
        stride = block_stride(caches)
        pointers = array.array("Q", [cache.data_ptr() for cache in caches])
        if any(pointer % VECTOR_BYTES for pointer in pointers):
            raise ValueError("cuda.block_copy: every cache must begin at a multiple of 16 bytes")
        stream, pairs, tiles = raw_stream(self._device_index), self._copies.data_ptr(), num_tiles(self._block_vectors)
        for begin, end in self._waves:
            for first in range(0, len(pointers), MAX_CACHES):
                some = pointers[first : first + MAX_CACHES]
                grid = ((end - begin) * tiles, len(some), 1)
                self._kernel(grid, THREADS, stream, some.tobytes(), pairs + 8 * begin, stride)


def block_stride(caches: tuple[torch.Tensor, ...]) -> int:
    """Return the distance of blocks in vectors. Raises ValueError unless it is one for all caches, and blocks have no gaps."""
    forms = {(cache.shape[0], cache.stride(0), cache.element_size(), cache[0].is_contiguous()) for cache in caches}
    strides = {stride * itemsize for _, stride, itemsize, _ in forms}
    if len(strides) != 1 or not all(contiguous for *_, contiguous in forms) or min(strides) % VECTOR_BYTES:
        raise ValueError(
            "cuda.block_copy: blocks must be contiguous, in all caches equally far apart, by a multiple of 16 bytes "
            f"(got strides of {', '.join(map(str, sorted(strides)))} bytes)"
        )
    return strides.pop() // VECTOR_BYTES


def loads(block_vectors: int) -> int:
    """Vectors that a thread has in flight: up to 4, as far as a block has them."""
    return 4 if block_vectors >= 4 * THREADS else 2 if block_vectors >= 2 * THREADS else 1


def num_tiles(block_vectors: int) -> int:
    """CTAs that copy one block."""
    return -(-block_vectors // (THREADS * loads(block_vectors)))


def build(block_vectors: int) -> Build:
    """The kernel for blocks of `block_vectors` vectors of 16 bytes, whatever the layout and type."""
    macros: dict[str, str | int] = {
        "PA_BLOCK_VECTORS": block_vectors, "PA_THREADS": THREADS, "PA_LOADS": loads(block_vectors), "PA_MAX_CACHES": MAX_CACHES,
    }
    return Build(source="block_copy.cu", entry="block_copy", macros=macros)


def builds(arch: str) -> list[Build]:
    """Builds that stand for all; the same on every architecture."""
    return [build(block_vectors) for block_vectors in (8, 600, 2048)]


prepare = BlockCopy

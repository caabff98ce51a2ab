"""ceiling.load_16b and ceiling.bulk_copy: what this device can read in the case's own tables, in two ways.

Both read K and V of every token in use once, sum all 32-bit words of them into `checksum`, and compute nothing else. `plan`
lists the blocks in use, with a window those that it reaches, one that several sequences share once; the kernels take equal
shares of that list, however uneven the sequences are.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.ops.dtypes import ITEMSIZE
from harness.ops.layouts import KV_NHD, NHD
from harness.ops.sharing import blocks_to_read
from harness.registry import Prepared, Unsupported
from impls.cuda import jit
from impls.cuda.attention import load
from impls.cuda.builds import SHARED_LIMIT, Build, has_bulk_copies
from impls.cuda.cache_write import vector_stride
from impls.cuda.launch import device_index, raw_stream
from impls.cuda.toolkit import why_older

if TYPE_CHECKING:
    import torch

    from harness.ops.attention import AttentionSpec, AttentionStep

VECTOR_BYTES = 16
MAX_VECTORS = 2**32 - 2**28  # of K; kernels count them in 32 bits and look a little ahead

#: checksum, key_cache, value_cache, entries | block strides in vectors | vectors of K to read
SIGNATURE = "PPPP qq I"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A block as the readers see it; the defaults are those of Llama 3 8B in HND.

    token_vectors    of a token in one run: HND one head's row, NHD all heads'
    runs             of a block: HND num_kv_heads, NHD 1
    """

    token_vectors: int = 16
    runs: int = 8
    block_size: int = 16

    @classmethod
    def of(cls, spec: AttentionSpec) -> Shape:
        row, rest = divmod(spec.head_dim * ITEMSIZE[spec.cache_dtype], VECTOR_BYTES)
        if rest:
            raise Unsupported(f"head_dim must be whole vectors of 16 bytes (got {spec.head_dim} of {spec.cache_dtype})")
        if spec.layout in (NHD, KV_NHD):
            return cls(token_vectors=row * spec.num_kv_heads, runs=1, block_size=spec.block_size)
        return cls(token_vectors=row, runs=spec.num_kv_heads, block_size=spec.block_size)

    @property
    def block_vectors(self) -> int:
        return self.runs * self.token_vectors * self.block_size

    def macros(self) -> dict[str, str | int]:
        """The macros of read_blocks.cuh but for PA_WARPS."""
        return {"PA_TOKEN_VECTORS": self.token_vectors, "PA_RUNS": self.runs, "PA_BLOCK_SIZE": self.block_size}


class Reader(Prepared):
    """A persistent kernel over the list of blocks in use.

    entries     [max_num_seqs * max_blocks_per_seq, 2]    int32: block id, tokens that it holds
    checksum    [CTAs * warps]                            int32: a sum a warp; together, modulo 2**32, of all words read
    """

    def __init__(self, spec: AttentionSpec, build: Build) -> None:
        import torch

        from harness.guards import workspace

        self._shape, self._window = Shape.of(spec), spec.window
        self._warps = spec.params["warps"]
        self._num_ctas = spec.params["ctas_per_sm"] * torch.cuda.get_device_properties(spec.device).multi_processor_count
        self._kernel, resources = load(build, spec.device, SIGNATURE)
        self.kernels = (resources,)
        self._device_index = device_index(spec.device)
        self._form: tuple[Any, ...] = ()
        self._entries = workspace((spec.max_num_seqs * spec.max_blocks_per_seq, 2), torch.int32, spec.device)
        self.checksum = workspace(self._num_ctas * self._warps, torch.int32, spec.device).zero_()
        self.workspace_bytes = 4 * (self._entries.numel() + self.checksum.numel())

    def plan(self, step: AttentionStep) -> None:
        num_entries = list_blocks(step, self._shape.block_size, self._window, self._entries)
        self._num_vectors = num_entries * self._shape.block_vectors
        if self._num_vectors > MAX_VECTORS:
            most, got = MAX_VECTORS * VECTOR_BYTES, self._num_vectors * VECTOR_BYTES
            raise Unsupported(f"K in use must be at most {most} bytes (got {got})")

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        **layer: torch.Tensor,
    ) -> None:
        """Read; all but the caches is left alone."""
        form = (key_cache.stride(), value_cache.stride())
        if form != self._form:  # checked once for all launches on tensors of one form
            self._strides = (vector_stride("key_cache", key_cache), vector_stride("value_cache", value_cache))
            self._form = form
        pointers = (self.checksum.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), self._entries.data_ptr())
        if (pointers[1] | pointers[2]) % VECTOR_BYTES:
            raise ValueError(f"caches must begin at a multiple of 16 bytes (got addresses {pointers[1:3]})")
        stream = raw_stream(self._device_index)
        self._kernel((self._num_ctas, 1, 1), 32 * self._warps, stream, *pointers, *self._strides, self._num_vectors)


def list_blocks(step: AttentionStep, block_size: int, window: int | None, entries: torch.Tensor) -> int:
    """Write block id and number of tokens of every block to read to `entries`, in order of sequences; return how many."""
    import torch

    blocks, tokens = blocks_to_read(step, block_size, window)
    if len(blocks) > len(entries):
        raise ValueError(f"blocks in use must be at most {len(entries)}, what was prepared (got {len(blocks)})")
    entries[: len(blocks)].copy_(torch.from_numpy(np.stack([blocks, tokens], axis=1)))
    return len(blocks)


def load_build(shape: Shape, params: dict[str, Any]) -> Build:
    """The kernel of 16-byte loads."""
    macros = {
        **shape.macros(), "PA_WARPS": params["warps"], "PA_LOADS": params["loads"], "PA_CTAS_PER_SM": params["ctas_per_sm"],
    }
    return Build(source="read_blocks_load.cu", entry="read_blocks_load", macros=macros)


def bulk_build(shape: Shape, params: dict[str, Any]) -> Build:
    """The kernel of bulk copies, with its stages of K and V in shared memory."""
    warps, stages, chunk_bytes = params["warps"], params["stages"], params["chunk_bytes"]
    macros = {**shape.macros(), "PA_WARPS": warps, "PA_STAGES": stages, "PA_CHUNK_BYTES": chunk_bytes}
    shared_bytes = warps * stages * 2 * chunk_bytes
    return Build(source="read_blocks_bulk.cu", entry="read_blocks_bulk", macros=macros, shared_bytes=shared_bytes)


def prepare_load(spec: AttentionSpec) -> Reader:
    return Reader(spec, load_build(Shape.of(spec), dict(spec.params)))


def prepare_bulk(spec: AttentionSpec) -> Reader:
    build = bulk_build(Shape.of(spec), dict(spec.params))
    reason = why_too_large(build.shared_bytes, spec.params["ctas_per_sm"], jit.arch_of(spec.device))
    if reason:
        raise Unsupported(reason)
    return Reader(spec, build)


def why_too_large(shared_bytes: int, ctas_per_sm: int, arch: str) -> str | None:
    """Return why so many CTAs with so much shared memory cannot be on an SM at once, or None. A CTA takes 1 KB for itself."""
    on_sm = SHARED_LIMIT.get(arch, min(SHARED_LIMIT.values())) + 1024
    if ctas_per_sm * (shared_bytes + 2048) <= on_sm:  # its own KB, and one for the barriers
        return None
    return f"{ctas_per_sm} CTAs of {shared_bytes} bytes of stages exceed the {on_sm} bytes of an SM; set fewer"


def why_no_bulk_copy(device_kind: str) -> str | None:
    """Return why this machine cannot run the bulk copies, or None."""
    return why_older(device_kind, (9, 0), "cp.async.bulk")


def builds(arch: str) -> list[Build]:
    """Builds at the defaults that the table of impls declares; bulk copies from sm_90 on."""
    loads = {"ctas_per_sm": 4, "warps": 8, "loads": 4}
    bulk = {"ctas_per_sm": 2, "warps": 4, "stages": 2, "chunk_bytes": 4096}
    shapes = (Shape(), Shape(token_vectors=128, runs=1), Shape(token_vectors=9, runs=5, block_size=1))
    listed = [load_build(shape, loads) for shape in shapes]
    return listed + [bulk_build(shape, bulk) for shape in shapes] if has_bulk_copies(arch) else listed

"""cuda.block_parallel: one CTA a (query token, KV head), its warps over different blocks, one read for the whole group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from impls.cuda.attention import DEFAULT_SHAPES, Attention, Shape, load
from impls.cuda.builds import Build
from impls.cuda.group import TIGHT_SHAPES, Group

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec


class BlockParallel(Attention):
    """Grid num_tokens * num_kv_heads * parts."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        shape = Shape.of(spec)
        self._group = Group.of(shape)
        self._kernel, resources = load(build(shape), spec.device)
        self.kernels = (resources,)

    def _enqueue(self, stream: int, values: tuple[Any, ...]) -> None:
        ctas = self._num_tokens * self._spec.num_kv_heads * self._group.parts
        self._kernel((ctas, 1, 1), self._group.threads, stream, *values)


def build(shape: Shape) -> Build:
    """The kernel for `shape`."""
    group = Group.of(shape)
    return Build(
        source="block_parallel.cu", entry="block_parallel", macros=shape.macros() | group.macros(),
        shared_bytes=group.shared_bytes,
    )


def builds(arch: str) -> list[Build]:
    """Builds that stand for all; split_kv, which shares group.cuh, builds the other shapes."""
    return [build(shape) for shape in (*DEFAULT_SHAPES[::2], *TIGHT_SHAPES[::2])]


prepare = BlockParallel

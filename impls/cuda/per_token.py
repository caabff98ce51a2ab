"""cuda.per_token: one CTA a (query token, query head), its tokens in order. The plainest CUDA kernel that is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from impls.cuda.attention import DEFAULT_SHAPES, Attention, Shape, load
from impls.cuda.builds import Build

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec

THREADS = 32
#: shapes that ask for something besides
ASKED = (
    Shape(features=("window", "softcap", "alibi", "sinks", "e4m3"), kv_scales="head"),
    Shape(features=("e5m2",), dtype="f16", layout="X_PACKED"),
)


class PerToken(Attention):
    """Grid (num_tokens, num_q_heads), one warp each."""

    alignment = 1  # reads element by element

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        shape = Shape.of(spec)
        self._kernel, resources = load(build(shape), spec.device, shape.signature)
        self.kernels = (resources,)

    def _enqueue(self, stream: int, values: tuple[Any, ...]) -> None:
        self._kernel((self._num_tokens, self._spec.num_q_heads, 1), THREADS, stream, *values)


def build(shape: Shape) -> Build:
    """The kernel for `shape`."""
    return Build(source="per_token.cu", entry="per_token", macros=shape.macros())


def builds(arch: str) -> list[Build]:
    """Builds that stand for all; the same on every architecture."""
    return [build(shape) for shape in (*DEFAULT_SHAPES, Shape(layout="X_PACKED"), Shape(dtype="f32", head_dim=71), *ASKED)]


prepare = PerToken

"""cuda.cache_write: 16 bytes of the cache a thread, in any layout that a cache can be held in, quantised or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.ops.dtypes import ITEMSIZE, torch_dtype
from harness.ops.layouts import HND, HND_SWIZZLED, KV_NHD, NHD, X_PACKED
from harness.registry import Prepared, Unsupported
from impls.cuda.attention import SCALARS, load
from impls.cuda.builds import Build
from impls.cuda.launch import device_index, raw_stream

if TYPE_CHECKING:
    import torch

    from harness.ops.cache_write import CacheWriteSpec, CacheWriteStep

LAYOUTS = {HND: "HND", NHD: "NHD", KV_NHD: "NHD", X_PACKED: "X_PACKED", HND_SWIZZLED: "HND_SWIZZLED"}
THREADS = 256
VECTOR_BYTES = 16

#: key_cache, value_cache, key, value, slot_mapping | block and token strides in vectors | vectors of K to move
SIGNATURE = "PPPPP qqqq I"
#: and k_scale, v_scale of a quantised cache
QUANTISING = SIGNATURE + " PP"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What the kernel is specialised for; the defaults are those of Llama 3 8B."""

    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bf16"
    layout: str = "HND"
    kv_dtype: str | None = None
    kv_scales: str = "tensor"

    @classmethod
    def of(cls, spec: CacheWriteSpec) -> Shape:
        return cls(
            num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, block_size=spec.block_size, dtype=spec.dtype,
            layout=LAYOUTS[spec.layout], kv_dtype=spec.kv_dtype, kv_scales=spec.kv_scales,
        )

    @property
    def token_vectors(self) -> int:
        """Vectors of one token's keys in the cache, all heads."""
        return self.num_kv_heads * self.head_dim * ITEMSIZE[self.kv_dtype or self.dtype] // VECTOR_BYTES


class CacheWrite(Prepared):
    """Holds no memory: `plan` keeps the step's own slot_mapping, so a captured launch follows what is written into it."""

    def __init__(self, spec: CacheWriteSpec) -> None:
        self._shape, self._layer_shapes = Shape.of(spec), spec.layer_shapes
        self._token_vectors = self._shape.token_vectors
        if spec.head_dim * ITEMSIZE[spec.cache_dtype] % VECTOR_BYTES:
            raise Unsupported(f"head_dim must be whole vectors of 16 bytes (got {spec.head_dim} of {spec.cache_dtype})")
        if spec.max_num_tokens * self._shape.token_vectors >= 2**32 - THREADS:
            most = (2**32 - THREADS) // self._shape.token_vectors
            raise Unsupported(f"num_tokens must be at most {most} (got {spec.max_num_tokens})")
        self._kernel, resources = load(build(self._shape), spec.device, QUANTISING if spec.kv_dtype else SIGNATURE)
        self.kernels = (resources,)
        self._device_index = device_index(spec.device)
        self._form: tuple[Any, ...] = ()

    def plan(self, step: CacheWriteStep) -> None:
        self._slot_mapping = step.slot_mapping  # keeps alive what lies at the address
        self._num_tokens, self._slots = step.slot_mapping.shape[0], step.slot_mapping.data_ptr()
        self._num_vectors = self._num_tokens * self._token_vectors
        self._grid = (-(-self._num_vectors // THREADS), 1, 1)

    def launch(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, **layer: torch.Tensor
    ) -> None:
        form = (self._num_tokens, key.shape, key.stride(), value.stride(), key_cache.stride(), value_cache.stride())
        if form != self._form:  # checked once for all launches on tensors of one form
            if len(key) != self._num_tokens:
                raise ValueError(f"cuda.cache_write: planned for {self._num_tokens} tokens (got {len(key)})")
            tensors = {"key_cache": key_cache, "value_cache": value_cache, "key": key, "value": value}
            self._strides = [vector_stride(name, tensor) for name, tensor in tensors.items()]
            self._form = form
        pointers = (key_cache.data_ptr(), value_cache.data_ptr(), key.data_ptr(), value.data_ptr())
        if (pointers[0] | pointers[1] | pointers[2] | pointers[3]) % VECTOR_BYTES:
            raise ValueError(f"cuda.cache_write: tensors must begin at a multiple of 16 bytes (got addresses {pointers})")
        scales = self._scales(layer) if self._layer_shapes else ()
        self._kernel(
            self._grid, THREADS, raw_stream(self._device_index),
            *pointers, self._slots, *self._strides, self._num_vectors, *scales,
        )

    def _scales(self, layer: Mapping[str, torch.Tensor]) -> list[int]:
        """Where the scales of a quantised cache are. Raises ValueError for one that the kernel would read wrongly."""
        for name, shape in self._layer_shapes.items():
            scale = layer[name]
            if tuple(scale.shape) != shape or scale.dtype != torch_dtype("f32") or not scale.is_contiguous():
                raise ValueError(f"{name} must be contiguous float32 of shape {shape} (got {scale.dtype} {tuple(scale.shape)})")
        return [layer[name].data_ptr() for name in self._layer_shapes]


def vector_stride(name: str, tensor: torch.Tensor) -> int:
    """Return the distance of tokens or blocks in vectors. Raises ValueError where one has gaps or is unaligned."""
    stride_bytes = tensor.stride(0) * tensor.element_size()
    if len(tensor) and not tensor[0].is_contiguous():
        raise ValueError(f"{name} must be contiguous but for its first dimension (got strides {tensor.stride()})")
    if stride_bytes % VECTOR_BYTES:
        raise ValueError(f"{name}: its first stride must be a multiple of 16 bytes (got {stride_bytes})")
    return stride_bytes // VECTOR_BYTES


def build(shape: Shape) -> Build:
    """The kernel for `shape`."""
    macros: dict[str, str | int] = {
        "PA_LAYOUT": shape.layout, "PA_ITEM_BYTES": ITEMSIZE[shape.kv_dtype or shape.dtype], "PA_NUM_HEADS": shape.num_kv_heads,
        "PA_HEAD_DIM": shape.head_dim, "PA_BLOCK_SIZE": shape.block_size, "PA_THREADS": THREADS,
    }
    if shape.kv_dtype:
        macros |= {
            "PA_SOURCE": SCALARS[shape.dtype], "PA_FORMAT": {"e4m3": "__NV_E4M3", "e5m2": "__NV_E5M2"}[shape.kv_dtype],
            "PA_HEAD_SCALES": int(shape.kv_scales == "head"),
        }
    return Build(source="cache_write.cu", entry="cache_write", macros=macros)


def builds(arch: str) -> list[Build]:
    """Builds that stand for all; the same on every architecture."""
    shapes = [Shape(layout=layout) for layout in ("HND", "NHD", "X_PACKED", "HND_SWIZZLED")]
    shapes += [Shape(dtype="f32", layout="X_PACKED"), Shape(num_kv_heads=5, head_dim=72, block_size=24)]
    shapes += [Shape(kv_dtype="e4m3", layout=layout, kv_scales="head") for layout in ("HND", "X_PACKED")]
    return [build(shape) for shape in shapes]


prepare = CacheWrite

"""What every attention kernel of this folder takes: its macros, its parameters, and the checks before a launch."""

from __future__ import annotations

import dataclasses
import struct
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.ops.dtypes import torch_dtype
from harness.ops.features import KV_DTYPES
from harness.ops.layouts import HND, HND_SWIZZLED, KV_NHD, NHD, X_PACKED
from impls.cuda import jit
from impls.cuda.launch import device_index, raw_stream

if TYPE_CHECKING:
    import torch

    from harness.ops.attention import AttentionSpec, AttentionStep
    from impls.cuda.builds import Build
    from impls.cuda.launch import Launcher

SCALARS = {
    "f32": "float", "f16": "__half", "bf16": "__nv_bfloat16", "e4m3": "__nv_fp8_e4m3", "e5m2": "__nv_fp8_e5m2",
}
#: of paged.cuh; a block's strides tell KV_NHD from NHD
LAYOUTS = {HND: "HND", NHD: "NHD", KV_NHD: "NHD", X_PACKED: "X_PACKED", HND_SWIZZLED: "HND_SWIZZLED"}

#: out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens | num_seqs, num_q_heads, num_kv_heads |
#: strides of tables, query and out tokens, key and value blocks | scale
SIGNATURE = "PPPPPPPP iii qqqqq f"
#: the same in parts, by what changes them: tensors of a launch, the step that is planned, and what was verified of the tensors
POINTERS, PLANNED, VERIFIED = "PPPPP", "PPP iii q", "qqqqf"
#: `Layer` of paged.cuh: alibi_slopes, sinks, k_scale, v_scale | window | softcap. What a launch takes by name, null where the
#: spec does not ask for it. A kernel built for features takes it as one more parameter, by value.
LAYER = "PPPPif"
LAYER_NAMES = ("alibi_slopes", "sinks", "k_scale", "v_scale")
LAYER_SIGNATURE = f"{SIGNATURE} {struct.calcsize(LAYER)}s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What a kernel is specialised for; the defaults are those of Llama 3 8B."""

    head_dim: int = 128
    block_size: int = 16
    group: int = 4
    dtype: str = "bf16"
    layout: str = "HND"
    features: tuple[str, ...] = ()
    kv_scales: str = "tensor"

    @classmethod
    def of(cls, spec: AttentionSpec) -> Shape:
        """The shape of `spec`."""
        return cls(
            head_dim=spec.head_dim, block_size=spec.block_size, group=spec.group, dtype=spec.dtype, layout=LAYOUTS[spec.layout],
            features=spec.features, kv_scales=spec.kv_scales,
        )

    @property
    def cache_dtype(self) -> str:
        return next((name for name in self.features if name in KV_DTYPES), self.dtype)

    @property
    def signature(self) -> str:
        """Of a kernel built for it that takes what `_enqueue` is given and nothing else."""
        return LAYER_SIGNATURE if self.features else SIGNATURE

    def macros(self) -> dict[str, str | int]:
        """The macros of paged.cuh; without features those alone that every build has."""
        macros: dict[str, str | int] = {
            "PA_SCALAR": SCALARS[self.dtype], "PA_LAYOUT": self.layout, "PA_HEAD_DIM": self.head_dim,
            "PA_BLOCK_SIZE": self.block_size, "PA_GROUP": self.group,
        }
        macros |= {f"PA_{name.upper()}": 1 for name in self.features if name not in KV_DTYPES}
        if self.cache_dtype != self.dtype:
            macros |= {"PA_CACHE_SCALAR": SCALARS[self.cache_dtype], "PA_HEAD_SCALES": int(self.kv_scales == "head")}
        return macros | ({"PA_LAYER": 1} if self.features else {})


#: shapes whose builds stand for all
DEFAULT_SHAPES = (
    Shape(),
    Shape(layout="NHD", head_dim=64, group=8),
    Shape(head_dim=80, dtype="f16", block_size=8, group=7),
    Shape(head_dim=96, block_size=32, group=1),
    Shape(layout="NHD", head_dim=112, dtype="f16", group=5),
    Shape(head_dim=256, group=2, block_size=64),
    Shape(head_dim=256, group=16, block_size=1),
    Shape(dtype="f32", head_dim=256, group=8),
)

MOST_VERIFIED = 1024  # sets of tensors that a kernel remembers
Verified = tuple[int, tuple[Any, ...], tuple[Any, ...], tuple[bytes, ...]]
NEVER: Verified = (-1, (), (), ())


class Attention:
    """A prepared attention kernel: takes a step's tables, and launches on tensors that fit them.

    A subclass sets `kernels` and `workspace_bytes`, and in `_enqueue` launches with the values of `SIGNATURE`.

    It is one thread's and one stream's at a time: launches share the buffer of their parameters, and some a workspace.
    """

    workspace_bytes: int = 0
    kernels: Sequence[Any] = ()
    alignment = 16  # bytes, of every pointer and stride that the kernel reads by vectors

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._device_index = device_index(spec.device)
        self.ledger = {"casts": "none", "conversions": "none"}
        self._max_seq_len = min(spec.max_seq_len, spec.max_blocks_per_seq * spec.block_size)
        self._heads = (spec.num_q_heads, spec.num_kv_heads)
        self._step: AttentionStep | None = None
        self._form: tuple[Any, ...] = ()
        self._has_layer = bool(spec.features)
        self._named = tuple(name for name in LAYER_NAMES if name in spec.layer_shapes)
        #: by addresses: num_tokens, weak references to the tensors, their strides and scale as SIGNATURE ends, and LAYER, and
        #: what `_pack` makes of them
        self._verified: dict[tuple[int, ...], Verified] = {}

    def plan(self, step: AttentionStep) -> None:
        """Keep where the step's tables are. Reads host copies only; raises ValueError for a step beyond the capacities."""
        spec, tables, lens = self._spec, step.block_tables, step.host_seq_lens
        num_seqs, num_tokens = len(lens), step.num_tokens
        longest = lens.item(lens.argmax()) if num_seqs else 0  # a quarter of the time that `max` takes
        most = min(self._max_seq_len, tables.shape[1] * spec.block_size)
        if num_seqs > spec.max_num_seqs or num_tokens > spec.max_num_tokens or longest > most:
            sizes = {"num_seqs": (num_seqs, spec.max_num_seqs), "num_tokens": (num_tokens, spec.max_num_tokens)}
            self._refuse(sizes | {"seq_len": (longest, most)})
        self._step = step  # keeps the tensors alive whose addresses follow
        self._num_tokens = num_tokens
        self._planned = (
            tables.data_ptr(), step.query_start_loc.data_ptr(), step.seq_lens.data_ptr(),
            num_seqs, *self._heads, tables.stride(0),
        )

    def _refuse(self, sizes: dict[str, tuple[int, int]]) -> None:
        """Raise ValueError for the first of these sizes that is more than it may be."""
        name, got, most = next((name, got, most) for name, (got, most) in sizes.items() if got > most)
        raise ValueError(f"{name} must be at most {most}, what was prepared and what the table holds (got {got})")

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        **layer: torch.Tensor,
    ) -> None:
        """Attend on the current stream; tokens of query and out, and blocks of the caches, may be strided.

        A tensor whose strides or type have been changed in place, at its own address, is taken for what it was.
        """
        if self._step is None:
            raise ValueError("launch needs a planned step; call plan first")
        if self._num_tokens == 0:
            return
        pointers = (out.data_ptr(), lse.data_ptr(), query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr())
        named: tuple[torch.Tensor, ...] = ()
        where: tuple[int, ...] = pointers
        if layer or self._named:
            named = self._in_order(layer)
            where = (*pointers, *(tensor.data_ptr() for tensor in named))
        # Checks cost more than a launch, so tensors that passed them pass again: the very same, at the same addresses.
        num_tokens, refs, tail, packed = self._verified.get(where, NEVER)
        if not (
            num_tokens == self._num_tokens and refs[0]() is out and refs[1]() is lse and refs[2]() is query
            and refs[3]() is key_cache and refs[4]() is value_cache
            and (not named or all(refs[5 + i]() is tensor for i, tensor in enumerate(named)))
        ):
            known, tail = tail, self._verify(pointers, query, key_cache, value_cache, out, lse)
            if self._has_layer:
                tail = (*tail, self._pack_layer(named))
            if tail != known:  # other tensors than before at these addresses are most often of the same form
                packed = self._pack(pointers, tail)
            self._remember(where, (out, lse, query, key_cache, value_cache, *named), tail, packed)
        self._submit(raw_stream(self._device_index), pointers, tail, packed)

    def _pack(self, pointers: tuple[int, ...], tail: tuple[Any, ...]) -> tuple[bytes, ...]:
        """What `_submit` of a subclass wants to have ready of these tensors."""
        return ()

    def _submit(self, stream: int, pointers: tuple[int, ...], tail: tuple[Any, ...], packed: tuple[bytes, ...]) -> None:
        """Launch on tensors that were verified."""
        self._enqueue(stream, (*pointers, *self._planned, *tail))

    def _enqueue(self, stream: int, values: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def _verify(
        self, pointers: tuple[int, ...], query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[Any, ...]:
        """Check what a launch reads by, and return its strides and the scale."""
        strides = (query.stride(), out.stride(), key_cache.stride(), value_cache.stride())
        form = (
            self._num_tokens, strides, query.shape, query.dtype, out.shape, out.dtype, lse.shape, lse.stride(), lse.dtype,
            key_cache.shape, key_cache.dtype, value_cache.shape, value_cache.dtype,
        )
        if form != self._form:  # checked once for all new tensors of one form
            self._check(query, key_cache, value_cache, out, lse)
            self._form = form
        if (pointers[2] | pointers[3] | pointers[4]) % self.alignment:
            raise ValueError(f"query and caches must begin at a multiple of {self.alignment} bytes (got {pointers[2:]})")
        return strides[0][0], strides[1][0], strides[2][0], strides[3][0], self._spec.scale

    def _remember(
        self, where: tuple[int, ...], tensors: tuple[torch.Tensor, ...], tail: tuple[Any, ...], packed: tuple[bytes, ...]
    ) -> None:
        if len(self._verified) >= MOST_VERIFIED:
            self._verified.clear()
        self._verified[where] = (self._num_tokens, tuple(map(weakref.ref, tensors)), tail, packed)

    def _in_order(self, layer: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What is passed by name, as LAYER_NAMES. Raises ValueError unless these are the names that the spec asks for."""
        if layer.keys() != set(self._named):
            wanted, got = (", ".join(names) or "nothing" for names in (self._named, layer))
            raise ValueError(f"launch takes by name {wanted} (got {got})")
        return tuple(layer[name] for name in self._named)

    def _pack_layer(self, named: tuple[torch.Tensor, ...]) -> bytes:
        """`Layer` of paged.cuh. Raises ValueError unless what is named is of the spec's shapes, in float32."""
        addresses = dict.fromkeys(LAYER_NAMES, 0)
        for name, tensor in zip(self._named, named, strict=True):
            shape, wanted = self._spec.layer_shapes[name], torch_dtype("f32")
            if tuple(tensor.shape) != shape or tensor.dtype != wanted or not tensor.is_contiguous():
                got = f"{tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}"
                raise ValueError(f"{name} must be contiguous, of shape {shape} and type {wanted} (got {got})")
            addresses[name] = tensor.data_ptr()
        return struct.pack("@" + LAYER, *addresses.values(), self._spec.window or 0, self._spec.softcap or 0.0)

    def _check(self, query: torch.Tensor, *others: torch.Tensor) -> None:
        """Raise ValueError unless the tensors are of the prepared shapes and types, only tokens and blocks strided."""
        spec, key_cache = self._spec, others[0]
        rows = (self._num_tokens, spec.num_q_heads, spec.head_dim)
        block = (spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        keys, values = spec.layout.empty(block, key_cache.dtype, "meta")
        dtype, cache_dtype = torch_dtype(spec.dtype), torch_dtype(spec.cache_dtype)
        named = zip(
            ("query", "key_cache", "value_cache", "out", "lse"), (query, *others),
            (rows, keys.shape, values.shape, rows, rows[:2]), (dtype, cache_dtype, cache_dtype, dtype, torch_dtype("f32")),
            strict=True,
        )
        for name, tensor, shape, wanted in named:
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != wanted:
                got = f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise ValueError(f"{name} must have shape {tuple(shape)} and type {wanted} (got {got})")
            if not tensor[0 if name != "lse" else ...].is_contiguous():
                raise ValueError(f"{name} must be contiguous, but for its first dimension (got strides {tensor.stride()})")
            if name not in ("out", "lse") and tensor.stride(0) * tensor.element_size() % self.alignment:
                raise ValueError(f"{name}: rows must be a multiple of {self.alignment} bytes apart (got {tensor.stride()})")


def load(build: Build, device: str, signature: str = SIGNATURE) -> tuple[Launcher, dict[str, Any]]:
    """Compile a build for `device`; return its launcher and its resources."""
    arch = jit.arch_of(device) + build.only
    kernel = jit.compile(build.source, entry=build.entry, macros=build.macros, device=device, arch=arch)
    return kernel.launcher(signature, build.shared_bytes, build.early), dict(kernel.resources)

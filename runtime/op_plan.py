"""What a call of `torch.ops.pagedbench.paged_attention` runs: an entry prepared for capacities, found by shapes alone."""

from __future__ import annotations

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from harness.ops import features
from harness.ops.attention import AttentionSpec, AttentionStep
from harness.ops.dtypes import torch_dtype
from harness.ops.layouts import LAYOUTS
from harness.registry import Impl, Prepared, Unsupported, default_registry

#: by kind of device, the best first. On a GPU only entries whose plan asks host copies for no more than capacities.
PREFERRED = {"cuda": ("cuda.tensor_core", "cuda.split_kv", "cuda.per_token"), "cpu": ("torch.gather",)}
DTYPES = {torch_dtype(name): name for name in ("f32", "f16", "bf16")}
KV_DTYPES = {torch_dtype(name): name for name in features.KV_DTYPES}
MOST_FORMS = 1024  # sets of shapes that are remembered

Tensors = tuple[torch.Tensor, ...]
Host = tuple[Any, Any, Any]  # block tables, lengths, query starts as NumPy arrays


class Plan:
    """An entry with its workspace: one call at a time, also where streams differ."""

    def __init__(self, spec: AttentionSpec) -> None:
        with _preparing:
            self.name, self.prepared = _prepare(spec)
        self.index = torch.device(spec.device).index  # of the GPU; None on a CPU
        self._stream: Any = None  # of the last call
        self._raw_stream = -1
        self._lock = threading.Lock()
        tables, starts = torch.empty((0, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self._nothing = AttentionStep(
            block_tables=tables, seq_lens=tables[:, 0], query_start_loc=starts,
            host_block_tables=tables.numpy(), host_seq_lens=tables[:, 0].numpy(), host_query_start_loc=starts.numpy(),
        )  # fmt: skip

    def run(self, step: AttentionStep, *tensors: torch.Tensor, **layer: torch.Tensor) -> None:
        """Plan, launch, and let go of the step: a graph's pool must not find its tensors held."""
        with self._lock:
            if self.index is not None:
                self._wait()
            self.prepared.plan(step)
            self.prepared.launch(*tensors, **layer)
            self.prepared.plan(self._nothing)

    def keep(self, step: AttentionStep) -> None:
        """Plan launches to come, which hold the step."""
        with self._lock:
            if self.index is not None:
                self._wait()
            self.prepared.plan(step)

    def launch(self, *tensors: torch.Tensor, **layer: torch.Tensor) -> None:
        """Launch on the step that is kept."""
        with self._lock:
            if self.index is not None:
                self._wait()
            self.prepared.launch(*tensors, **layer)

    def _wait(self) -> None:
        """Let the current stream wait for the last call, where that was on another one."""
        raw = torch._C._cuda_getCurrentRawStream(self.index)
        if raw == self._raw_stream or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.index)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream, self._raw_stream = stream, raw


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """What all calls of the same shapes share.

    host    on a GPU, the most that a step's host copies can say where nothing is read back: bounds of the contents
    """

    plan: Plan
    block_size: int
    host: Host


_plans: dict[tuple[Any, ...], Plan] = {}  # by capacities
_forms: dict[tuple[Any, ...], Form] = {}
_preparing = threading.RLock()  # one at a time compiles


def release() -> None:
    """Give back every workspace; the next call prepares anew. Graphs captured before must not be replayed any more."""
    for index in {plan.index for plan in _plans.values()} - {None}:
        torch.cuda.synchronize(index)  # a launch may still be at work in it, on any stream
    _forms.clear()
    _plans.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a call says besides its tensors."""

    scale: float | None
    layout: str
    max_q_len: int
    window: int | None
    softcap: float | None


def find_form(tensors: Tensors, layer: dict[str, torch.Tensor], asked: Asked) -> Form:
    """Return the form of a call, prepared; `layer` holds what it names. Raises ValueError for what does not go together."""
    key = key_of(tensors, layer, asked)
    form = _forms.get(key)
    if form is None:
        form = _make_form(tensors, layer, asked)
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
        _forms[key] = form
    return form


def key_of(tensors: Tensors, layer: dict[str, torch.Tensor], asked: Asked) -> tuple[Any, ...]:
    """All of a call but contents and addresses."""
    forms = ((t.shape, t.stride(), t.dtype, t.device) for t in (*tensors, *layer.values()))
    return (asked, *layer, *forms)


def _make_form(tensors: Tensors, layer: dict[str, torch.Tensor], asked: Asked) -> Form:
    spec = checked_spec(tensors, layer, asked)
    query, block_tables = tensors[0], tensors[3]
    capacities = tuple(str(value) if name == "layout" else value for name, value in vars(spec).items() if name != "params")
    with _preparing:
        if capacities not in _plans:
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "paged_attention: shapes that are new need a compilation and workspace, which the capture of a CUDA "
                    "graph does not allow; call it once with them before"
                )
            _plans[capacities] = Plan(spec)
    num_seqs = len(block_tables)
    starts = np.zeros(num_seqs + 1, np.int32)
    starts[-1] = len(query)
    longest = np.full(num_seqs, block_tables.shape[1] * spec.block_size, np.int32)
    host = (np.zeros((num_seqs, 0), np.int32), longest, starts)
    return Form(plan=_plans[capacities], block_size=spec.block_size, host=host)


def checked_spec(tensors: Tensors, layer: dict[str, torch.Tensor], asked: Asked) -> AttentionSpec:
    """What a call's shapes say. Raises ValueError for what does not go together."""
    spec = _spec(tensors, layer, asked)
    _check_layer(spec, layer, tensors[0].device)
    return spec


def check_lengths(seq_lens: np.ndarray, starts: np.ndarray, longest: int, num_tokens: int, max_q_len: int) -> None:
    """Raise ValueError unless a step's lengths, on the host, are those of its tables and of what a call announces."""
    q_lens = np.diff(starts)
    for name, got, least, most in (
        ("query_start_loc[0]", starts[0], 0, 0), ("query_start_loc[-1]", starts[-1], 0, num_tokens),
        ("seq_lens", seq_lens.min(initial=0), 0, longest), ("seq_lens", seq_lens.max(initial=0), 0, longest),
        ("query tokens of a sequence", q_lens.min(initial=0), 0, max_q_len),
        ("query tokens of a sequence", q_lens.max(initial=0), 0, max_q_len),
    ):  # fmt: skip
        if not least <= got <= most:
            rule = f"at least {least}" if got < least else f"at most {most}"
            raise ValueError(f"paged_attention: {name} must be {rule} (query, block_tables, max_q_len; got {got})")


def _spec(tensors: Tensors, layer: dict[str, torch.Tensor], asked: Asked) -> AttentionSpec:
    """What the tensors' shapes say, capacities rounded up. Raises ValueError for tensors that do not go together."""
    layout, max_q_len = asked.layout, asked.max_q_len
    query, key_cache, value_cache, block_tables, seq_lens, query_start_loc = tensors
    paged = [name for name, found in LAYOUTS.items() if found.paged]
    _must(layout in paged, f"layout must be one of {', '.join(paged)}", layout)
    _must(query.dtype in DTYPES, "query must be f32, f16 or bf16", query.dtype)
    kv_dtype = KV_DTYPES.get(value_cache.dtype)
    cache_dtype = value_cache.dtype if kv_dtype else query.dtype
    _must(value_cache.dim() == 4, f"value_cache of {layout} must have 4 dimensions", tuple(value_cache.shape))
    a, b, c, d = value_cache.shape
    shape = {"NHD": (a, c, b, d), "KV_NHD": (a, c, b, d), "X_PACKED": (a, b, d, c)}.get(layout, (a, b, c, d))
    num_blocks, num_kv_heads, block_size, head_dim = shape
    _must(query.shape[2] == head_dim, f"query and value_cache ({layout}) must have one head_dim", (query.shape[2], head_dim))
    heads = (query.shape[1], num_kv_heads)
    _must(num_kv_heads > 0 and heads[0] % num_kv_heads == 0, "query heads must be a multiple of KV heads", heads)
    num_seqs = len(seq_lens) if seq_lens.dim() else 0
    keys = LAYOUTS[layout].empty((num_blocks, num_kv_heads, block_size, head_dim), cache_dtype, "meta")[0].shape
    for name, tensor, wanted, dtype in (
        ("key_cache", key_cache, keys, cache_dtype), ("value_cache", value_cache, value_cache.shape, cache_dtype),
        ("block_tables", block_tables, (num_seqs, block_tables.shape[-1]), torch.int32),
        ("seq_lens", seq_lens, (num_seqs,), torch.int32), ("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32),
    ):  # fmt: skip
        right = tuple(tensor.shape) == tuple(wanted) and tensor.dtype == dtype and tensor.device == query.device
        got = f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        _must(right, f"{name} must have shape {tuple(wanted)} and type {dtype} on {query.device}", got)
        dense = tensor.stride(-1) == 1 or tensor.shape[-1] < 2
        _must(dense, f"{name} must be contiguous along its last dimension", f"strides {tensor.stride()}")
    _must(max_q_len >= 1, "max_q_len must be at least 1", max_q_len)
    _must(asked.window is None or asked.window >= 1, "window must be None or at least 1", asked.window)
    _must(asked.softcap is None or 0 < asked.softcap < math.inf, "softcap must be None or above 0 and finite", asked.softcap)
    _must(asked.scale is None or math.isfinite(asked.scale), "scale must be None or finite", asked.scale)
    blocks_per_seq = _round_up(block_tables.shape[1])
    return AttentionSpec(
        num_q_heads=query.shape[1], num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=DTYPES[query.dtype], scale=head_dim**-0.5 if asked.scale is None else asked.scale, layout=LAYOUTS[layout],
        num_blocks=num_blocks, max_num_seqs=_round_up(num_seqs), max_num_tokens=_round_up(len(query)),
        max_q_len=_round_up(max_q_len), max_seq_len=blocks_per_seq * block_size, max_blocks_per_seq=blocks_per_seq,
        device=str(query.device), window=asked.window, softcap=asked.softcap, alibi="alibi_slopes" in layer,
        sinks="sinks" in layer, kv_dtype=kv_dtype,
        kv_scales="head" if "k_scale" in layer and layer["k_scale"].numel() > 1 else "tensor",
    )  # fmt: skip


def _check_layer(spec: AttentionSpec, layer: dict[str, torch.Tensor], device: torch.device) -> None:
    """Raise ValueError unless what a call names is what its caches and the others ask for."""
    wanted = spec.layer_shapes
    if spec.kv_dtype:
        _must("k_scale" in layer and "v_scale" in layer, f"caches of {spec.kv_dtype} need k_scale and v_scale", [*layer])
    else:
        _must(not {"k_scale", "v_scale"} & layer.keys(), "k_scale and v_scale are for fp8 caches", f"caches of {spec.dtype}")
    for name, tensor in layer.items():
        right = tuple(tensor.shape) == wanted[name] and tensor.dtype == torch.float32 and tensor.device == device
        got = f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        _must(right, f"{name} must have shape {wanted[name]} and type float32 on {device}", got)
        _must(tensor.is_contiguous(), f"{name} must be contiguous", f"strides {tensor.stride()}")


def _round_up(number: int) -> int:
    """To a power of two, so that a batch that grows prepares seldom."""
    return 1 << max(number - 1, 0).bit_length()


def _must(holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise ValueError(f"paged_attention: {rule} (got {got})")


def _prepare(spec: AttentionSpec) -> tuple[str, Prepared]:
    """Prepare the best entry that takes `spec`. Raises NotImplementedError that says why none does."""
    kind = torch.device(spec.device).type
    impls = {impl.name: impl for impl in default_registry()}
    reasons = []
    for name in PREFERRED.get(kind, ()):
        reason = _why_not(impls[name], spec, kind)
        if reason is None:
            chosen = dataclasses.replace(spec, params=impls[name].resolve_params({}))
            try:
                return name, _prepare_apart(impls[name], chosen)
            except Unsupported as error:
                reason = str(error)
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"paged_attention: nothing here takes this on {kind}: {'; '.join(reasons)}")


def _why_not(impl: Impl, spec: AttentionSpec, kind: str) -> str | None:
    if spec.layout not in impl.layouts:
        return f"layout must be one of {', '.join(map(str, impl.layouts))} (got {spec.layout})"
    return spec.layout.why_not(spec) or impl.limits.why_not(spec) or impl.why_missing(kind)  # type: ignore[arg-type]  # by name


def _prepare_apart(impl: Impl, spec: AttentionSpec) -> Any:
    """In a thread of its own, so that workspace comes from no pool that the caller's thread allocates graphs from."""

    def prepare() -> Any:
        if not spec.device.startswith("cuda"):
            return impl.load()(spec)
        with torch.cuda.device(spec.device):
            prepared = impl.load()(spec)
            torch.cuda.current_stream().synchronize()  # what it filled is there for every stream
            return prepared

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(prepare).result()

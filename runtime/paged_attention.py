"""The interface of the Ascend article, over the block manager and any implementation of the registry.

    attention = PagedAttention(num_heads=32, head_dim=128, block_size=16, num_blocks=1024)
    block_ids = attention.allocate(request_id=1, seq_len=128)
    output = attention.forward(query, key, value, block_ids)
    attention.free(request_id=1)

One layer, one request a call: for learning and for checking. An engine takes `BlockManager` and plans a batch. What the
layer adds, a window, fp8 caches, is said once; keys and values are written by the registry's cache_write, which quantises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.ops.attention import AttentionSpec, AttentionStep
from harness.ops.cache_write import CacheWriteSpec, CacheWriteStep
from harness.ops.dtypes import torch_dtype
from harness.ops.layouts import KV_NHD
from harness.registry import Impl, Registry, Unsupported, default_registry
from runtime.errors import ForeignBlock, InvalidId, InvalidLength, SequenceExists, UnknownSequence
from runtime.ids import as_ids
from runtime.layer import read_layer
from runtime.manager import BlockManager
from runtime.tokens import as_integer

if TYPE_CHECKING:
    import torch

DTYPES = ("f32", "f16", "bf16")
#: what writes keys and values, the best first
WRITES = {"cuda": ("cuda.cache_write", "torch.cache_write")}


@dataclass
class Request:
    """Blocks given to a request, and how many of its slots are filled."""

    request_id: Hashable
    sequence: int
    block_ids: tuple[int, ...]
    seq_len: int
    filled: int = 0


class PagedAttention:
    """A cache [num_blocks, 2, block_size, num_kv_heads, head_dim] and the requests in it.

    impl                     a name of the registry; it must take the layout KV_NHD
    dtype                    "f32", "f16" or "bf16": of all that is handed in, and of the cache without a kv_dtype
    scale, window, softcap   of scores; a token sees so many keys, its own included; bound of scores (harness/ops/attention.py)
    alibi_slopes, sinks      [num_heads] f32
    kv_dtype                 "e4m3" or "e5m2" of a quantised cache, which needs both of
    k_scale, v_scale         numbers, or f32 of shape [1] or [num_kv_heads]: key = float(key_cache) * k_scale

    Raises InvalidLength, with the rule and what was got, for what cannot be meant.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        *,
        num_kv_heads: int | None = None,
        impl: str = "torch.gather",
        dtype: str = "f32",
        device: str = "cpu",
        registry: Registry | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        kv_dtype: str | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
    ) -> None:
        who = "PagedAttention:"
        self.num_heads = as_integer(num_heads, f"{who} num_heads", 1)
        self.head_dim = as_integer(head_dim, f"{who} head_dim", 1)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else as_integer(num_kv_heads, f"{who} num_kv_heads", 1)
        if dtype not in DTYPES:
            raise InvalidLength(f"PagedAttention: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if num_heads % self.num_kv_heads:
            raise InvalidLength(
                f"PagedAttention: num_heads must be a multiple of num_kv_heads, got {num_heads}, {num_kv_heads}"
            )
        _require_device(device)
        self._manager = BlockManager(num_blocks, block_size)
        heads = {"num_q_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        given = {
            "scale": scale, "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks,
            "kv_dtype": kv_dtype, "k_scale": k_scale, "v_scale": v_scale,
        }  # fmt: skip
        self._layer = read_layer({**heads, "block_size": self._manager.block_size, "dtype": dtype}, given, device)
        (entry,) = (registry or default_registry()).entries([f"{impl}[{KV_NHD}]"])
        self._impl, self._params = entry.impl, entry.impl.resolve_params({})
        self._dtype, self._device = dtype, device
        shape = (num_blocks, self.num_kv_heads, block_size, head_dim)
        self.key_cache, self.value_cache = KV_NHD.empty(shape, torch_dtype(kv_dtype or dtype), device)
        self._requests: dict[Hashable, Request] = {}
        self._prepared: dict[int, tuple[Any, Any]] = {}  # write and attention, by a power of two that bounds the query's tokens

    def allocate(self, request_id: Hashable, seq_len: int) -> list[int]:
        """Blocks for `seq_len` tokens of a new request, the prompt and all that will follow it."""
        if _hashable(request_id, "allocate") in self._requests:
            raise SequenceExists(f"PagedAttention.allocate: request {request_id!r} has blocks: free it first")
        seq_len = as_integer(seq_len, "PagedAttention.allocate: seq_len", 1)
        sequence = self._manager.create_sequence()
        try:
            self._manager.append_tokens([sequence], [seq_len])
        except Exception:
            self._manager.release_sequence(sequence)
            raise
        block_ids = self._manager.sequences[sequence].block_table
        self._requests[request_id] = Request(request_id, sequence, tuple(block_ids), seq_len)
        return block_ids

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
        """Append `key` and `value` at the request's fill mark, then attend causally over all that it holds.

        Shapes
            query                [num_tokens, num_heads, head_dim]
            key, value           [num_tokens, num_kv_heads, head_dim]
            the answer           as query, without a gradient
        """
        import torch

        request = self._request_of(block_ids)
        self._check(query, key, value)
        num_tokens = len(query)
        if request.filled + num_tokens > request.seq_len:
            raise InvalidLength(
                f"PagedAttention.forward: request {request.request_id!r} has slots for {request.seq_len} tokens and holds "
                f"{request.filled}, got {num_tokens} more: allocate as many as it will come to"
            )
        write, attend = self._prepare(num_tokens)  # what is unsupported is refused before anything is written
        with torch.no_grad():  # a cache outlives the graph that a layer's key would tie it to
            write.plan(self._slots(request, num_tokens))
            write.launch(key.detach(), value.detach(), self.key_cache, self.value_cache, **self._layer.scales)
            request.filled += num_tokens
            attend.plan(self._step(request, num_tokens))
            out = torch.empty_like(query)
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            attend.launch(query.detach(), self.key_cache, self.value_cache, out, lse, **self._layer.named)
        return out

    def free(self, request_id: Hashable) -> None:
        """Give a request's blocks back."""
        request = self._requests.pop(_hashable(request_id, "free"), None)
        if request is None:
            raise UnknownSequence(f"PagedAttention.free: request {request_id!r} has no blocks: it was freed or never allocated")
        self._manager.release_sequence(request.sequence)

    @property
    def free_blocks(self) -> list[int]:
        """Blocks of no request."""
        return self._manager.free_blocks

    def _request_of(self, block_ids: Sequence[int]) -> Request:
        wanted = tuple(as_ids(block_ids, "PagedAttention.forward: block_ids"))
        for request in self._requests.values():
            if request.block_ids == wanted:
                return request
        raise ForeignBlock(f"PagedAttention.forward: no request holds the blocks {list(wanted)}: give what allocate returned")

    def _check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        import torch

        wanted = torch_dtype(self._dtype)
        num_tokens = len(query) if isinstance(query, torch.Tensor) and query.ndim else 0
        for name, tensor, heads in (
            ("query", query, self.num_heads),
            ("key", key, self.num_kv_heads),
            ("value", value, self.num_kv_heads),
        ):
            shape = (num_tokens, heads, self.head_dim)
            a_tensor = isinstance(tensor, torch.Tensor)
            if not a_tensor or tuple(tensor.shape) != shape or tensor.dtype != wanted or num_tokens == 0:
                got = f"{list(tensor.shape)} of {tensor.dtype}" if a_tensor else f"a {type(tensor).__name__}"
                raise InvalidLength(
                    f"PagedAttention.forward: {name} must be {list(shape)} of {wanted}, at least one token, got {got}"
                )

    def _prepare(self, num_tokens: int) -> tuple[Any, Any]:
        capacity = 1 << (num_tokens - 1).bit_length()
        if capacity not in self._prepared:
            attend = self._prepare_attention(capacity)
            self._prepared[capacity] = (self._prepare_write(capacity), attend)
        return self._prepared[capacity]

    def _prepare_attention(self, capacity: int) -> Any:
        num_blocks, block_size = self._manager.num_physical_blocks, self._manager.block_size
        spec = AttentionSpec(
            num_q_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, block_size=block_size,
            dtype=self._dtype, layout=KV_NHD, num_blocks=num_blocks, max_num_seqs=1, max_num_tokens=capacity,
            max_q_len=capacity, max_seq_len=num_blocks * block_size, max_blocks_per_seq=num_blocks, device=self._device,
            params=self._params, **self._layer.asked,
        )  # fmt: skip
        reason = self._why_not(self._impl, spec)
        if reason:
            raise Unsupported(f"{self._impl.name} cannot run this PagedAttention: {reason}")
        return self._impl.load()(spec)

    def _prepare_write(self, capacity: int) -> Any:
        spec = CacheWriteSpec(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, block_size=self._manager.block_size, dtype=self._dtype,
            layout=KV_NHD, num_blocks=self._manager.num_physical_blocks, max_num_tokens=capacity, device=self._device,
            kv_dtype=self._layer.asked["kv_dtype"], kv_scales=self._layer.asked["kv_scales"],
        )  # fmt: skip
        *better, general = WRITES.get(self._device.split(":")[0], ("torch.cache_write",))
        impls = {impl.name: impl for impl in default_registry()}
        for name in better:
            if self._why_not(impls[name], spec) is None:
                with contextlib.suppress(Unsupported):  # what only preparing finds out: heads of broken vectors
                    return impls[name].load()(spec)
        return impls[general].load()(spec)

    def _why_not(self, impl: Impl, spec: Any) -> str | None:
        kind = self._device.split(":")[0]
        only = " or ".join(impl.devices)
        elsewhere = kind in ("cpu", "cuda") and kind not in impl.devices
        return f"runs on {only} only (got {kind})" if elsewhere else impl.limits.why_not(spec) or impl.why_missing(kind)

    def _slots(self, request: Request, num_tokens: int) -> CacheWriteStep:
        import torch

        positions = np.arange(request.filled, request.filled + num_tokens)
        blocks, size = np.array(request.block_ids, np.int64), self._manager.block_size
        slots = blocks[positions // size] * size + positions % size
        return CacheWriteStep(slot_mapping=torch.from_numpy(slots).to(self._device), host_slot_mapping=slots)

    def _step(self, request: Request, num_tokens: int) -> AttentionStep:
        import torch

        host = (
            np.array([request.block_ids], np.int32),
            np.array([request.filled], np.int32),
            np.array([0, num_tokens], np.int32),
        )
        tables, lengths, starts = (torch.from_numpy(array).to(self._device) for array in host)
        return AttentionStep(
            block_tables=tables,
            seq_lens=lengths,
            query_start_loc=starts,
            host_block_tables=host[0],
            host_seq_lens=host[1],
            host_query_start_loc=host[2],
        )


def _hashable(request_id: Hashable, who: str) -> Hashable:
    if not isinstance(request_id, Hashable):
        raise InvalidId(f"PagedAttention.{who}: request_id must be hashable, got {request_id!r}")
    return request_id


def _require_device(device: str) -> None:
    """Raise InvalidLength for a GPU that is not there."""
    import torch

    if device.startswith("cuda") and (torch.device(device).index or 0) >= (seen := torch.cuda.device_count()):
        raise InvalidLength(f"PagedAttention: device must be one of the {seen} CUDA devices that torch sees, got {device!r}")

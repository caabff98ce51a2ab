"""The kernels that an engine runs on: entries of the registry, chosen by their limits and prepared for its steps.

    decode     one query token a sequence: the entry that was asked for
    prefill    several query tokens a sequence: the same entry where it takes them, else another one in the same layout
    write      cache_write, of every layer and step
    copy       block_copy, for copy-on-write

The cache is born in the layout of the decode entry, and no entry is taken that would need another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from harness.ops.attention import AttentionSpec
from harness.ops.block_copy import BlockCopySpec
from harness.ops.cache_write import CacheWriteSpec
from harness.ops.dtypes import torch_dtype
from harness.ops.layouts import HND, Layout
from harness.registry import Entry, Impl, Prepared, Registry, Unsupported, default_registry

#: by kind of device, entries for decode and for prompts that go well together, the best first
PAIRS = {
    "cuda": (
        ("cuda.tensor_core[HND_SWIZZLED]", "cuda.prefill[HND_SWIZZLED]"),
        ("cuda.tensor_core[HND]", "triton.split_kv[HND]"),
        ("cuda.split_kv[HND]", "triton.split_kv[HND]"),
        ("torch.gather[HND]", "torch.gather[HND]"),
    ),
    "cpu": (("torch.gather[HND]", "torch.gather[HND]"),),
}
#: by operator and kind of device, what goes with a layout that is settled, the best first
PREFERRED = {
    ("attention", "cuda"): ("cuda.prefill", "triton.split_kv", "torch.gather", "cuda.per_token"),
    ("attention", "cpu"): ("torch.gather", "torch.blocked"),
    ("cache_write", "cuda"): ("cuda.cache_write", "torch.cache_write"),
    ("cache_write", "cpu"): ("torch.cache_write",),
    ("block_copy", "cuda"): ("cuda.block_copy", "torch.block_copy"),
    ("block_copy", "cpu"): ("torch.block_copy",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What of a model and a pool decides caches and kernels. `dtype` is "f32", "f16" or "bf16"."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: str
    block_size: int
    num_blocks: int
    max_seq_len: int
    device: str

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def blocks_per_seq(self) -> int:
        """Entries of a block table."""
        return -(-self.max_seq_len // self.block_size)

    def attention_spec(self, layout: Layout, *, num_seqs: int, num_tokens: int, q_len: int) -> AttentionSpec:
        """The spec of an attention entry for these capacities."""
        return AttentionSpec(
            num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, block_size=self.block_size,
            dtype=self.dtype, scale=self.scale, layout=layout, num_blocks=self.num_blocks, max_num_seqs=num_seqs,
            max_num_tokens=num_tokens, max_q_len=q_len, max_seq_len=self.blocks_per_seq * self.block_size,
            max_blocks_per_seq=self.blocks_per_seq, device=self.device,
        )  # fmt: skip


class Kernels:
    """Entries for one cache shape. Raises UsageError for a name that is none, Unsupported where limits rule an entry out.

    max_q_len          query tokens of a sequence in one step, at most
    decode, prefill    rows of the registry, "cuda.split_kv[NHD]"; None is the best that takes the shape
    """

    def __init__(
        self, shape: CacheShape, *, max_q_len: int, decode: str | None = None, prefill: str | None = None,
        registry: Registry | None = None,
    ) -> None:  # fmt: skip
        self.shape, self._max_q_len = shape, max_q_len
        self._registry = registry or default_registry()
        self.decode, self.prefill = self._choose_both(decode, prefill)
        self.layout = self.decode.layout
        self._write = self._choose("cache_write", PREFERRED["cache_write", shape.kind], self._write_spec(1))
        self._copy = self._choose("block_copy", PREFERRED["block_copy", shape.kind], self._copy_spec(1))

    def _choose_both(self, decode: str | None, prefill: str | None) -> tuple[Entry, Entry]:
        """The entries named; or a pair, or what goes with the one that is named: for prompts itself, where it takes them."""
        shape = self.shape
        if decode is None and prefill is None:
            reasons = []
            for pair in PAIRS[shape.kind]:
                try:
                    return self._choose_both(*pair)
                except Unsupported as why:
                    reasons.append(str(why))
            raise Unsupported("; ".join(reasons))
        named = (decode,) if decode else tuple(first for first, _ in PAIRS[shape.kind])
        for_one = self._choose("attention", named, shape.attention_spec(HND, num_seqs=1, num_tokens=1, q_len=1))
        several = shape.attention_spec(for_one.layout, num_seqs=1, num_tokens=self._max_q_len, q_len=self._max_q_len)
        if prefill is None and self._why_not("attention", for_one, several) is None:
            return for_one, for_one
        others = (prefill,) if prefill else PREFERRED["attention", shape.kind]
        return for_one, self._choose("attention", others, several, for_one.layout)

    @property
    def is_one(self) -> bool:
        """Whether one entry takes rows of one and of several tokens in one launch."""
        return str(self.decode) == str(self.prefill)

    def attention(self, entry: Entry, *, num_seqs: int, num_tokens: int, q_len: int) -> Prepared:
        """Prepare an attention entry for these capacities."""
        return _prepare(entry, self.shape.attention_spec(self.layout, num_seqs=num_seqs, num_tokens=num_tokens, q_len=q_len))

    def cache_write(self, num_tokens: int) -> Prepared:
        """Prepare the cache write of steps of up to `num_tokens`."""
        return _prepare(self._write, self._write_spec(num_tokens))

    def block_copy(self, num_copies: int) -> Prepared:
        """Prepare the copy of up to `num_copies` blocks of all layers."""
        return _prepare(self._copy, self._copy_spec(num_copies))

    def empty_caches(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """A key and a value cache for each layer, in the layout, all zeros: what is masked may be multiplied by 0."""
        shape = self.shape
        canonical = (shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        pairs = [self.layout.empty(canonical, torch_dtype(shape.dtype), shape.device) for _ in range(shape.num_layers)]
        for pair in pairs:
            for cache in pair:
                cache.zero_()
        return tuple(key for key, _ in pairs), tuple(value for _, value in pairs)

    def _write_spec(self, num_tokens: int) -> CacheWriteSpec:
        shape = self.shape
        return CacheWriteSpec(
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, block_size=shape.block_size, dtype=shape.dtype,
            layout=self.layout, num_blocks=shape.num_blocks, max_num_tokens=num_tokens, device=shape.device,
        )  # fmt: skip

    def _copy_spec(self, num_copies: int) -> BlockCopySpec:
        shape = self.shape
        return BlockCopySpec(
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, block_size=shape.block_size, dtype=shape.dtype,
            layout=self.layout, num_blocks=shape.num_blocks, num_layers=shape.num_layers, max_num_copies=num_copies,
            device=shape.device,
        )  # fmt: skip

    def _choose(self, op: str, names: Sequence[str], spec: Any, layout: Layout | None = None) -> Entry:
        """The first of `names` that takes the spec; in `layout`, which is the spec's own where the cache has one already."""
        layout = layout or (self.layout if op != "attention" else None)
        reasons = []
        for name in names:
            for entry in self._registry.entries([name]):
                reason = self._why_not(op, entry, dataclasses.replace(spec, layout=entry.layout))
                if reason is None and layout is not None and entry.layout is not layout:
                    reason = f"the cache is in {layout}"
                if reason is None:
                    return entry
                reasons.append(f"{entry}: {reason}")
        raise Unsupported(f"no entry of the registry for {op} of this model: {'; '.join(reasons)}")

    def _why_not(self, op: str, entry: Entry, spec: Any) -> str | None:
        impl: Impl = entry.impl
        if impl.op != op:
            return f"it implements {impl.op}, and {op} is wanted"
        if not entry.layout.paged:
            return f"{entry.layout} is not paged"
        if self.shape.kind not in impl.devices:
            return f"runs on {' or '.join(impl.devices)} only (got {self.shape.kind})"
        return entry.layout.why_not(spec) or impl.limits.why_not(spec) or impl.why_missing(self.shape.kind)


def _prepare(entry: Entry, spec: Any) -> Prepared:
    spec = dataclasses.replace(spec, params=entry.impl.resolve_params(entry.params))
    prepared: Prepared = entry.impl.load()(spec)
    return prepared

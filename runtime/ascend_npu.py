"""experimental: never run on an NPU. torch_npu's paged attention behind the registry, for whoever has an Ascend device.

    PagedAttention(..., impl="experimental.ascend_npu", registry=Registry(IMPLS), device="npu")
    pagedbench check --impl-file runtime/ascend_npu.py      says "unsupported", and why, on any other machine

Written from vllm-ascend's use of `torch_npu._npu_paged_attention` (decode, NHD caches, lengths on the host). The operator
tells no LSE, so `lse` is left as it is.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from harness.ops.layouts import KV_NHD, NHD
from harness.registry import Impl, Limits, Prepared

if TYPE_CHECKING:
    import torch

    from harness.ops.attention import AttentionSpec, AttentionStep

NOTE = "experimental: never run on an NPU"


def why_missing(device_kind: str) -> str | None:
    """Return why it cannot run here."""
    if device_kind != "npu":
        return f"{NOTE}; it needs an Ascend device (got {device_kind})"
    return None if importlib.util.find_spec("torch_npu") else f"{NOTE}; torch_npu is not installed"


def prepare(spec: AttentionSpec) -> NpuPagedAttention:
    return NpuPagedAttention(spec)


class NpuPagedAttention(Prepared):
    """Keeps the step's table and lengths."""

    ledger = {"lse": "not told by the operator, and not written", "copies": "caches that are not contiguous", "note": NOTE}

    def __init__(self, spec: AttentionSpec) -> None:
        import torch_npu  # type: ignore[import-not-found]

        self._operator: Any = torch_npu._npu_paged_attention
        self._spec = spec

    def plan(self, step: AttentionStep) -> None:
        import torch

        self._block_tables = step.block_tables
        self._seq_lens = torch.from_numpy(step.host_seq_lens)  # the operator reads them on the host

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        self._operator(
            query=query,
            key_cache=key_cache.contiguous(),
            value_cache=value_cache.contiguous(),
            num_kv_heads=self._spec.num_kv_heads,
            num_heads=self._spec.num_q_heads,
            scale_value=self._spec.scale,
            block_table=self._block_tables,
            context_lens=self._seq_lens,
            out=out,
        )


IMPLS = (
    Impl(
        name="experimental.ascend_npu",
        op="attention",
        prepare="runtime.ascend_npu:prepare",
        layouts=(NHD, KV_NHD),
        limits=Limits(dtypes={"f16", "bf16"}, max_q_len=1),
        graph=False,
        available="runtime.ascend_npu:why_missing",
        note=NOTE,
    ),
)

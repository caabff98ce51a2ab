"""`torch.ops.pagedbench.paged_attention`: the best implementation of the registry, as an operator of torch.

    import runtime.torch_op  # registers it

    out, lse = torch.ops.pagedbench.paged_attention(
        query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale=None, layout="HND", max_q_len=1,
        window=None, softcap=None, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, plan=None,
    )

Shapes
    query                   [num_tokens, num_q_heads, head_dim]      f32, f16 or bf16; tokens may be strided
    key_cache, value_cache  by `layout` (harness/ops/layouts.py)     as query, or fp8 e4m3, e5m2; halves of a KV_NHD cache apart
    block_tables            [num_seqs, max_blocks_per_seq]           int32 block ids; past a sequence's blocks anything
    seq_lens                [num_seqs]                               int32 tokens in the cache, the new ones included
    query_start_loc         [num_seqs + 1]                           int32 query tokens before each sequence
    alibi_slopes, sinks     [num_q_heads]                            f32, or None
    k_scale, v_scale        [1] or [num_kv_heads]                    f32, of fp8 caches: key = float(key_cache) * k_scale
    out, lse                as query; [num_tokens, num_q_heads]      lse in f32, natural logarithm

scale is head_dim ** -0.5 where it is None. max_q_len bounds the query tokens of each sequence: 1 is decode, which the fastest
kernels ask for. A token at position p sees keys p - window < t <= p; softcap bounds scores before slopes and mask; sinks join
a row's sum and its LSE (harness/ops/attention.py). Tables may share blocks; on a GPU those are read once where `plan` is the id
of a `StepPlan` (runtime/step_plan.py), which was given the step on the host. Rows past query_start_loc[-1], padding, are left
as they were allocated. There is no backward.

On a GPU nothing is read back: what a call does follows from shapes alone, lengths and tables are read by the kernels. The first
call of new shapes, rounded up to powers of two, compiles and takes workspace; it must not be inside a CUDA graph's capture.
Calls that share a workspace wait for one another across streams; replays of a captured graph are the caller's to order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from harness.ops.attention import AttentionStep
from runtime.op_plan import Asked, Form, check_lengths, find_form, release
from runtime.step_plan import StepPlan, find_plan

__all__ = ["StepPlan", "release"]

SCHEMA = (
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor query_start_loc, float? scale=None, str layout='HND', int max_q_len=1, *, int? window=None, "
    "float? softcap=None, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "SymInt? plan=None) -> (Tensor out, Tensor lse)"
)


def _paged_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, scale: float | None = None, layout: str = "HND", max_q_len: int = 1,
    *, window: int | None = None, softcap: float | None = None, plan: int | None = None, **named: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    tensors = (query, key_cache, value_cache, block_tables, seq_lens, query_start_loc)
    layer = {name: tensor for name, tensor in named.items() if tensor is not None}
    out, lse = _results(*tensors, **layer)
    asked = Asked(scale, layout, max_q_len, window, softcap)
    if plan is not None:
        find_plan(plan).launch(tensors, layer, asked, out, lse)
        return out, lse
    form = find_form(tensors, layer, asked)
    if not (len(query) and len(seq_lens)):
        return out, lse
    if not query.is_cuda:
        _run_on_host(form, tensors, layer, out, lse, asked)
    elif query.get_device() == torch.cuda.current_device():
        form.plan.run(_step(tensors, form.host), query, key_cache, value_cache, out, lse, **layer)
    else:
        with torch.cuda.device(query.device):
            form.plan.run(_step(tensors, form.host), query, key_cache, value_cache, out, lse, **layer)
    return out, lse


def _results(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, *_: object, **named: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Allocate out and lse: all that a tracer sees of the operator. It knows no sizes, so what sizes rule out is told later."""
    if query.dim() != 3:
        raise ValueError(f"paged_attention: query must be [num_tokens, num_q_heads, head_dim] (got {tuple(query.shape)})")
    wanted = (query, key_cache, value_cache, *named.values())
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in wanted):
        raise RuntimeError("paged_attention: there is no backward; call it under torch.no_grad() or torch.inference_mode()")
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


def _run_on_host(
    form: Form, tensors: tuple[torch.Tensor, ...], layer: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor,
    asked: Asked,
) -> None:
    """On a CPU contents can be seen: they are planned by, and what must not be is refused."""
    query, key_cache, value_cache = tensors[:3]
    tables, seq_lens, starts = (t.numpy() for t in tensors[3:])
    num_tokens = int(starts[-1])
    check_lengths(seq_lens, starts, tables.shape[1] * form.block_size, len(out), asked.max_q_len)
    firsts = np.maximum(seq_lens - np.diff(starts) - asked.window + 1, 0) if asked.window else np.zeros_like(seq_lens)
    begins = np.arange(tables.shape[1]) * form.block_size  # of each block, whose keys are seen or not
    ids = tables[(begins < seq_lens[:, None]) & (begins + form.block_size > firsts[:, None])]
    if ids.size and not 0 <= ids.min() <= ids.max() < len(key_cache):
        rule = f"block ids in use must be 0 to {len(key_cache) - 1}"
        raise ValueError(f"paged_attention: {rule}, the cache's blocks (got {ids.min()} to {ids.max()})")
    step = _step(tensors, (tables, seq_lens, starts))
    form.plan.run(step, query[:num_tokens], key_cache, value_cache, out[:num_tokens], lse[:num_tokens], **layer)


def _step(tensors: tuple[torch.Tensor, ...], host: tuple[Any, Any, Any]) -> AttentionStep:
    return AttentionStep(
        block_tables=tensors[3], seq_lens=tensors[4], query_start_loc=tensors[5],
        host_block_tables=host[0], host_seq_lens=host[1], host_query_start_loc=host[2],
    )  # fmt: skip


# The operator lives as long as this object. Not custom_op: its wrapper costs 8 µs a call on the host, this 3.
_LIBRARY = torch.library.Library("pagedbench", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))  # type: ignore[no-untyped-call]
for _kind in ("CPU", "CUDA"):
    _LIBRARY.impl("paged_attention", _paged_attention, _kind)  # type: ignore[no-untyped-call]
torch.library.register_fake("pagedbench::paged_attention", _results, lib=_LIBRARY)

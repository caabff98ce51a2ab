"""FlashAttention of Dao-AILab on a CPU: signatures and refusals, the answers in torch.

Of Dao-AILab/flash-attention, August 2026: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp (FA2,
flash_attn_with_kvcache); hopper/flash_attn_interface.py, and the schema of hopper/flash_api.cpp for torch.ops.flash_attn_3.
"""

from __future__ import annotations

import math
import types

import torch

from tests.peers import fake_vllm
from tests.peers.attend import attend, require

FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, "
    "Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) -> "
    "(Tensor(out!), Tensor, Tensor, Tensor)"
)


def interface():
    """flash_attn_interface, the module that FlashAttention-3 installs."""
    made = types.ModuleType("flash_attn_interface")
    if "library" not in _LOADED:
        _LOADED["library"] = library = torch.library.Library("flash_attn_3", "FRAGMENT")
        library.define(FORWARD)
        library.impl("fwd", forward, "CPU")
    made.flash_attn_3_gpu = torch.ops.flash_attn_3
    made.get_scheduler_metadata = get_scheduler_metadata
    return made


_LOADED: dict[str, torch.library.Library] = {}


def forward(
    q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None,
    rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None,
    softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
    is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """The same kernels as vLLM's build, which marks rows without a key by +inf here; by -inf there."""
    made = fake_vllm.forward(
        q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
        max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
        v_descale, softmax_scale, is_causal, window_size_left, window_size_right, softcap, is_rotary_interleaved,
        scheduler_metadata, num_splits, pack_gqa, sm_margin, None, 1, 0, None,
    )  # fmt: skip
    return made[0], made[1].masked_fill(made[1].isposinf(), -math.inf), made[2], made[3]


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
    causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    return fake_vllm.get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v or headdim, qkv_dtype,
        cache_seqlens, cu_seqlens_q, None, cu_seqlens_k_new, None, cache_leftpad, page_size, max_seqlen_k_new, causal,
        *window_size, has_softcap, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """FlashAttention-2: out [batch, seqlen_q, heads, head_dim] and LSE [batch, heads, seqlen_q], +inf without a key."""
    batch, q_len, num_heads, head_dim = q.shape
    require(q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k_cache.dtype, "only support fp16 and bf16 data type")
    require(k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    require(head_dim <= 256 and num_heads % k_cache.shape[2] == 0, "head dimension at most 256")
    require(block_table.dtype == torch.int32 and len(block_table) == batch and block_table.stride(-1) == 1, "block_table")
    require(cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (batch,), "seqlens_k must have dtype int32")
    require(int(cache_seqlens.max()) <= block_table.shape[1] * k_cache.shape[1], "max(seqlens_k) exceeds the capacity")
    starts = torch.arange(batch + 1) * q_len
    require(window_size[1] == (0 if window_size[0] >= 0 else -1), "another kernel")
    out, logs = attend(
        q.flatten(0, 1), k_cache, v_cache, block_table, cache_seqlens, starts, softmax_scale, causal,
        window_left=window_size[0], softcap=softcap, alibi_slopes=alibi_slopes,
    )
    logs = logs.masked_fill(logs.isneginf(), math.inf).view(batch, q_len, num_heads).transpose(1, 2).contiguous()
    out = out.to(q.dtype).view(q.shape)
    return (out, logs) if return_softmax_lse else out

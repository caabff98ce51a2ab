"""What the libraries' fakes compute: paged attention row by row, reading no slot and no table entry that holds no token."""

from __future__ import annotations

import math

import torch


def attend(
    query, key_cache, value_cache, tables, seq_lens, starts, scale, causal=True, *, window_left=-1, softcap=None,
    alibi_slopes=None, sinks=None, k_scale=1.0, v_scale=1.0,
):
    """out [num_tokens, num_q_heads, head_dim] and lse [num_tokens, num_q_heads], natural, both float32.

    Shapes
        key_cache, value_cache    [num_blocks, block_size, num_kv_heads, head_dim], strided or not
        tables, seq_lens          [num_seqs, ...], [num_seqs]
        starts                    [num_seqs + 1], query tokens before each sequence
        alibi_slopes, sinks       [num_q_heads]
        k_scale, v_scale          numbers, or [num_kv_heads, 1]
    """
    num_tokens, num_q_heads, _ = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    out, lse = torch.zeros(query.shape), torch.full((num_tokens, num_q_heads), -math.inf)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        first, last = int(starts[seq]), int(starts[seq + 1])
        blocks = tables[seq, : -(-seq_len // block_size)].long()
        key, value = (
            cache[blocks].flatten(0, 1)[:seq_len].float() * of_cache
            for cache, of_cache in ((key_cache, k_scale), (value_cache, v_scale))
        )
        for token in range(first, last):
            visible = max(seq_len - (last - token) + 1, 0) if causal else seq_len
            if visible:
                rows = query[token].float().unflatten(0, (num_kv_heads, -1))
                first = max(visible - 1 - window_left, 0) if window_left >= 0 else 0
                scores = torch.einsum("hgd,thd->hgt", rows, key[first:visible]) * scale
                if softcap:
                    scores = softcap * (scores / softcap).tanh()
                if alibi_slopes is not None:
                    scores = scores + alibi_slopes.view(num_kv_heads, -1, 1) * torch.arange(first + 1 - visible, 1)
                logs = scores.logsumexp(-1)
                if sinks is not None:
                    logs = torch.logaddexp(logs, sinks.view(num_kv_heads, -1))
                lse[token] = logs.flatten()
                out[token] = torch.einsum("hgt,thd->hgd", (scores - logs[..., None]).exp(), value[first:visible]).flatten(0, 1)
            elif sinks is not None:
                lse[token] = sinks
    return out, lse


def write_flat(tensor, values):
    """Write as kernels do that look at a tensor's address and at none of its strides."""
    strides = torch.empty(tensor.shape, device="meta").stride()
    tensor.as_strided(tensor.shape, strides).copy_(values)


def read_flat(tensor):
    """The reverse."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def require(holds, says):
    """What the libraries' own checks do."""
    if not holds:
        raise RuntimeError(says)

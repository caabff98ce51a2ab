"""What the libraries' fakes compute: paged attention row by row, reading no slot and no table entry that holds no token."""

from __future__ import annotations

import math

import torch


def attend(query, key_cache, value_cache, tables, seq_lens, starts, scale, causal=True):
    """out [num_tokens, num_q_heads, head_dim] and lse [num_tokens, num_q_heads], natural, both float32.

    Shapes
        key_cache, value_cache    [num_blocks, block_size, num_kv_heads, head_dim], strided or not
        tables, seq_lens          [num_seqs, ...], [num_seqs]
        starts                    [num_seqs + 1], query tokens before each sequence
    """
    num_tokens, num_q_heads, _ = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    out, lse = torch.zeros(query.shape), torch.full((num_tokens, num_q_heads), -math.inf)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        first, last = int(starts[seq]), int(starts[seq + 1])
        blocks = tables[seq, : -(-seq_len // block_size)].long()
        key, value = (cache[blocks].flatten(0, 1)[:seq_len].float() for cache in (key_cache, value_cache))
        for token in range(first, last):
            visible = max(seq_len - (last - token) + 1, 0) if causal else seq_len
            if visible:
                rows = query[token].float().unflatten(0, (num_kv_heads, -1))
                scores = torch.einsum("hgd,thd->hgt", rows, key[:visible]) * scale
                lse[token] = scores.logsumexp(-1).flatten()
                out[token] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), value[:visible]).flatten(0, 1)
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

"""torch's scaled_dot_product_attention with the log-sum-exp that it keeps to itself, for one batch of equal q_len."""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: what the log-sum-exp costs, for the ledger
LSE_COST = "SDPA does not return it: a second product of query and keys, in float32, and a logsumexp over it"


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend for one batch; returns out [num_seqs * q_len, num_q_heads, head_dim] and lse without head_dim, f32.

    Shapes
        query         [num_seqs, q_len, num_q_heads, head_dim]
        key, value    [num_seqs, num_kv_heads, num_keys, head_dim], finite everywhere, strided or not
        mask          [num_seqs, q_len, num_keys] bool, True where a token sees a key; None where each sees all
    The heads of a group become rows of one matrix, so that nothing is repeated: group * q_len rows against each KV head.
    """
    rows, group, q_len = _by_kv_head(query, key.shape[1])
    if mask is not None:
        mask = mask[:, None] if q_len == 1 else mask[:, None].repeat(1, 1, group, 1)
    attended = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    scores = float32_scores(rows, key).mul_(scale)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return _by_token(attended, scores.logsumexp(-1), group)


def attend_in_float32(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float,
    softcap: float | None, bias: torch.Tensor | None, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend`, written out, with what SDPA lacks; out is float32.

    Shapes
        bias     [num_seqs, num_q_heads, q_len, num_keys] f32, added to scores after the softcap; None where there is none
        sinks    [num_q_heads] f32, scores of a key without a value that each row sees; None where there are none
    """
    rows, group, q_len = _by_kv_head(query, key.shape[1])
    scores = float32_scores(rows, key).mul_(scale)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias.view(*scores.shape)
    if mask is not None:
        scores.masked_fill_(~mask[:, None].repeat(1, 1, group, 1), -torch.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.view(1, -1, group, 1).expand(-1, -1, -1, q_len).flatten(2))
    weights = scores.sub_(lse[..., None]).exp_()
    attended = torch.stack([torch.bmm(weights[:, head], value[:, head].float()) for head in range(key.shape[1])], dim=1)
    return _by_token(attended, lse, group)


def _by_kv_head(query: torch.Tensor, num_kv_heads: int) -> tuple[torch.Tensor, int, int]:
    """[num_seqs, num_kv_heads, group * q_len, head_dim], the group and q_len."""
    num_seqs, q_len, num_q_heads, head_dim = query.shape
    group = num_q_heads // num_kv_heads
    rows = query.view(num_seqs, q_len, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    return rows.reshape(num_seqs, num_kv_heads, group * q_len, head_dim), group, q_len


def _by_token(attended: torch.Tensor, lse: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The way back, of out and lse: [num_seqs * q_len, num_q_heads, ...]."""
    lse = lse.unflatten(2, (group, -1)).permute(0, 3, 1, 2)
    out = attended.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4)
    return out.reshape(-1, out.shape[2] * group, out.shape[4]), lse.reshape(-1, lse.shape[2] * group)


def float32_scores(rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """rows @ key^T in float32: [num_seqs, num_kv_heads, num_rows, num_keys].

    Head by head, since a product over strided heads would first copy all of them. In 16 bits the scores must not be
    rounded; on a GPU no copy of the keys in float32 is needed for that.
    """
    if rows.is_cuda and rows.dtype != torch.float32:
        heads = [torch.bmm(rows[:, h], key[:, h].mT, out_dtype=torch.float32) for h in range(key.shape[1])]
    else:
        heads = [torch.bmm(rows[:, h].float(), key[:, h].float().mT) for h in range(key.shape[1])]
    return torch.stack(heads, dim=1)

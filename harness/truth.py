"""The truth of a paged-attention problem in float64, and the error that a careful kernel of its dtype makes beside it.

A kernel rounds in three places, and each leaves an error whose size follows from the row's own probabilities:

    probabilities   each is rounded to the dtype before it meets V:  unit * sqrt(sum_t p_t^2 v_t^2)
    out             each element is rounded to the dtype:            unit * |out|
    float32         scores, exponentials and sums:                   2^-24, times the length of the chain of additions

Derived, not drawn: a baseline measured from one emulated kernel is small by luck in some rows, and then a right kernel
that rounds in another order fails. docs/tolerance.md holds the derivation and what was measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from harness.ops.attention import AttentionStep

UNIT_F32 = 2.0**-24
#: rms of the relative error that rounding makes, in units of its largest (half an eps): over mantissas spread as logarithms are
RMS_OF_UNIT = 0.42
#: bytes of float64 temporaries at a time
BUDGET_BYTES = {"cpu": 192 << 20, "cuda": 2 << 30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionTruth:
    """What is right, and how far a careful kernel that computes in `dtype` strays from it. float64 unless said.

    out             [num_tokens, num_q_heads, head_dim]
    lse             [num_tokens, num_q_heads]              natural logarithm; -inf where no key is visible
    baseline_l2     [num_tokens, num_q_heads]              expected L2 of a row's error
    baseline_max    [num_tokens, num_q_heads, head_dim]    expected error of an element from all but the rounding of out
    baseline_lse    [num_tokens, num_q_heads]              expected error of lse
    num_visible     [num_tokens] int64                     keys that the token sees
    """

    out: torch.Tensor
    lse: torch.Tensor
    baseline_l2: torch.Tensor
    baseline_max: torch.Tensor
    baseline_lse: torch.Tensor
    num_visible: torch.Tensor
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """Sequences of equal lengths, KV heads and query tokens that are worked on at once."""

    seqs: list[int]
    heads: slice
    tokens: range
    num_keys: int
    num_hidden: int  # keys that the first token of the part does not see yet, but the last does


def attention_truth(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: AttentionStep, scale: float
) -> AttentionTruth:
    """Compute attention over canonical pools in float64, on the device that holds them.

    Shapes
        query         [num_tokens, num_q_heads, head_dim]
        key, value    [num_blocks, num_kv_heads, block_size, head_dim]; slots past a sequence's end are never looked at
    """
    num_tokens, num_q_heads, _ = query.shape
    rows = {"dtype": torch.float64, "device": query.device}
    truth = AttentionTruth(
        out=torch.zeros(query.shape, **rows),
        lse=torch.full((num_tokens, num_q_heads), -math.inf, **rows),
        baseline_l2=torch.zeros((num_tokens, num_q_heads), **rows),
        baseline_max=torch.zeros(query.shape, **rows),
        baseline_lse=torch.zeros((num_tokens, num_q_heads), **rows),
        num_visible=_num_visible(step).to(query.device),
        dtype=query.dtype,
    )
    for part in _parts(step, key, num_q_heads):
        _attend(truth, part, query, key, value, step, scale)
    return truth


def _num_visible(step: AttentionStep) -> torch.Tensor:
    """Keys that each query token sees: seq_len - q_len + i + 1, at least 0."""
    starts = torch.from_numpy(step.host_query_start_loc).long()
    q_lens = starts.diff()
    last = torch.from_numpy(step.host_seq_lens).long() - starts[1:] + 1
    return (last.repeat_interleave(q_lens) + torch.arange(int(starts[-1]))).clamp(min=0)


def _parts(step: AttentionStep, key: torch.Tensor, num_q_heads: int) -> Iterator[_Part]:
    """Cut the step into parts whose temporaries fit the budget. Tokens that see no key are in none."""
    _, num_kv_heads, _, head_dim = key.shape
    budget = BUDGET_BYTES[key.device.type]
    alike: dict[tuple[int, int], list[int]] = {}
    q_lens = (step.host_query_start_loc[1:] - step.host_query_start_loc[:-1]).tolist()
    for seq, lens in enumerate(zip(step.host_seq_lens.tolist(), q_lens, strict=True)):
        alike.setdefault(lens, []).append(seq)
    for (seq_len, q_len), seqs in alike.items():
        if not seq_len or not q_len:
            continue
        first = max(q_len - seq_len, 0)
        bytes_a_token = 6 * 8 * seq_len * num_q_heads // num_kv_heads  # of one KV head
        tokens_at_once = max(1, min(q_len - first, budget // 2 // bytes_a_token))
        bytes_a_head = 4 * 8 * seq_len * head_dim + tokens_at_once * bytes_a_token
        heads_at_once = max(1, min(num_kv_heads, budget // bytes_a_head))
        seqs_at_once = max(1, budget // (bytes_a_head * num_kv_heads))
        for at in range(0, len(seqs), seqs_at_once):
            for head in range(0, num_kv_heads, heads_at_once):
                for begin in range(first, q_len, tokens_at_once):
                    tokens = range(begin, min(begin + tokens_at_once, q_len))
                    yield _Part(
                        seqs=seqs[at : at + seqs_at_once], heads=slice(head, min(head + heads_at_once, num_kv_heads)),
                        tokens=tokens, num_keys=seq_len - q_len + tokens.stop, num_hidden=len(tokens) - 1,
                    )


def _attend(
    truth: AttentionTruth, part: _Part, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: AttentionStep, scale: float
) -> None:
    """Fill in one part. Dimensions: s sequences, t tokens, h KV heads, g query heads of one, n keys, d elements."""
    _, num_kv_heads, block_size, _ = key.shape
    group = query.shape[1] // num_kv_heads
    starts = torch.as_tensor(step.host_query_start_loc[part.seqs], dtype=torch.long)
    rows = (starts[:, None] + torch.arange(part.tokens.start, part.tokens.stop)).to(query.device)
    q_heads = slice(part.heads.start * group, part.heads.stop * group)
    q = query[:, q_heads][rows].double().unflatten(2, (-1, group)).permute(0, 2, 1, 3, 4)  # s h t g d

    blocks = torch.as_tensor(step.host_block_tables[part.seqs, : -(-part.num_keys // block_size)], dtype=torch.long).to(key.device)
    k, v = (_gather(pool, blocks, part) for pool in (key, value))  # s h n d

    scores = scale * (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4])  # s h t g n
    if part.num_hidden:
        hidden = torch.ones(len(part.tokens), part.num_keys, dtype=torch.bool, device=key.device)
        scores.masked_fill_(hidden.triu_(part.num_keys - part.num_hidden)[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    p = scores.sub_(lse[..., None]).exp_()
    reach = abs(scale) * q.norm(dim=-1) * k.norm(dim=-1).amax(-1)[..., None, None]  # no score is larger
    num_keys = truth.num_visible[rows][:, None, :, None].double()
    out = _times(p, v)
    l2, largest = _baseline(p, v, out, reach, num_keys, truth.dtype)
    base_lse = UNIT_F32 * (1 + lse.abs() + reach + num_keys.sqrt() / 2)

    for name, made in {"out": out, "lse": lse, "baseline_l2": l2, "baseline_max": largest, "baseline_lse": base_lse}.items():
        getattr(truth, name)[:, q_heads][rows] = made.transpose(1, 2).flatten(2, 3)


def _gather(pool: torch.Tensor, blocks: torch.Tensor, part: _Part) -> torch.Tensor:
    """The part's keys or values as [sequences, heads, num_keys, head_dim] float64."""
    return pool[:, part.heads][blocks].transpose(1, 2).flatten(2, 3)[:, :, : part.num_keys].double()


def _times(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[s h t g n] times [s h n d]."""
    return (weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4])


def _baseline(
    p: torch.Tensor, v: torch.Tensor, out: torch.Tensor, reach: torch.Tensor, num_keys: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected error of each row (L2) and of each element (without the rounding of out itself).

    Rounding n probabilities of like weight averages out; where few carry a row it may fall as badly as it can, which
    `luck` (1 where one token carries all, 1/sqrt(n) where n do) says. `drift` is what does not average at all: alike
    probabilities are rounded alike.
    """
    unit = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    drift = (p.to(dtype).double() - p).sum(-1, keepdim=True).abs()
    p2 = p.square_() if p.requires_grad is False else p * p
    v2 = v.square()
    spread2 = _times(p2, v2)  # s h t g d
    weight = p2.flatten(2, 3).mul(v2.sum(-1)[:, :, None]).unflatten(2, p.shape[2:4])
    luck = weight.norm(dim=-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    rounded = unit * (RMS_OF_UNIT + (1 - RMS_OF_UNIT) * luck)
    float32 = UNIT_F32 * (1 + reach + num_keys.sqrt())[..., None]
    from_p2 = (rounded**2 + float32**2) * spread2 + (drift**2 + float32**2) * out**2
    output_unit = torch.finfo(dtype).eps / 2 * RMS_OF_UNIT
    l2 = (from_p2.sum(-1) + output_unit**2 * out.square().sum(-1)).sqrt()
    return l2, from_p2.sqrt()

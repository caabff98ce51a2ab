"""The truth of a paged-attention problem in float64, and the error that a careful kernel of its dtype makes beside it.

A kernel rounds in three places, and each leaves an error whose size follows from the row's own probabilities:

    probabilities   each is rounded to the dtype before it meets V:  unit * sqrt(sum_t p_t^2 v_t^2)
    out             each element is rounded to the dtype:            unit * |out|
    float32         scores, exponentials and sums:                   2^-24, times the length of the chain of additions

A cache in fp8 adds nothing: what is right is computed on what it holds, and fp8 times its scale is exact until it is summed.

Derived, not drawn: a baseline measured with one kernel is small by luck in some rows, and then a right kernel that
rounds in another order fails. docs/tolerance.md holds what was measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from harness.alive import beat
from harness.ops.dtypes import movable

if TYPE_CHECKING:
    from harness.ops.attention import AttentionStep

UNIT_F32 = 2.0**-24
#: Weights lighter than this count as heavy as this: float32 holds no smaller square, and kernels' own sums forget them.
LIGHTEST = 2.0**-60
FP8 = torch.float8_e4m3fn
#: what an entry may declare to round to fp8 (`Impl.quantises`)
TO_FP8 = frozenset({"query", "probabilities"})
#: and what else it may declare that changes the baseline: softcap's tanh by the hardware's approximation
OF_TRUTH = TO_FP8 | {"tanh"}
UNIT_TANH = 2.0**-11  # of the largest relative error of tanh.approx.f32, PTX ISA
#: rms of the relative error that rounding makes, in units of its largest (half an eps): over mantissas spread as logarithms are
RMS_OF_UNIT = 0.42
#: bytes of float64 temporaries at a time
BUDGET_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}


#: what AttentionTruth holds for each query head
BY_HEAD = ("out", "lse", "baseline_l2", "baseline_max", "baseline_lse", "baseline_normaliser")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionTruth:
    """What is right, and how far a careful kernel that computes in `dtype` strays from it. float64 unless said.

    out                    [num_tokens, num_q_heads, head_dim]
    lse                    [num_tokens, num_q_heads]              natural logarithm; without a visible key -inf, or the sink
    baseline_l2            [num_tokens, num_q_heads]              L2 of a row's error, the tail of its distribution included
    baseline_max           [num_tokens, num_q_heads, head_dim]    expected error of an element, without the rounding of out
    baseline_lse           [num_tokens, num_q_heads]              expected error of lse
    baseline_normaliser    [num_tokens, num_q_heads]              what it errs more where rounded probabilities are summed
    num_visible            [num_tokens] int64                     keys that the token sees
    query_start_loc        (num_seqs + 1 numbers)                 query tokens before each sequence, on the host
    quantises              (names of OF_TRUTH)                    what the baseline rounds more than a careful kernel
    """

    out: torch.Tensor
    lse: torch.Tensor
    baseline_l2: torch.Tensor
    baseline_max: torch.Tensor
    baseline_lse: torch.Tensor
    baseline_normaliser: torch.Tensor
    num_visible: torch.Tensor
    query_start_loc: tuple[int, ...]
    dtype: torch.dtype
    quantises: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    step: AttentionStep
    scale: float
    window: int | None
    softcap: float | None
    named: Mapping[str, torch.Tensor]

    def of_heads(self, name: str, heads: slice) -> torch.Tensor | None:
        """What is named, in float64, of these heads; a single number stands for all. None where the problem has none."""
        if name not in self.named:
            return None
        values = self.named[name].double()
        return values if len(values) == 1 else values[heads]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """Sequences of equal lengths, KV heads and query tokens that are worked on at once."""

    seqs: list[int]
    heads: slice
    tokens: range
    first_key: int  # that any of them sees
    end_key: int


def attention_truth(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: AttentionStep,
    scale: float,
    quantises: frozenset[str] = frozenset(),
    *,
    window: int | None = None,
    softcap: float | None = None,
    named: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> AttentionTruth:
    """Compute attention over canonical pools in float64, on the device that holds them.

    Shapes
        query         [num_tokens, num_q_heads, head_dim]
        key, value    [num_blocks, num_kv_heads, block_size, head_dim]; slots that no row sees are never looked at
        named         alibi_slopes, sinks [num_q_heads]; k_scale, v_scale [1] or [num_kv_heads], where the problem has them

    The baseline rounds what `quantises` names (of OF_TRUTH), to fp8 e4m3 or by 11 bits; what is right stays the same.
    """
    zeros = torch.zeros_like(query, dtype=torch.float64)
    no_keys = zeros[..., 0] + (named["sinks"].double() if "sinks" in named else -math.inf)
    truth = AttentionTruth(
        out=zeros,
        lse=no_keys,
        baseline_l2=zeros[..., 0].clone(),
        baseline_max=zeros.clone(),
        baseline_lse=UNIT_F32 * no_keys.abs().nan_to_num(posinf=0.0),
        baseline_normaliser=zeros[..., 0].clone(),
        num_visible=_num_visible(step, window).to(query.device),
        query_start_loc=tuple(step.host_query_start_loc.tolist()),
        dtype=query.dtype,
        quantises=quantises & OF_TRUTH,
    )
    problem = _Problem(
        query=query, key=key, value=value, step=step, scale=scale, window=window, softcap=softcap, named=named
    )
    for part in _parts(problem):
        beat()
        _attend(truth, part, problem)
    return truth


def _num_visible(step: AttentionStep, window: int | None) -> torch.Tensor:
    """Keys that each query token sees: seq_len - q_len + i + 1, at least 0, at most a window."""
    starts = torch.from_numpy(step.host_query_start_loc).long()
    q_lens = starts.diff()
    last = torch.from_numpy(step.host_seq_lens).long() - starts[1:] + 1
    return (last.repeat_interleave(q_lens) + torch.arange(int(starts[-1]))).clamp(min=0, max=window)


def _parts(problem: _Problem) -> Iterator[_Part]:
    """Cut the step into parts whose temporaries fit the budget. Tokens that see no key are in none."""
    step, num_q_heads = problem.step, problem.query.shape[1]
    _, num_kv_heads, _, head_dim = problem.key.shape
    budget = BUDGET_BYTES[problem.key.device.type]
    alike: dict[tuple[int, int], list[int]] = {}
    q_lens = (step.host_query_start_loc[1:] - step.host_query_start_loc[:-1]).tolist()
    for seq, lens in enumerate(zip(step.host_seq_lens.tolist(), q_lens, strict=True)):
        alike.setdefault(lens, []).append(seq)
    for (seq_len, q_len), seqs in alike.items():
        if not seq_len or not q_len:
            continue
        first = max(q_len - seq_len, 0)
        window = problem.window or seq_len
        most_keys = min(seq_len, window + q_len - first - 1)
        bytes_a_token = 6 * 8 * most_keys * num_q_heads // num_kv_heads  # of one KV head
        tokens_at_once = max(1, min(q_len - first, budget // 2 // bytes_a_token))
        most_keys = min(seq_len, window + tokens_at_once - 1)
        bytes_a_head = 4 * 8 * most_keys * head_dim + tokens_at_once * bytes_a_token
        heads_at_once = max(1, min(num_kv_heads, budget // bytes_a_head))
        seqs_at_once = max(1, budget // (bytes_a_head * num_kv_heads))
        for at in range(0, len(seqs), seqs_at_once):
            for head in range(0, num_kv_heads, heads_at_once):
                for begin in range(first, q_len, tokens_at_once):
                    tokens = range(begin, min(begin + tokens_at_once, q_len))
                    yield _Part(
                        seqs=seqs[at : at + seqs_at_once], heads=slice(head, min(head + heads_at_once, num_kv_heads)),
                        tokens=tokens, first_key=max(seq_len - q_len + begin + 1 - window, 0),
                        end_key=seq_len - q_len + tokens.stop,
                    )


def _attend(truth: AttentionTruth, part: _Part, problem: _Problem) -> None:
    """Fill in one part. Dimensions: s sequences, h KV heads, t tokens, g query heads of one KV head, n keys, d elements."""
    step, device = problem.step, problem.query.device
    group = problem.query.shape[1] // problem.key.shape[1]
    q_heads = slice(part.heads.start * group, part.heads.stop * group)
    starts = torch.as_tensor(step.host_query_start_loc[part.seqs], dtype=torch.long)
    rows = (starts[:, None] + torch.arange(part.tokens.start, part.tokens.stop)).to(device)
    size = problem.key.shape[2]
    table = step.host_block_tables[part.seqs, part.first_key // size : -(-part.end_key // size)]
    blocks = torch.as_tensor(table, dtype=torch.long).to(device)

    q = problem.query[:, q_heads][rows].double()
    q = q.reshape(*rows.shape, -1, group, q.shape[-1]).transpose(1, 2)  # s h t g d
    k, v = (  # s h n d
        _gather(pool, blocks, part, problem.of_heads(scale, part.heads))
        for pool, scale in ((problem.key, "k_scale"), (problem.value, "v_scale"))
    )
    end = torch.arange(part.end_key - len(part.tokens) + 1, part.end_key + 1, device=device)  # of the keys that a token sees
    ahead = torch.arange(part.first_key, part.end_key, device=device) - (end[:, None] - 1)  # t n
    hidden = ahead > 0 if problem.window is None else (ahead > 0) | (ahead <= -problem.window)
    scores = _of_functions(_times(q, k.mT).mul_(problem.scale), ahead, problem, q_heads)  # s h t g n
    if len(part.tokens) > 1:  # one sees all the keys of its part
        scores.masked_fill_(hidden[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    sinks = problem.of_heads("sinks", q_heads)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.view(-1, 1, group))
    p = scores.sub_(lse[..., None]).exp_()
    out = _times(p, v)

    norms = k.norm(dim=-1)
    if problem.window is None:
        longest = norms.cummax(-1).values[..., end - 1]  # among the keys that a token sees: s h t
    else:
        longest = norms[:, :, None].masked_fill(hidden, 0.0).amax(-1)
    seen = truth.num_visible[rows][:, None].expand(-1, k.shape[1], -1)  # s h t
    reach = abs(problem.scale) * q.norm(dim=-1) * longest[..., None]  # no score is larger
    of_score, of_sum = _arithmetic(p, reach, seen[..., None], q.shape[-1], truth)
    of_score += _of_score_functions(reach, problem)
    if "tanh" in truth.quantises and problem.softcap is not None:
        of_score += UNIT_TANH * reach.clamp(max=problem.softcap)
    l2, largest, normaliser = _baseline(p, v, out, (of_score + of_sum)[..., None], truth)
    of_lse = of_score + of_sum / 3 + UNIT_F32 * lse.abs()
    made = {
        "out": out, "lse": lse, "baseline_l2": l2, "baseline_max": largest,
        "baseline_lse": of_lse, "baseline_normaliser": normaliser,
    }
    for name, tensor in made.items():
        getattr(truth, name)[:, q_heads][rows] = tensor.transpose(1, 2).flatten(2, 3)


def _of_functions(scores: torch.Tensor, ahead: torch.Tensor, problem: _Problem, q_heads: slice) -> torch.Tensor:
    """Scores s h t g n after softcap and then ALiBi, in place; `ahead` t n is how far a key lies ahead of the token."""
    if problem.softcap is not None:
        scores.div_(problem.softcap).tanh_().mul_(problem.softcap)
    slopes = problem.of_heads("alibi_slopes", q_heads)
    if slopes is not None:
        scores += slopes.view(-1, 1, scores.shape[3], 1) * ahead[:, None]
    return scores


def _of_score_functions(reach: torch.Tensor, problem: _Problem) -> torch.Tensor | float:
    """What a score errs more by softcap, whose tanh may come of an exponential and a quotient, and by ALiBi's products, of keys
    that a row does not forget: their biases are at most the spread of its scores and the 17 that a float32 weight spans."""
    of_cap = 4 * UNIT_F32 * problem.softcap if problem.softcap is not None else 0.0
    return of_cap + (2 * UNIT_F32 * (2 * reach + 17) if "alibi_slopes" in problem.named else 0.0)


def _arithmetic(
    p: torch.Tensor, reach: torch.Tensor, seen: torch.Tensor, head_dim: int, truth: AttentionTruth
) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative errors of a probability from its score, and of a sum over tokens one by one, in float32."""
    light = p.where(p < 4 * UNIT_F32, 0.0).sum(-1) / 4  # a running sum may lose for good what is so light
    # Tensor cores cut off where they add (V100 to A100: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor
    # cores", PeerJ CS 7:e330, 2021), on an H100 once for 16 products (Khattak, Mikaitis, "Accurate models of NVIDIA tensor
    # cores", arXiv 2512.07004): each of head_dim / 16 sums loses up to 2 units, and they add up. LSE is allowed 4 times this.
    # Products of one sign, added one by one and rounded, err by 0.24 sqrt(head_dim) units of their sum.
    added_up = head_dim**0.5 / 4 if truth.dtype == torch.float32 else max(head_dim**0.5 / 4, head_dim / 32)
    of_score = UNIT_F32 * (2 + reach * added_up) + light
    if "query" in truth.quantises:  # moves all scores of a row together: nothing averages it out
        of_score += torch.finfo(FP8).eps / 2 * reach / head_dim**0.5
    return of_score, UNIT_F32 * seen.double().sqrt()  # a random walk


def _gather(pool: torch.Tensor, blocks: torch.Tensor, part: _Part, scale: torch.Tensor | None) -> torch.Tensor:
    """The part's keys or values as [sequences, heads, num_keys, head_dim] float64, times the scale of each head."""
    begin = part.first_key % pool.shape[2]
    tokens = movable(pool)[:, part.heads][blocks].transpose(1, 2).flatten(2, 3)
    wide = tokens[:, :, begin : begin + part.end_key - part.first_key].view(pool.dtype).double()
    return wide if scale is None else wide.mul_(scale[:, None, None])


def _times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """[s h t g a] times [s h a b]."""
    return (rows.flatten(2, 3) @ matrix).view(*rows.shape[:-1], matrix.shape[-1])


def _baseline(
    p: torch.Tensor, v: torch.Tensor, out: torch.Tensor, arithmetic: torch.Tensor, truth: AttentionTruth
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expected error of each row (L2), of each element (without the rounding of out itself), and of a sum of rounded p.

    Rounding n probabilities of like weight averages out; where few carry a row it may fall as badly as it can, which
    `luck` (1 where one token carries all, 1/sqrt(n) where n do) says. `drift` is what does not average at all: alike
    probabilities are rounded alike. Subnormals are rounded as coarsely as the smallest normal number, and evenly, which
    is worse by about sqrt(2).
    """
    info = torch.finfo(FP8 if "probabilities" in truth.quantises else truth.dtype)
    unit = info.eps / 2 if info.bits < 32 else 0.0
    most = p.amax(-1, keepdim=True)
    coarsest = (1.4 * info.smallest_normal * (most if info.bits < 16 else torch.ones_like(most))).clamp(min=LIGHTEST)
    v2 = v.float().square()  # errors of errors: float32 will do, and costs half
    weight = v2.sum(-1).double()[:, :, None, None]
    p2 = p.where(p == 0, p.maximum(coarsest)).square()
    spread2 = _times(p2.float(), v2).double()  # s h t g d
    found = [_rounding(x, info, weight) for x in (p / most, p)]
    drift = torch.maximum(found[0][0] * most, found[1][0])
    share2 = torch.maximum(found[0][1], found[1][1]).maximum((unit * _tail(p2 * weight)) ** 2)
    # What a score errs moves all elements of its token together: where few tokens carry a row, no dimension averages it out.
    together = arithmetic * (1 + 3 * _luck(p2 * weight))
    before2 = (share2 + together**2) * spread2 + (drift**2 + together**2) * out**2
    last = torch.finfo(truth.dtype)
    total2 = before2 + (last.eps / 2 * RMS_OF_UNIT * out.abs().clamp(min=last.smallest_normal)) ** 2
    l2 = total2.sum(-1).sqrt() * (1 + 4 * _luck(total2)[..., 0])
    sums = drift.maximum(unit * _tail(p2) * p2.sum(-1, keepdim=True).sqrt())
    return l2, before2.sqrt(), 2 * sums[..., 0]


def _rounding(p: torch.Tensor, info: torch.finfo, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What rounding p does: |sum of errors|, and their mean square over that of p, weighted. Subnormals are left aside."""
    lift = 2.0**15 if info.bits > 8 else 256.0  # into the dtype's normal numbers, exactly
    error = (p * lift).to(getattr(torch, info.dtype)).double().div_(lift).sub_(p)
    share2 = (error.square() * weight).sum(-1, keepdim=True) / (p.square() * weight).sum(-1, keepdim=True).clamp(min=1e-300)
    return error.sum(-1, keepdim=True).abs(), share2


def _luck(squares: torch.Tensor) -> torch.Tensor:
    largest: torch.Tensor = torch.linalg.vector_norm(squares, dim=-1, keepdim=True)
    return largest / squares.sum(-1, keepdim=True).clamp(min=1e-300)


def _tail(squares: torch.Tensor) -> torch.Tensor:
    return RMS_OF_UNIT + (1 - RMS_OF_UNIT) * _luck(squares)

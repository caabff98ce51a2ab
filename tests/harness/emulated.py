"""Emulated kernels on problems without blocks: right ones in many orders, wrong ones by one fault each.

    python -m tests.harness.emulated        the tables of docs/tolerance.md
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from harness.check import judge_attention
from harness.ops.attention import AttentionStep
from harness.truth import attention_truth

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
#: sequences, KV heads, query heads of each, elements
SHAPE = (4, 2, 4, 64)


@dataclass(frozen=True)
class Problem:
    """query [seqs, kv_heads, group, dim]; key, value [seqs, kv_heads, tokens, dim]: one query token a sequence, no blocks."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float

    @property
    def scores(self) -> torch.Tensor:
        return self.scale * (self.query.float() @ self.key.float().mT)

    @property
    def num_keys(self) -> int:
        return self.key.shape[2]

    def part(self, begin: int, end: int) -> Problem:
        return replace(self, key=self.key[:, :, begin:end], value=self.value[:, :, begin:end])

    def truth(self, quantises=frozenset()):
        """One block holds a whole sequence; the slot past its end is NaN."""
        key, value = (torch.nn.functional.pad(pool, (0, 0, 0, 1), value=math.nan) for pool in (self.key, self.value))
        num_seqs = len(self.query)
        lens = np.full(num_seqs, self.num_keys, dtype=np.int32)
        tables = np.arange(num_seqs, dtype=np.int32)[:, None]
        starts = np.arange(num_seqs + 1, dtype=np.int32)
        step = AttentionStep(
            block_tables=torch.from_numpy(tables), seq_lens=torch.from_numpy(lens), query_start_loc=torch.from_numpy(starts),
            host_block_tables=tables, host_seq_lens=lens, host_query_start_loc=starts,
        )
        return attention_truth(self.query.flatten(1, 2), key, value, step, self.scale, quantises)


def make_problem(num_keys, dtype="bf16", needle=None, seed=0, shape=SHAPE):
    """N(0,1); `needle` is a position whose key holds most of every query's weight."""
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(shape, generator=rng)
    key, value = torch.randn(2, *shape[:2], num_keys, shape[-1], generator=rng)
    if needle is not None:
        key[:, :, needle] = needle_for(query, num_keys)
    query, key, value = (tensor.to(DTYPES[dtype]) for tensor in (query, key, value))
    return Problem(query, key, value, shape[-1] ** -0.5)


def needle_for(query, num_keys):
    """A key that scores so high with every query of its group that it holds about 0.99 of the weight."""
    score = math.log(100 * num_keys)
    return (score * query.shape[-1] ** 0.5 * query / query.square().sum(-1, keepdim=True)).sum(2)


def running(problem, block=64, round_p=True, sum_rounded=False, scores=None):
    """Online softmax over blocks in float32; probabilities rounded to the dtype: (numerator, max, sum)."""
    scores, value = problem.scores if scores is None else scores, problem.value.float()
    largest = torch.full(scores.shape[:-1], -math.inf)
    total, numerator = torch.zeros_like(largest), torch.zeros(problem.query.shape)
    for begin in range(0, scores.shape[-1], block):
        piece = scores[..., begin : begin + block]
        higher = torch.maximum(largest, piece.amax(-1))
        keep, p = torch.exp(largest - higher), torch.exp(piece - higher[..., None])
        rounded = p.to(problem.value.dtype).float() if round_p else p
        total = total * keep + (rounded if sum_rounded else p).sum(-1)
        numerator = numerator * keep[..., None] + rounded @ value[:, :, begin : begin + block]
        largest = higher
    return numerator, largest, total


def online(problem, **options):
    numerator, largest, total = running(problem, **options)
    return numerator / total[..., None], largest + total.log()


def normalised(problem):
    scores = problem.scores
    return scores.softmax(-1).to(problem.value.dtype).float() @ problem.value.float(), scores.logsumexp(-1)


def truncated(problem, products=16):
    """Scores as tensor cores make them: so many products are added up at a time, and each sum is cut off to float32."""
    query, key = problem.query.double(), problem.key.double()
    total = torch.zeros(*query.shape[:-1], problem.num_keys, dtype=torch.float64)
    for begin in range(0, query.shape[-1], products):
        part = slice(begin, begin + products)
        total += query[..., part] @ key[..., part].mT
        near = total.float()
        total = torch.where(near.double().abs() > total.abs(), near.nextafter(torch.zeros(())), near).double()
    return problem.scale * total.float()


def by_exp2(problem, block=64):
    """log2(e) folded into the scale, and an exponential that is off by up to two units in the last place."""
    chance = torch.Generator().manual_seed(3)
    scores = problem.scale * math.log2(math.e) * (problem.query.float() @ problem.key.float().mT)
    largest = scores.amax(-1, keepdim=True)
    p = torch.exp2(scores - largest)
    p *= 1 + 2.0**-22 * (2 * torch.rand(p.shape, generator=chance) - 1)
    rounded = p.to(problem.value.dtype).float()
    total, numerator = torch.zeros_like(largest), torch.zeros(problem.query.shape)
    for begin in range(0, problem.num_keys, block):
        part = slice(begin, begin + block)
        total += p[..., part].sum(-1, keepdim=True)
        numerator += rounded[..., part] @ problem.value[:, :, part].float()
    return numerator / total, (largest * math.log(2) + total.log())[..., 0]


def split(problem, num_splits, rescale=True, round_partials=False):
    """Parts of the sequence merged by their maxima; `rescale` false is a merge that forgets them."""
    size = -(-problem.num_keys // num_splits)
    parts = [running(problem.part(begin, begin + size)) for begin in range(0, problem.num_keys, size)]
    numerator, largest, total = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    if round_partials:
        numerator = (numerator / total[..., None]).to(problem.value.dtype).float() * total[..., None]
    weight = torch.exp(largest - largest.amax(0)) if rescale else torch.ones_like(largest)
    whole = (weight * total).sum(0)
    out = (weight[..., None] * numerator).sum(0) / whole[..., None]
    return out, largest.amax(0) + (torch.exp(largest - largest.amax(0)) * total).sum(0).log()


def judge(problem, answer, quantises=frozenset(), truth=None):
    out, lse = answer
    truth = truth or problem.truth(quantises & {"query", "probabilities"})
    return judge_attention(out.flatten(1, 2).to(problem.value.dtype), lse.flatten(1, 2).float(), truth, quantises)


RIGHT: dict[str, Callable] = {
    "tokens in order": lambda p: online(p, block=1, round_p=False),
    "blocks of 16": lambda p: online(p, block=16),
    "blocks of 128": lambda p: online(p, block=128),
    "float32 probabilities": lambda p: online(p, round_p=False),
    "normalised before V": normalised,
    "2 splits": lambda p: split(p, 2),
    "7 splits": lambda p: split(p, 7),
    "32 splits": lambda p: split(p, 32),
    "by exp2": by_exp2,
    "scores of tensor cores": lambda p: online(p, scores=None if p.key.dtype == torch.float32 else truncated(p)),
}


def dropped(begin, end):
    def kernel(problem):
        begin_, end_ = range(problem.num_keys)[begin], problem.num_keys + end if end < 0 else end
        kept = [*range(begin_), *range(end_, problem.num_keys)]
        return online(replace(problem, key=problem.key[:, :, kept], value=problem.value[:, :, kept]))

    return kernel


def one_more(decoy):
    """Reads the slot past the end, in which lies noise, or a needle put there to be noticed."""

    def kernel(problem):
        noise = torch.randn(2, *problem.key.shape[:2], 1, problem.key.shape[-1], generator=torch.Generator().manual_seed(1))
        key = needle_for(problem.query.float(), problem.num_keys)[:, :, None] if decoy else noise[0]
        key, value = (new.to(problem.key.dtype) for new in (key, noise[1]))
        return online(replace(problem, key=torch.cat([problem.key, key], 2), value=torch.cat([problem.value, value], 2)))

    return kernel


def averaged_blocks(problem):
    parts = [online(problem.part(begin, begin + 64)) for begin in range(0, problem.num_keys, 64)]
    return torch.stack([out for out, _ in parts]).mean(0), online(problem)[1]


def no_maximum(problem):
    p = problem.scores.exp().to(torch.float16).float()
    return p @ problem.value.float() / p.sum(-1, keepdim=True), p.sum(-1).log()


def low_precision_sum(problem):
    p, out = problem.scores.softmax(-1), torch.zeros(problem.query.shape, dtype=torch.bfloat16)
    for t in range(problem.num_keys):
        out += (p[..., t, None] * problem.value[:, :, None, t]).to(torch.bfloat16)
    return out.float(), problem.scores.logsumexp(-1)


def transposed_heads(problem):
    """Query head h reads KV head h % num_kv_heads."""
    query = problem.query.flatten(1, 2).unflatten(1, problem.query.shape[2:0:-1]).transpose(1, 2)
    out, lse = online(replace(problem, query=query))
    return out.transpose(1, 2).reshape(problem.query.shape), lse.transpose(1, 2).reshape(problem.query.shape[:3])


def stale_value(problem):
    value = problem.value.clone()
    value[:, :, -1] = value[:, :, 0]
    return online(replace(problem, value=value))


def exchanged(problem):
    """V of two neighbours in the middle."""
    order, middle = torch.arange(problem.num_keys), problem.num_keys // 2
    order[middle - 1], order[middle] = middle, middle - 1
    return online(replace(problem, value=problem.value[:, :, order]))


def with_lse(change):
    return lambda problem: (online(problem)[0], change(problem, online(problem)[1]))


WRONG: dict[str, Callable] = {
    "length - 1": dropped(-1, 10**6),
    "length + 1": one_more(decoy=False),
    "length + 1 onto a decoy": one_more(decoy=True),
    "first token": dropped(0, 1),
    "16 tokens in the middle": dropped(128, 144),
    "first block": dropped(0, 16),
    "scale 2% off": lambda p: online(replace(p, scale=1.02 * p.scale)),
    "scale 0.5% off": lambda p: online(replace(p, scale=1.005 * p.scale)),
    "scale 0.1% off": lambda p: online(replace(p, scale=1.001 * p.scale)),
    "base-2 LSE": with_lse(lambda p, lse: lse / math.log(2)),
    "LSE without the maximum": with_lse(lambda p, lse: lse - p.scores.amax(-1)),
    "blocks averaged": averaged_blocks,
    "partials merged without rescale": lambda p: split(p, 3, rescale=False),
    "no maximum subtracted": no_maximum,
    "bf16 sum": low_precision_sum,
    "wrong GQA map": transposed_heads,
    "K of another head": lambda p: online(replace(p, key=p.key.flip(1))),
    "V of another head": lambda p: online(replace(p, value=p.value.flip(1))),
    "stale V in the last slot": stale_value,
    "V of two neighbours exchanged": exchanged,
}
#: roundings to the dtype, so none in float32
ROUNDED: dict[str, Callable] = {
    "query scaled, then rounded": lambda p: online(replace(p, query=(p.scale * p.query).to(p.query.dtype), scale=1.0)),
    "scores rounded": lambda p: online(p, scores=p.scores.to(p.query.dtype).float()),
}


def shares(kernel, problem, truth):
    """The share of rows that fail, and by their outputs alone."""
    out, lse = kernel(problem)
    found = (judge(problem, (out, lse), truth=truth), judge(problem, (out, truth.lse.unflatten(1, lse.shape[1:])), truth=truth))
    return tuple(verdict.num_failed / verdict.num_rows for verdict in found)


def print_wrong():
    """bf16, 8 sequences of 1024 tokens, 32 query and 8 KV heads of 128: share of rows that fail (by output alone)."""
    print(print_wrong.__doc__)
    problems = [make_problem(1024, needle=needle, shape=(8, 8, 4, 128)) for needle in (None, -1, 0, 512)]
    truths = [problem.truth() for problem in problems]
    print("| fault | plain | needle last | needle first | needle in the middle |\n|---|---|---|---|---|")
    for name, kernel in {**WRONG, **ROUNDED}.items():
        cells = [shares(kernel, problem, truth) for problem, truth in zip(problems, truths, strict=True)]
        print("|", name, "|", " | ".join(f"{all_:.2f} ({of_out:.2f})" for all_, of_out in cells), "|", flush=True)


def print_long():
    """Plain inputs: 4096 tokens of 4 sequences and 32768 of 2, 16 query and 4 KV heads of 128."""
    print(print_long.__doc__)
    for num_keys, num_seqs in ((4096, 4), (32768, 2)):
        for dtype in ("bf16", "f16"):
            problem = make_problem(num_keys, dtype, shape=(num_seqs, 4, 4, 128))
            truth = problem.truth()
            for name in ("length - 1", "length + 1", "stale V in the last slot", "16 tokens in the middle"):
                print(num_keys, dtype, name, "{:.2f} ({:.2f})".format(*shares(WRONG[name], problem, truth)), flush=True)


def print_right():
    """Right kernels: the largest error as a share of what is allowed, L2 / element / LSE."""
    print(print_right.__doc__)
    worst: dict[tuple[str, str], list[float]] = {}
    num_rows = 0
    for head_dim in (64, 128, 256):
        for num_keys in (1, 2, 3, 5, 15, 16, 17, 64, 200, 1024, 4096):
            for dtype in DTYPES:
                for needle in (None, 0, num_keys // 2, -1):
                    problem = make_problem(num_keys, dtype, needle, seed=num_keys, shape=(4, 2, 4, head_dim))
                    truth = problem.truth()
                    for name, kernel in RIGHT.items():
                        if name == "tokens in order" and num_keys > 1024:
                            continue
                        verdict = judge(problem, kernel(problem), truth=truth)
                        num_rows += verdict.num_rows
                        cell = worst.setdefault((name, dtype), [0.0, 0.0, 0.0])
                        cell[:] = map(max, cell, (verdict.ratios[test] for test in ("l2", "max", "lse")))
    print(f"{num_rows} row checks\n| kernel |", " | ".join(DTYPES), "|\n|---|---|---|---|")
    for name in RIGHT:
        print("|", name, "|", " | ".join("{:.2f} / {:.2f} / {:.2f}".format(*worst[name, dtype]) for dtype in DTYPES), "|")


if __name__ == "__main__":
    print_wrong()
    print_long()
    print_right()

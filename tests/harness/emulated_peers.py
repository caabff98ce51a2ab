"""FlashInfer's kernels by what they round and where, as their sources have it (0.6.12): the rest is exact or float32.

    python -m tests.harness.emulated_peers        the table of docs/tolerance.md
"""

from __future__ import annotations

import torch

from harness.check import judge_attention
from impls.peers import PEERS
from tests.harness.emulated import Problem, make_problem, running

TILE = 64  # tokens of a warp of XQA; four make an iteration of its CTA
DECLARED = {impl.name: impl.quantises for impl in PEERS}


def xqa(problem, num_ctas):
    """TensorRT-LLM's XQA (csrc/xqa/mha.cu): the output of `num_ctas` a sequence and KV head, iterations dealt in turn."""
    found = [_xqa_cta(problem, cta, num_ctas) for cta in range(num_ctas) if cta * 4 * TILE < problem.num_keys]
    largest, total, out = (torch.stack(tensors) for tensors in zip(*found, strict=True))
    if num_ctas == 1:
        return out[0]
    weight = total * torch.exp(largest - largest.amax(0))
    groups = _num_groups(problem)  # each sums the parts of some CTAs
    sums = [(weight[..., None] * out)[group::groups].sum(0) / weight.sum(0)[..., None] for group in range(groups)]
    return _sum_in_dtype(sums, problem)


def _xqa_cta(problem, cta, num_ctas):
    """One CTA's (max, sum, output): groups of warps share its tiles, and a tile knows the maximum of the iteration before."""
    scores, value, groups = problem.scores, problem.value.float(), _num_groups(problem)
    states = [running(problem.part(0, 0)) for _ in range(groups)]
    hints = [states[0][1]] * 4
    for begin in range(cta * 4 * TILE, problem.num_keys, num_ctas * 4 * TILE):
        for warp in range(min(4, -(-(problem.num_keys - begin) // TILE))):
            tokens = slice(begin + warp * TILE, begin + (warp + 1) * TILE)
            numerator, largest, total = states[warp % groups]
            own = torch.maximum(hints[warp], scores[..., tokens].amax(-1))
            p = _rounded(torch.exp(scores[..., tokens] - own[..., None]), problem)
            higher = torch.maximum(largest, own)
            keep, scale = torch.exp(largest - higher), torch.exp(own - higher)
            scaled = _rounded(p * _rounded(scale, problem)[..., None], problem)
            numerator = numerator * keep[..., None] + scaled @ value[:, :, tokens]
            states[warp % groups] = numerator, higher, total * keep + p.sum(-1) * scale
            hints[warp] = higher
    numerator, largest, total = (torch.stack(tensors) for tensors in zip(*states, strict=True))
    weight = torch.exp(largest - largest.amax(0))
    whole = (weight * total).sum(0)
    out = _sum_in_dtype(weight[..., None] * numerator / whole[..., None], problem)
    return largest.amax(0), whole, out


def merged(problem, num_parts, ways):
    """Parts by tensor cores, merged by `ways` threads an element, then among those (attention/cascade.cuh, persistent.cuh)."""
    size = -(-problem.num_keys // num_parts)
    parts = [running(problem.part(begin, begin + size), sum_rounded=True) for begin in range(0, problem.num_keys, size)]
    numerator, largest, total = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    weight = (total * torch.exp(largest - largest.amax(0)))[..., None]
    out = _rounded(numerator / total[..., None], problem)
    whole = torch.zeros_like(out[0])
    for way in range(min(ways, len(parts))):
        own = weight[way::ways].sum(0)
        whole += own * _rounded((weight * out)[way::ways].sum(0) / own, problem)
    return whole / weight.sum(0)


def cascaded(problem, ends, num_parts, ways=8):
    """Levels of keys that end at `ends`, each of so many parts; their outputs are merged one after the other (cascade.cuh)."""
    levels = [problem.part(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    outs = [_rounded(merged(level, num_parts, ways), problem) for level in levels]
    *logs, lse = [level.scores.logsumexp(-1) for level in levels]
    out = outs[-1]
    for other, log in zip(outs, logs, strict=False):
        whole = torch.logaddexp(lse, log)
        out = _rounded((lse - whole).exp()[..., None] * out + (log - whole).exp()[..., None] * other, problem)
        lse = whole
    return out


def _num_groups(problem):
    """XQA's four warps stand side by side over 64 elements each, and in groups along the tokens where there are fewer."""
    return max(1, 256 // problem.query.shape[-1])


def _sum_in_dtype(parts, problem):
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = _rounded(total + _rounded(part, problem), problem)
    return total


def _rounded(tensor, problem):
    return tensor.to(problem.value.dtype).float()


#: by peer: what it is called here, on how many keys, and the kernel as that shape makes it on 132 multiprocessors
SHAPES = {
    "an eighth of facts.e": ("xqa", 2048, (1, 8, 4, 128), lambda p: xqa(p, 2)),
    "facts.j": ("xqa", 2048, (1, 8, 4, 128), lambda p: xqa(p, 8)),
    "an eighth of facts.k": ("xqa", 512, (2, 8, 4, 128), lambda p: xqa(p, 1)),
    "an eighth of facts.i": ("xqa", 8192, (4, 2, 16, 128), lambda p: xqa(p, 2)),
    "four groups of warps": ("xqa", 2048, (2, 8, 4, 64), lambda p: xqa(p, 2)),
    "an eighth of facts.i, 4 parts": ("batch", 8192, (4, 2, 16, 128), lambda p: merged(p, 4, 2)),
    "32 parts": ("batch", 8192, (1, 8, 4, 128), lambda p: merged(p, 32, 2)),
    "two levels of 16 parts": ("cascade.fa2", 8192, (1, 8, 4, 128), lambda p: cascaded(p, [8000, 8192], 16)),
    "three levels of 16 parts": ("cascade.fa2", 8192, (1, 2, 16, 128), lambda p: cascaded(p, [2730, 5460, 8192], 16)),
    "32 parts in eight ways": ("tensor_core", 8192, (1, 8, 4, 128), lambda p: merged(p, 32, 8)),
}


def judge_output(problem: Problem, out: torch.Tensor, quantises=frozenset(), truth=None):
    """By the output alone, as an entry that gives no log-sum-exp is judged."""
    return judge_attention(out.flatten(1, 2).to(problem.value.dtype), None, truth or problem.truth(), quantises)


def print_declared():
    """Largest error as a share of what is allowed, L2 / element, plain inputs and a needle at the end; every eighth whole."""
    print(print_declared.__doc__)
    for name, (peer, num_keys, shape, kernel) in SHAPES.items():
        shape = (8 * shape[0], *shape[1:]) if "an eighth" in name else shape
        for dtype in ("bf16", "f16"):
            cells = []
            for needle in (None, -1):
                problem = make_problem(num_keys, dtype, needle, seed=1, shape=shape)
                verdict = judge_output(problem, kernel(problem), DECLARED[f"peer.flashinfer.{peer}"])
                cells.append("{l2:.2f} / {max:.2f}".format(**verdict.ratios))
            print("|", peer, "|", name, "|", dtype, "|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    print_declared()

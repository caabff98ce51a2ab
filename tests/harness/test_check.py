"""The checker is checked: right kernels pass, wrong ones fail, and each fault is called by its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from harness.check import fill_unwritten, judge_attention, judge_exact
from harness.ops.attention import AttentionStep
from harness.truth import attention_truth

F32 = torch.float32
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
NUM_SEQS, NUM_KV_HEADS, GROUP, HEAD_DIM = 4, 2, 4, 64


@dataclass(frozen=True)
class Problem:
    """query [seqs, kv_heads, group, dim]; key, value [seqs, kv_heads, tokens, dim]: one query token a sequence, no blocks."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float = HEAD_DIM**-0.5

    @property
    def scores(self) -> torch.Tensor:
        return self.scale * (self.query.float() @ self.key.float().mT)

    def part(self, begin: int, end: int) -> Problem:
        return replace(self, key=self.key[:, :, begin:end], value=self.value[:, :, begin:end])

    def truth(self, quantises=frozenset()):
        """One block holds a whole sequence; the slot past its end is NaN."""
        key, value = (torch.nn.functional.pad(pool, (0, 0, 0, 1), value=math.nan) for pool in (self.key, self.value))
        lens = np.full(NUM_SEQS, self.key.shape[2], dtype=np.int32)
        tables = np.arange(NUM_SEQS, dtype=np.int32)[:, None]
        starts = np.arange(NUM_SEQS + 1, dtype=np.int32)
        step = AttentionStep(
            block_tables=torch.from_numpy(tables), seq_lens=torch.from_numpy(lens), query_start_loc=torch.from_numpy(starts),
            host_block_tables=tables, host_seq_lens=lens, host_query_start_loc=starts,
        )
        return attention_truth(self.query.flatten(1, 2), key, value, step, self.scale, quantises)


def make_problem(num_keys, dtype="bf16", needle=None, seed=0):
    """N(0,1); `needle` is a position whose key holds most of every query's weight."""
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(NUM_SEQS, NUM_KV_HEADS, GROUP, HEAD_DIM, generator=rng)
    key, value = torch.randn(2, NUM_SEQS, NUM_KV_HEADS, num_keys, HEAD_DIM, generator=rng)
    if needle is not None:
        key[:, :, needle] = needle_for(query, num_keys)
    query, key, value = (tensor.to(DTYPES[dtype]) for tensor in (query, key, value))
    return Problem(query, key, value)


def needle_for(query, num_keys):
    """A key that scores so high with every query of its group that it holds about 0.99 of the weight."""
    score = math.log(100 * num_keys)
    return (score * HEAD_DIM**0.5 * query / query.square().sum(-1, keepdim=True)).sum(2)


def running(problem, block=64, round_p=True, sum_rounded=False):
    """Online softmax over blocks in float32; probabilities rounded to the dtype: (numerator, max, sum)."""
    scores, value = problem.scores, problem.value.float()
    largest = torch.full(scores.shape[:-1], -math.inf)
    total, numerator = torch.zeros_like(largest), torch.zeros(*scores.shape[:-1], HEAD_DIM)
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


def split(problem, num_splits, rescale=True, round_partials=False):
    """Parts of the sequence merged by their maxima; `rescale` false is a merge that forgets them."""
    num_keys = problem.key.shape[2]
    size = -(-num_keys // num_splits)
    parts = [running(problem.part(begin, begin + size)) for begin in range(0, num_keys, size)]
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
    "32 splits": lambda p: split(p, 32),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("needle", [None, 0, -1], ids=["plain", "first", "last"])
@pytest.mark.parametrize("num_keys", [1, 2, 17, 300])
def test_right_kernels_pass(num_keys, needle, dtype):
    """However a right kernel orders its sums and rounds its probabilities, it passes with room to spare."""
    problem = make_problem(num_keys, dtype, needle)
    for name, kernel in RIGHT.items():
        verdict = judge(problem, kernel(problem))

        assert verdict.passed, (name, verdict.reason)
        assert max(verdict.ratios.values()) < 0.95, (name, verdict.ratios)


def dropped(begin, end):
    def kernel(problem):
        begin_, end_ = range(problem.key.shape[2])[begin], problem.key.shape[2] + end if end < 0 else end
        kept = [*range(begin_), *range(end_, problem.key.shape[2])]
        return online(replace(problem, key=problem.key[:, :, kept], value=problem.value[:, :, kept]))

    return kernel


def one_more(decoy):
    """Reads the slot past the end, in which lies noise, or a needle put there to be noticed."""

    def kernel(problem):
        noise = torch.randn(2, *problem.key.shape[:2], 1, HEAD_DIM, generator=torch.Generator().manual_seed(1))
        key = needle_for(problem.query.float(), problem.key.shape[2])[:, :, None] if decoy else noise[0]
        key, value = (new.to(problem.key.dtype) for new in (key, noise[1]))
        return online(replace(problem, key=torch.cat([problem.key, key], 2), value=torch.cat([problem.value, value], 2)))

    return kernel


def averaged_blocks(problem):
    parts = [online(problem.part(begin, begin + 64)) for begin in range(0, problem.key.shape[2], 64)]
    return torch.stack([out for out, _ in parts]).mean(0), online(problem)[1]


def no_maximum(problem):
    p = problem.scores.exp().to(torch.float16).float()
    return p @ problem.value.float() / p.sum(-1, keepdim=True), p.sum(-1).log()


def low_precision_sum(problem):
    p, out = problem.scores.softmax(-1), torch.zeros(problem.query.shape, dtype=torch.bfloat16)
    for t in range(problem.key.shape[2]):
        out += (p[..., t, None] * problem.value[:, :, None, t]).to(torch.bfloat16)
    return out.float(), problem.scores.logsumexp(-1)


def transposed_heads(problem):
    """Query head h reads KV head h % num_kv_heads."""
    query = problem.query.flatten(1, 2).unflatten(1, (GROUP, NUM_KV_HEADS)).transpose(1, 2)
    out, lse = online(replace(problem, query=query))
    return out.transpose(1, 2).reshape(problem.query.shape), lse.transpose(1, 2).reshape(problem.query.shape[:3])


def stale_value(problem):
    value = problem.value.clone()
    value[:, :, -1] = value[:, :, 0]
    return online(replace(problem, value=value))


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
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", WRONG)
def test_wrong_kernels_fail(fault, dtype):
    """Every fault fails a case of 300 keys in one of the two families of inputs."""
    verdicts = [judge(problem, WRONG[fault](problem)) for problem in (make_problem(300, dtype), make_problem(300, dtype, -1))]

    failed = [verdict for verdict in verdicts if not verdict.passed]
    assert failed
    assert all(verdict.reason and verdict.num_failed for verdict in failed)


@pytest.mark.parametrize(
    ("test", "spoil"),
    [
        ("l2", lambda out: out.mul_(1 + 0.006 * torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))),
        ("max", lambda out: out[2, 1, 3, 5].add_(0.05 * out[2, 1, 3].square().mean().sqrt())),
    ],
    ids=["l2", "max"],
)
def test_each_measure_is_sharp(test, spoil):
    """In bf16 0.6% of noise on whole rows shows in their L2, and a twentieth of the rms in one element by itself."""
    problem = make_problem(300)
    out, lse = online(problem)
    spoil(out)

    assert judge(problem, (out, lse)).ratios[test] > 1


def test_a_declared_rounding_is_allowed_and_no_other():
    """Partials kept in the dtype, and an LSE from rounded probabilities, pass where the entry says so."""
    problem = make_problem(300)
    declared = {"partials": split(problem, 8, round_partials=True), "normaliser": online(problem, sum_rounded=True)}
    for name, answer in declared.items():
        assert judge(problem, answer, frozenset({name})).passed, name

    assert not judge(problem, declared["normaliser"]).passed


def test_fp8_probabilities_pass_only_where_declared():
    """The truth made for fp8 probabilities allows for them; the plain one does not."""
    problem = make_problem(300)
    scores = problem.scores
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = p.to(torch.float8_e4m3fn).float() @ problem.value.float() / p.sum(-1, keepdim=True)
    answer = (out, scores.logsumexp(-1))

    assert judge(problem, answer, frozenset({"probabilities"})).passed
    assert not judge(problem, answer).passed


def test_a_truth_made_for_another_rounding_is_refused():
    """A verdict is not given on a baseline of another precision, nor for a rounding nobody knows."""
    problem = make_problem(3)
    with pytest.raises(ValueError, match="must be made for"):
        judge(problem, online(problem), frozenset({"query"}), truth=problem.truth())
    with pytest.raises(ValueError, match="normaliser, partials, probabilities, products, query"):
        judge(problem, online(problem), frozenset({"everything"}))


def put(where, at, value):
    def spoil(out, lse):
        (out if where == "out" else lse)[at] = value

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda out, lse: fill_unwritten(out[2]), "512 of 2048 outputs were never written; first [seq 2, head 0, dim 0]"),
        (put("out", (1, 3, 5), math.nan), "1 of 2048 outputs are NaN; first [seq 1, head 3, dim 5]"),
        (put("out", (1, 3, 5), -math.inf), "1 of 2048 outputs are infinite; first [seq 1, head 3, dim 5]: got -inf"),
        (put("out", (3, 7, 63), 9.0), "1 of 2048 outputs are outside tolerance; worst [seq 3, head 7, dim 63]: got 9, want"),
        (lambda out, lse: fill_unwritten(lse), "32 of 32 LSE were never written; first [seq 0, head 0]"),
        (put("lse", (0, 1), math.nan), "1 of 32 LSE are NaN; first [seq 0, head 1]"),
        (put("lse", (0, 1), math.inf), "1 of 32 LSE are +inf; first [seq 0, head 1]: got inf"),
        (put("lse", (0, 1), -math.inf), "1 of 32 LSE are -inf although their token sees keys; first [seq 0, head 1]"),
        (put("lse", (0, 1), 4.25), "1 of 32 LSE are outside tolerance; worst [seq 0, head 1]: got 4.25, want"),
    ],
    ids=["unwritten", "nan", "inf", "out", "lse-unwritten", "lse-nan", "lse-plus-inf", "lse-minus-inf", "lse"],
)
def test_faults_are_named(spoil, reason):
    """What is wrong, how often and where stands in the reason."""
    problem = make_problem(40)
    truth = problem.truth()
    out, lse = truth.out.to(torch.bfloat16), truth.lse.float()
    spoil(out, lse)

    verdict = judge_attention(out, lse, truth)

    assert not verdict.passed
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (put("out", (1, 0, 2), 0.5), "1 of 2048 outputs are not 0 although their token sees no key; first [seq 1,"),
        (put("lse", (1, 0), -5e4), "1 of 32 LSE are finite although their token sees no key; first [seq 1,"),
    ],
    ids=["out", "lse"],
)
def test_nothing_but_zero_and_minus_infinity_for_no_keys(spoil, reason):
    """Where no key is visible the answer is exact."""
    problem = make_problem(5)
    whole = problem.truth()
    lse, baseline_l2, baseline_max = whole.lse.clone(), whole.baseline_l2.clone(), whole.baseline_max.clone()
    lse[1], baseline_l2[1], baseline_max[1], whole.out[1] = -math.inf, 0, 0, 0
    truth = replace(whole, lse=lse, baseline_l2=baseline_l2, baseline_max=baseline_max)
    out, lse = truth.out.to(torch.bfloat16), truth.lse.float()
    assert judge_attention(out, lse, truth).passed
    spoil(out, lse)

    assert judge_attention(out, lse, truth).reason.startswith(reason)


def test_wrong_shapes_and_dtypes_are_told():
    """An output of another shape or type is wrong, and the reason says what was wanted."""
    problem = make_problem(5)
    truth = problem.truth()
    out, lse = truth.out.to(torch.bfloat16), truth.lse.float()

    wanted = "out must be [4, 8, 64] torch.bfloat16"
    assert judge_attention(out[:3], lse, truth).reason == f"{wanted} (got [3, 8, 64] torch.bfloat16)"
    assert judge_attention(out.float(), lse, truth).reason == f"{wanted} (got [4, 8, 64] torch.float32)"
    assert judge_attention(out, lse.double(), truth).reason == "lse must be [4, 8] torch.float32 (got [4, 8] torch.float64)"


def test_a_token_of_several_is_named():
    """With more than one query a sequence the place names the token within its sequence."""
    problem = make_problem(5)
    truth = replace(problem.truth(), query_start_loc=(0, 0, 1, 4))
    out, lse = truth.out.to(torch.bfloat16), truth.lse.float()
    out[2, 3, 4] = 9.0

    verdict = judge_attention(out, lse, truth)

    assert verdict.place == {"seq": 2, "token": 1, "head": 3, "dim": 4}
    assert "[seq 2, token 1, head 3, dim 4]" in verdict.reason


def test_an_empty_batch_passes():
    """Nothing to judge is not wrong."""
    truth = make_problem(5).truth()
    none = {name: getattr(truth, name)[:0] for name in ("out", "lse", "baseline_l2", "baseline_max", "baseline_lse")}
    truth = replace(truth, **none, baseline_normaliser=truth.baseline_normaliser[:0], query_start_loc=(0,))

    verdict = judge_attention(truth.out.to(torch.bfloat16), truth.lse.float(), truth)

    assert verdict.passed
    assert verdict.num_rows == 0


def test_copies_are_judged_by_their_bits():
    """The same NaN is equal; another NaN, the sign of zero and a last bit are not."""
    want = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(0)).to(torch.float16)
    want[0, 0], want[1, 1, 1, 1] = math.nan, 0.0
    assert judge_exact(want.clone(), want, "key_cache").passed

    for at, bits in (((0, 0, 1, 1), 0x7E01), ((1, 1, 1, 1), -0x8000), ((2, 1, 3, 7), 1)):
        got = want.clone()
        got.view(torch.int16)[at] ^= bits
        verdict = judge_exact(got, want, "key_cache")

        assert verdict.reason.startswith(f"1 of 192 elements of key_cache differ; first {list(at)}: got ")
        assert (verdict.num_rows, verdict.num_failed) == (24, 1)

    assert judge_exact(want[:2], want, "key_cache").reason.startswith("key_cache must be [3, 2, 4, 8] torch.float16 (got [2")

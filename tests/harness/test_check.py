"""The checker is checked: right kernels pass, wrong ones fail, and each fault is called by its name."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch

from harness.check import MAX_COUNT, TO_DTYPE, fill_unwritten, is_unwritten, judge_attention, judge_exact, max_factor
from harness.hazards import PLAIN
from harness.ops import operator
from harness.ops.attention import AttentionCase
from tests.harness.emulated import DTYPES, RIGHT, ROUNDED, WRONG, judge, make_problem, online, split


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [30, 60, 88])
def test_what_is_left_where_the_heaviest_token_gives_nothing_may_err_as_its_own_weights_do(lead, dtype):
    """A value of 0, as 8-bit caches hold many, leaves an output to tokens whose squared weights no float32 holds."""
    problem = make_problem(17, dtype, needle=-1)
    scores = problem.query.float() @ problem.key[:, :, -1:].float().mT * problem.scale
    problem.key[:, :, -1] *= lead / scores.mean()
    problem.value[:, :, -1, ::2] = 0
    for name, kernel in RIGHT.items():
        verdict = judge(problem, kernel(problem))

        assert verdict.passed, (name, verdict.reason)


@pytest.mark.parametrize(
    ("fault", "dtype"), [*itertools.product(WRONG, DTYPES), *itertools.product(ROUNDED, ("bf16", "f16"))], ids=str
)
def test_wrong_kernels_fail(fault, dtype):
    """Every fault fails a case of 300 keys in one of the two families of inputs."""
    # A scale that is a power of 2, as head_dim 64 has it, rounds nothing.
    kernel, shape = (WRONG | ROUNDED)[fault], (4, 2, 4, 80) if fault in ROUNDED else (4, 2, 4, 64)
    verdicts = [judge(problem, kernel(problem)) for problem in (make_problem(300, dtype, at, shape=shape) for at in (None, -1))]

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
    with pytest.raises(ValueError, match="merges, normaliser, partials, probabilities, products, query, scales, tanh, warps"):
        judge(problem, online(problem), frozenset({"everything"}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_nan_that_was_computed_was_written(dtype):
    """Converted by the instructions for one element and for many; the sentinel is a NaN, too."""
    computed = torch.zeros(70) / torch.zeros(70)
    untouched = torch.zeros(70, dtype=dtype)
    fill_unwritten(untouched)

    assert untouched.isnan().all()
    assert is_unwritten(untouched).all()
    for wrong in (computed, torch.full((70,), math.nan), -computed):
        assert not is_unwritten(wrong.to(dtype)).any()


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
    num_visible = whole.num_visible.clone()
    num_visible[1] = 0
    truth = replace(whole, lse=lse, baseline_l2=baseline_l2, baseline_max=baseline_max, num_visible=num_visible)
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
    names = ("out", "lse", "baseline_l2", "baseline_max", "baseline_lse", "num_visible")
    none = {name: getattr(truth, name)[:0] for name in names}
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


@pytest.mark.parametrize(("count", "factor"), [(1, 5.0), (MAX_COUNT, 5.0), (1 << 20, 5.387), (1 << 23, 5.749)])
def test_more_outputs_may_hold_one_that_lies_further_out(count, factor):
    """The chance that any output of a right kernel lies outside is the same for every number of them."""
    normal = NormalDist()

    assert max_factor(count) == pytest.approx(factor, abs=1e-3)
    assert normal.cdf(-max_factor(count)) * max(count, MAX_COUNT) == pytest.approx(normal.cdf(-5.0) * MAX_COUNT)


@pytest.mark.parametrize("quantises", [frozenset(), frozenset(TO_DTYPE)], ids=["careful", "rounds"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_smallest_number_where_no_key_is_seen_is_wrong(dtype, quantises):
    """Whatever is categorically wrong exceeds a tolerance, too: by that alone what is right passes, and is asked no more."""
    case = AttentionCase(name="tiny", num_q_heads=2, num_kv_heads=1, head_dim=16, block_size=4, seq_lens=(0, 5), dtype=dtype)
    truth = operator("attention").build(case, PLAIN, layers=1, device="cpu").truth(0)
    out, lse = truth.out.to(truth.dtype), truth.lse.float()
    right = judge_attention(out, lse, truth, quantises)
    out.view(torch.int32 if dtype == "f32" else torch.int16)[0, 1, 2] = 1
    wrong = judge_attention(out, lse, truth, quantises)

    assert (right.passed, wrong.passed) == (True, False)
    assert wrong.reason.startswith("1 of 64 outputs are not 0 although their token sees no key; first [seq 0, head 1, dim 2]")

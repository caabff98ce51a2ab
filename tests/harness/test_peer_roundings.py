"""What the peers declare to round is what their sources round: emulated so, they pass; faults show all the same."""

import itertools

import pytest

from tests.harness.emulated import ROUNDED, WRONG, make_problem
from tests.harness.emulated_peers import DECLARED, SHAPES, judge_output, xqa

XQA = DECLARED["peer.flashinfer.xqa"]
#: not in these outputs, whoever is judged: seen by the log-sum-exp, which XQA does not give, or from scores of 11 on
UNSEEN = {"scale 0.1% off", "base-2 LSE", "LSE without the maximum", "no maximum subtracted", "query scaled, then rounded"}
#: one rounding more, beside the five that XQA is allowed
WITHIN = {"scores rounded"}


@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(SHAPES, ("bf16", "f16"))], ids=str)
def test_emulated_peers_pass_as_declared(name, dtype):
    """Plain inputs and needles, with room to spare."""
    peer, num_keys, shape, kernel = SHAPES[name]
    for needle in (None, 0, num_keys // 2, -1):
        problem = make_problem(num_keys, dtype, needle, seed=2, shape=shape)
        verdict = judge_output(problem, kernel(problem), DECLARED[f"peer.flashinfer.{peer}"])

        assert verdict.passed, verdict.reason
        assert max(verdict.ratios.values()) < 0.95, (needle, verdict.ratios)


def test_large_parts_that_cancel_are_no_fault():
    """In one output of this draw two CTAs' parts are four deviations large, of opposite sign, and their roundings as large."""
    problem = make_problem(8192, seed=27, shape=(8, 2, 16, 128))

    assert judge_output(problem, xqa(problem, 2), XQA).passed


@pytest.mark.parametrize("name", ["an eighth of facts.i", "four groups of warps"])
def test_xqa_fails_without_its_warps(name):
    """With only parts and the normaliser allowed for, as on an H200 before, rows are outside tolerance."""
    _, num_keys, shape, kernel = SHAPES[name]
    problem = make_problem(num_keys, shape=shape, seed=2)

    assert not judge_output(problem, kernel(problem), frozenset({"partials", "normaliser"})).passed


@pytest.mark.parametrize("fault", [fault for fault in WRONG | ROUNDED if fault not in UNSEEN | WITHIN])
def test_faults_show_in_outputs_as_xqa_is_judged(fault):
    """The widest that any peer is allowed, and no log-sum-exp: what fails undeclared by its output fails all the same."""
    problems = [make_problem(300, needle=needle, shape=(4, 2, 4, 80)) for needle in (None, -1)]
    outputs = [(WRONG | ROUNDED)[fault](problem)[0] for problem in problems]

    assert not all(judge_output(*pair).passed for pair in zip(problems, outputs, strict=True))
    assert not all(judge_output(*pair, XQA).passed for pair in zip(problems, outputs, strict=True))

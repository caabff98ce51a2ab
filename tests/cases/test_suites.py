"""The cases are plain data: unique, never changed under their names, and listed without torch or NumPy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cases import ALL, SUITE_NOTES, SUITES, models
from cases.decode import BLOCK_SIZES
from cases.lengths import ragged
from harness.ops.attention import AttentionCase

DIGESTS = Path(__file__).with_name("digests.txt")


def test_no_case_changes_under_its_name():
    """Names key results for ever: a changed or vanished case fails here; a new one is added to digests.txt."""
    pinned = dict(line.split() for line in DIGESTS.read_text().splitlines())

    assert {name: case.digest for name, case in ALL.items()} == pinned


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_asks_no_question_twice(suite):
    """Records are keyed by digest: two cases of one digest would be one row."""
    digests = [case.digest for case in SUITES[suite]]

    assert digests, f"{suite} is empty"
    assert len(set(digests)) == len(digests)


def test_every_case_of_a_suite_is_found_by_its_name():
    """ALL holds each name once; a name that stood for two problems would drop one of them."""
    for cases in SUITES.values():
        assert [ALL[case.name] for case in cases] == list(cases)


def test_full_asks_every_question():
    """No question is left out of `full`, whatever its name, but the faults, which nobody times, and what only readers read."""
    others = ("faults", "ceiling")
    asked = {case.digest for name, suite in SUITES.items() if name not in others for case in suite}
    rest = {case.digest for case in ALL.values()} - {case.digest for name in others for case in SUITES[name]}

    assert {case.digest for case in SUITES["full"]} == asked
    assert rest <= asked


def test_every_suite_is_described_in_one_sentence():
    """`list` shows a sentence a suite."""
    assert SUITE_NOTES.keys() == SUITES.keys()
    assert all(note.endswith(".") and note.count(". ") == 0 for note in SUITE_NOTES.values())


def test_smoke_holds_all_operators_and_every_dtype():
    """The smallest suite still meets each operator and element type."""
    assert {case.op for case in SUITES["smoke"]} == {"attention", "cache_write", "block_copy"}
    assert {case.dtype for case in SUITES["smoke"]} == {"f32", "f16", "bf16"}


def test_every_model_and_block_size_is_asked():
    """A model or block size without a case would be a promise only."""
    attention = [case for case in SUITES["full"] if isinstance(case, AttentionCase)]
    heads = {(case.num_q_heads, case.num_kv_heads, case.head_dim) for case in attention}

    assert {(model.num_q_heads, model.num_kv_heads, model.head_dim) for model in models.MODELS} <= heads
    assert set(BLOCK_SIZES) <= {case.block_size for case in attention}
    assert {len(case.seq_lens) for case in attention} >= {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert {case.max_seq_len for case in attention} >= {512 << i for i in range(9)}


def test_ragged_lengths_are_the_same_everywhere():
    """The lengths of a seed are fixed, within the bounds given."""
    assert ragged(4, 1, 1024, seed=1) == (138, 868, 783, 262)
    assert set(ragged(500, 3, 5, seed=0)) == {3, 4, 5}


def test_listing_imports_neither_torch_nor_numpy():
    """`pagedbench list` must answer at once."""
    code = "import sys, cases, cases.parse; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=DIGESTS.parents[2], check=True)

    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("seq_len", "q_len", "visible"), [(5, 3, 12), (2, 4, 3), (0, 3, 0), (7, 0, 0), (4, 4, 10), (3, 4, 6), (10**9, 10**9, None)]
)
def test_flops_count_the_visible_keys(seq_len, q_len, visible):
    """Token i sees seq_len - q_len + i + 1 keys, where that is any; counting does not walk the tokens."""
    lens = {"seq_lens": (seq_len,), "q_lens": (q_len,)}
    case = AttentionCase(name="one", num_q_heads=2, num_kv_heads=1, head_dim=8, block_size=16, **lens)

    assert case.flops == 4 * 2 * 8 * (10**9 * (10**9 + 1) // 2 if visible is None else visible)

"""Why rows have no number: verdicts, and reasons that are told once though their numbers differ."""

from dataclasses import replace

import pytest

from harness.report import ranges, reasons, rows

FAULT = """prepare: CompilationError: at 17:4:
    for first in range(0, num_chunks, tile):
    ^
AssertionError("part has initial type <['{}'], int32> but is re-assigned to <['16'], int32> in loop!")"""


@pytest.fixture
def one(gpu_run):
    """A right, timed row of ours."""
    return next(r for r in gpu_run if r.row == "cuda.split_kv[NHD]" and r.launch_s)


def test_a_wrong_peer_does_not_spoil_ours(one):
    """Ours decide the verdict; a peer's fault is told."""
    peer = replace(one, impl="peer.x", status="wrong", reason="NaN")

    assert reasons.verdict([one]) == ("All 1 row that ran are right", True)
    assert reasons.verdict([one, peer]) == ("All of ours that ran are right; peers: 1 row wrong", True)
    assert reasons.verdict([replace(peer, impl="cuda.x")]) == ("1 row wrong", False)


def test_a_control_that_passes_is_bad_news(one):
    """A kernel that is wrong on purpose and passes means that the checker is blind."""
    assert reasons.verdict([one, replace(one, role="control")]) == (
        "All of ours that ran are right; 1 control passed that should not", False
    )


def test_reasons_that_differ_in_numbers_are_one(one):
    """One compile fault at five sizes is one reason, with the numbers that differ as a range."""
    failed = [replace(one, case=f"c.{n}", status="failed", reason=FAULT.format(n)) for n in (16, 4, 2, 4, 64)]
    [reason] = reasons.reasons(failed)

    assert reason.text == FAULT.format("2 to 64")
    assert reason.count == "5 rows, 4 texts shown as one"
    assert reason.is_long
    assert reason.ends == "\n".join(FAULT.format("2 to 64").splitlines()[::3])


def test_reasons_that_differ_in_words_stay_apart(one):
    """Other words at either end are another reason; what lies between only quotes the source."""
    texts = ("at 1\nx = 1\nlost", "at 2\ny = 2\nlost", "at 1\nx = 1\nfound")
    found = reasons.reasons([replace(one, status="failed", reason=text) for text in texts])

    assert [(len(reason.rows), reason.text) for reason in found] == [(2, texts[0]), (1, texts[2])]


def test_a_wrong_answer_is_of_its_implementation(one):
    """Two implementations that are wrong alike are told of apart: where each is wrong is what one needs."""
    wrong = [replace(one, impl=impl, status="wrong", reason="3 of 8 outputs") for impl in ("cuda.a", "cuda.b", "cuda.a")]

    assert [reason.names for reason in reasons.reasons(wrong)] == ["cuda.a[NHD] in 2 cases", "cuda.b[NHD]"]


def test_what_must_be_acted_on_comes_first(gpu_run):
    """Bad rows stand before those that could not or should not run, however many these are."""
    found = [reason.status for reason in reasons.reasons(gpu_run)]

    assert found == sorted(found, key=reasons.ORDER.index)
    assert set(found) == set(reasons.ORDER)


def test_a_reason_in_brief_tells_what_came_of_it():
    """The last line has the cause, the first what was tried; a line without end is cut."""
    assert reasons.brief(FAULT.format(4)).startswith("prepare: CompilationError: at 17:4: … AssertionError(")
    assert reasons.brief("one line") == "one line"
    assert len(reasons.brief("x" * 9999)) < 300


def test_a_case_counts_its_faults(gpu_run):
    """Who reads of the fastest row reads how many rows it was not held against; readers and controls do not count."""
    [group] = rows.by_case(r for r in gpu_run if r.case == "facts.d")

    assert reasons.faults(group) == "1 of 20 rows failed"


@pytest.mark.parametrize(("texts", "text"), [
    (("2 sets, 17.1 times", "256 sets, 2.6 times", "15 sets, 16.0 times"), "2 to 256 sets, 2.6 to 17.1 times"),
    (("9 of 10", "10 of 10"), "9 to 10 of 10"),
    (("f32 in load_16b, 1e-3", "f32 in load_16b, 2e-3"), "f32 in load_16b, 1e-3 to 2e-3"),
    (("int32", "int64"), "int32"),
    (("",), ""),
])
def test_numbers_become_ranges(texts, text):
    """Numbers are compared as numbers, decimals whole; digits within names are none."""
    assert ranges.merged(texts) == text

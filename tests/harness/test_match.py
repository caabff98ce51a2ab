"""Which rows meet, and the reason of every row that meets nobody."""

from __future__ import annotations

from dataclasses import replace

from harness.match import match
from tests.harness.runs import row


def whys(old, new):
    return [(bool(pair.old), bool(pair.new), pair.why) for pair in match(old, new).pairs]


def test_rows_meet_by_digest_implementation_layout_and_device():
    """The name of the case does not enter: a case renamed is the same problem."""
    assert whys([row()], [row(run="s", case_digest="digest decode.a", case="decode.b")]) == [(True, True, "")]


def test_another_case_under_the_same_name_is_never_compared():
    """Both sides are told, with both digests."""
    old, new = row(), row(case_digest="other")

    assert whys([old], [new]) == [
        (False, True, "in the baseline the case under this name has digest digest decode.a, here other"),
        (True, False, "in the new run the case under this name has digest other, here digest decode.a"),
    ]


def test_another_device_is_never_compared():
    assert whys([row(device="nvidia-a100")], [row()])[0] == (
        False, True, "the baseline has it on nvidia-a100; different devices are never compared",
    )  # fmt: skip


def test_a_row_of_one_side_only_says_so():
    assert whys([row(impl="cuda.old")], [row(impl="cuda.new")]) == [
        (False, True, "not in the baseline"),
        (True, False, "not in the new run"),
    ]


def test_a_changed_default_is_compared():
    """One setting on either side: the parameters are the implementation's own business."""
    assert whys([row(params={"splits": 0})], [row(params={"splits": 4})]) == [(True, True, "")]


def test_settings_of_a_sweep_meet_their_equals():
    """Where one side has several settings of a row, only equal ones are compared."""
    old = [row(params={"splits": n}) for n in (0, 1, 2)]
    new = [row(params={"splits": n}) for n in (2, 0, 3)]

    assert [(p.old and p.old.params, p.new and p.new.params) for p in match(old, new).pairs] == [
        ({"splits": 2}, {"splits": 2}), ({"splits": 0}, {"splits": 0}), (None, {"splits": 3}), ({"splits": 1}, None),
    ]  # fmt: skip
    assert whys(old[:1], new)[0] == (False, True, "the baseline has other settings of it only")


def test_of_repeats_the_last_line_counts_whatever_its_clock():
    """A run appended twice, or by a machine whose clock was wrong, does no harm."""
    early = row(started_at="2031-01-01T00:00:00+00:00")
    late = replace(row(seed=1), started_at="1999-01-01T00:00:00+00:00")
    matched = match([early, late, row(role="control", impl="control.x")], [row()])

    assert [pair.old for pair in matched.pairs] == [late]
    assert matched.repeats == 2

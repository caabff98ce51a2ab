"""What an audit concludes from records, and how its matrix reads."""

from __future__ import annotations

import json

import pytest

from harness.audit import audit
from harness.record import Record
from harness.report.kills import check_letters, markdown_matrix, terminal_matrix


def record(impl, case, status, reason=None, role="control"):
    return Record(
        run="r", suite="s", started_at="2026-11-30T12:00:00+00:00", op="attention", case=case, case_digest=case, shape={},
        impl=impl, layout="HND", role=role, status=status, reason=reason, device="cpu", device_kind="cpu", toolchain={},
    )  # fmt: skip


PLAIN, NEEDLES = "plain inputs: 3 of 4 outputs are NaN", "needles inputs: 1 of 4 rows"
RECORDS = (
    record("control.a", "one", "wrong", PLAIN),
    record("control.a", "two", "wrong", NEEDLES),
    record("control.b", "one", "wrong", "plain inputs: guard: wrote 4 bytes past the end of out"),
    record("control.b", "two", "ok"),
    record("right", "one", "ok", role="implementation"),
)


def test_controls_that_are_caught_are_a_clean_audit():
    """A control needs one case that catches it, and the check is named by how the reason begins."""
    found = audit(RECORDS)

    assert found.is_clean
    assert found.kills == {"control.a": {"one": "plain", "two": "needles"}, "control.b": {"one": "guard"}}
    assert found.to_json()["share_killed"] == 1.0


def test_a_control_that_no_case_catches_survives():
    """It was judged and passed."""
    found = audit([*RECORDS, record("control.c", "one", "ok")])

    assert found.survivors == ["control.c"]
    assert not found.is_clean
    assert found.to_json()["share_killed"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("status", ["failed", "timeout"])
def test_a_control_that_raises_is_broken_and_not_caught(status):
    """Nobody judged its output."""
    found = audit([record("control.c", "one", status, "prepare: TypeError: no")])

    assert found.broken == {"control.c": f"{status} on one: prepare: TypeError: no"}
    assert found.kills["control.c"] == {}
    assert not found.is_clean


@pytest.mark.parametrize("status", ["unsupported", "skipped"])
def test_a_control_that_applies_nowhere_is_listed_and_does_no_harm(status):
    """The suite says nothing of it."""
    found = audit([*RECORDS, record("control.c", "one", status, "runs on cuda only (got cpu)")])

    assert found.never_judged == {"control.c": "runs on cuda only (got cpu)"}
    assert found.is_clean


@pytest.mark.parametrize("status", ["wrong", "failed", "timeout"])
def test_a_right_implementation_found_wrong_is_a_false_alarm(status):
    """A checker that cries wolf is no better than one that sleeps."""
    found = audit([*RECORDS, record("right", "two", status, PLAIN, role="implementation")])

    assert found.false_alarms == [f"right[HND] on two: {status}: {PLAIN}"]
    assert not found.is_clean


def test_a_case_that_kills_nothing_its_neighbours_do_not_is_shown():
    """Suites can be kept small."""
    found = audit(RECORDS)

    assert found.sole_kills() == {"one": ["control.b"], "two": []}
    assert found.enough() == ["one"]
    assert "kill nothing that another case does not: two" in terminal_matrix(found)


def test_checks_have_letters_of_their_own():
    """Two checks that begin alike are told apart."""
    found = audit([record("control.a", "one", "wrong", PLAIN), record("control.b", "one", "wrong", "pool: moved")])

    assert check_letters(found) == {"plain": "P", "pool": "O"}


def test_the_matrix_has_a_line_a_control_and_a_column_a_case():
    """A letter where it was caught, a dot where it passed."""
    lines = terminal_matrix(audit(RECORDS)).splitlines()

    assert lines[:3] == ["   ab", "a  PN", "b  G."]
    assert lines[-1].startswith("2 of 2 controls caught; 0 survive")


def test_markdown_escapes_what_a_control_says_of_itself():
    """A fault may hold any character."""
    text = markdown_matrix(audit(RECORDS), {"control.a": "acc<T> | *x*"})

    assert "acc&lt;T&gt; \\| \\*x\\*" in text


def test_an_audit_is_plain_data():
    """audit.json holds all of it."""
    found = audit(RECORDS).to_json()

    assert json.loads(json.dumps(found)) == found

"""The comment: the verdict first, never longer than GitHub takes, and what was left out is said."""

from __future__ import annotations

import pytest

from harness.report.comment import LIMIT, LISTED, MARK, Section, comment, faults
from tests.harness.runs import row, untimed

STEPS = [["check", "good", "8 ok"], ["ab", "bad", "1 SLOWER"]]
TABLE = "| row | why |\n|:----|:----|\n" + "\n".join(f"| `cuda.{i}` | {'x' * 200} |" for i in range(400))
FOLD = "<details><summary>7 other rows</summary>\n\n| a |\n|:--|\n| b |\n\n</details>"


def section(text, folded=False):
    return Section(title="Against main", text=text, folded=folded)


def test_the_verdict_stands_first():
    """A mark that is not shown, the headline, the steps, then the sections in order."""
    made = comment("SLOWER: ab", STEPS, [section("1 < 2"), section("more", folded=True)])

    assert made.startswith(f"{MARK}\n\n### SLOWER: ab\n\n| step ")
    assert "| ab     | **bad**  | 1 SLOWER          |" in made
    assert made.endswith("#### Against main\n\n1 < 2\n\n<details><summary>Against main</summary>\n\nmore\n\n</details>\n")


def test_a_comment_is_never_too_long():
    """Of a table that does not fit, the first rows; what lies behind it, as far as there is room; and a line that says so."""
    made = comment("PASS", STEPS, [section(f"before\n\n{TABLE}\n\n{FOLD}"), section("x" * 2 * LIMIT, folded=True)])

    assert 0.9 * LIMIT < len(made.encode()) <= LIMIT
    assert "`cuda.0`" in made
    assert "`cuda.399`" not in made
    assert "_Left out, since a comment holds no more: 3 parts." in made


def test_bytes_count_and_not_characters():
    made = comment("PASS", STEPS, [section("- µs\n" * 20_000)])

    assert len(made.encode()) <= LIMIT


def test_what_is_folded_away_is_whole_or_absent():
    """A fold that is cut in two would hide all that follows."""
    made = comment("PASS", STEPS, [section(f"{FOLD}\n\nafter")], limit=400)

    assert made.count("<details>") == made.count("</details>")
    assert "7 other rows" not in made
    assert "after" in made


@pytest.mark.parametrize("text", ["</details>", "a | b", "<script>", "`"])
def test_words_of_others_stay_words(text):
    """Neither a headline nor what came of a step can close a fold, begin a column or a tag."""
    made = comment(text, [["check", "bad", text]], [])
    lines = [line for line in made.splitlines() if line.startswith("|")]

    assert "<script>" not in made
    assert "</details>" not in made
    assert {line.replace("\\|", "").count("|") for line in lines} == {4}


def test_faults_are_told_by_reason():
    """Wrong rows of implementations; controls are wrong on purpose. Many kinds end in a count."""
    wrong = [untimed(row(impl=f"cuda.k{i}"), "wrong", "out of tolerance") for i in range(LISTED + 2)]
    control = untimed(row(impl="control.x", role="control"), "wrong", "as it must")
    told = faults([*wrong, control, row()]).splitlines()

    assert told[0].startswith("- **wrong** `cuda.k0[HND]` on `")
    assert told[0].endswith(": out of tolerance")
    assert told[-1] == "- and 2 more kinds"
    assert faults([control, row()]) == ""

"""`pagedbench ci`: which steps are done, which of them decide, and what is said of each. The steps themselves are scripted.

tests/test_example.py does all of it with real ones.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from harness import gate
from harness.baseline import baseline_of
from harness.cli import main
from harness.commands import ci
from harness.compare import judge
from harness.gate import Job, Step, outcome
from harness.match import match
from harness.names import UsageError
from harness.report import verdicts
from harness.trees import merge_base
from tests.harness.runs import row, run, save, untimed

GOOD = run(count=3)


def comparison(old, new, names=("main", "this checkout")):
    return verdicts.Comparison(old=names[0], new=names[1], judged=judge(match(old, new).pairs))


def compared(old=GOOD, new=GOOD):
    """The plain data of a comparison of two runs."""
    return verdicts.plain_data(comparison(old, new))


SAME = compared()
SLOWER, UNSURE = compared(new=run(count=3, slow=(1,), by=1.2)), compared(new=run(count=3, seed=1, visits=1))
MISSING, NEW = compared(new=GOOD[:2]), compared(old=[])
WRONG = compared(new=[*GOOD[:2], untimed(GOOD[2], "wrong")])


def step(name, code, told="told", **fields):
    return Step(name=name, code=code, told=told, **fields)


@pytest.mark.parametrize(
    ("steps", "allow_unsure", "code", "verdict"),
    [
        ([step("check", 0), step("run", 0)], False, 0, "RIGHT, and compared with nothing"),
        ([step("run", 0), step("ab", 0, comparison=SAME)], False, 0, "PASS: ab: told"),
        ([step("run", 0), step("ab", 0, comparison=NEW)], False, 0, "RIGHT, and compared with nothing: ab: told"),
        ([step("run", 1), step("ab", 0, comparison=SAME)], False, 1, "WRONG: run: told"),
        ([step("run", 0), step("ab", 1, comparison=SLOWER)], False, 1, "SLOWER: ab: told"),
        ([step("run", 0), step("ab", 1, comparison=WRONG)], False, 1, "WRONG: ab: told"),
        ([step("run", 0), step("ab", 3, comparison=UNSURE)], False, 3, "UNSURE: ab: told"),
        ([step("run", 0), step("ab", 3, comparison=UNSURE)], True, 0, "PASS: ab: told"),
        ([step("run", 0), step("ab", 3, comparison=MISSING)], True, 3, "MISSING: ab: told"),
        ([step("run", 0), step("ab", 2)], True, 2, "NOT MEASURED: ab: told"),
        ([step("run", 1), step("ab", 2)], True, 1, "WRONG: run: told"),
        ([step("ab", 0, comparison=SAME), step("compare", 1, comparison=SLOWER, decides=False)], False, 0, "PASS: ab: told"),
        ([step("ab", 0, comparison=SAME), step("compare", 1, "slow", comparison=SLOWER)], False, 1, "SLOWER: compare: slow"),
        ([step("run", 0), step("ab", None), step("compare", 3, comparison=UNSURE)], False, 3, "UNSURE: compare: told"),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)  # fmt: skip
def test_the_worst_deciding_step_is_the_verdict(steps, allow_unsure, code, verdict):
    """Wrong or slower before not measured before unsure; MISSING is never let pass as unsure."""
    assert outcome(steps, allow_unsure) == (code, verdict)


class Script:
    """Stands in for the processes: what each command writes, its exit code, and what was asked of it."""

    def __init__(self, monkeypatch, tmp_path):
        self.asked, self.codes, self.rows, self.sides = [], {}, {"check": GOOD, "run": GOOD}, {}
        self.out = tmp_path / "out"
        monkeypatch.setattr(Job, "run", lambda _, *words: self(words))

    def __call__(self, words):
        command = words[0]
        self.asked.append(words)
        if command in self.rows:
            save(Path(words[words.index("--out") + 1]) / "20261130T000000Z", self.rows[command])
        elif command in self.sides:
            found = comparison(*self.sides[command])
            out = Path(words[words.index("--out") + 1])
            out.mkdir(exist_ok=True)
            (out / "comparison.json").write_text(json.dumps(verdicts.plain_data(found)))
            (out / "summary.md").write_text(verdicts.markdown(found))
            self.codes.setdefault(command, found.exit_code)
        return self.codes.get(command, 0), [f"the words of {command}"]

    @property
    def commands(self):
        return [words[0] for words in self.asked]

    @property
    def folder(self):
        (found,) = self.out.iterdir()
        return found


@pytest.fixture
def script(monkeypatch, tmp_path):
    for name in ("PAGEDBENCH_BASE", "GITHUB_BASE_REF", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ci, "root_of", lambda _: None)
    return Script(monkeypatch, tmp_path)


def gated(script, *words):
    return main(["ci", "--out", str(script.out), "--baselines", str(script.out.parent / "baselines"), *words])


def test_nothing_is_measured_on_a_machine_that_is_not_fit(script, capsys):
    """Exit code 2, for it is no regression; the finding is the headline."""
    script.codes["doctor"] = 1

    assert gated(script) == 2
    assert script.commands == ["doctor"]
    assert "NOT MEASURED: pre-flight: the words of doctor" in capsys.readouterr().out
    assert "**error**" in (script.folder / "summary.md").read_text()


def test_without_anything_to_compare_with_it_says_so(script, capsys):
    """Neither a checkout nor a baseline: each is a line, and what is right is called no more than that."""
    assert gated(script, "--impl", "cuda.*", "--suite", "facts") == 0

    assert script.commands == ["doctor", "check", "run"]
    said = (script.folder / "summary.md").read_text()
    assert "### RIGHT, and compared with nothing" in said
    assert "nothing to compare with: no git checkout here; --base takes a folder, too" in said
    assert "no baseline for nvidia-h200 (" in said
    assert script.asked[1][:4] == ("check", "--suite", "edges", "--impl=cuda.*")
    assert script.asked[2][:3] == ("run", "--impl=cuda.*", "--suite=facts")


def test_records_and_report_have_one_place(script):
    """What a command writes into a folder named by the time lies where the step's name says."""
    gated(script)

    assert (script.folder / "run" / "records.jsonl").is_file()
    assert [path.name for path in (script.folder / "run").iterdir()] == ["records.jsonl"]


def test_rows_of_which_none_ran_are_no_pass(script, capsys):
    """All unsupported: the gate has looked at nothing."""
    script.rows["run"] = [untimed(row(), "unsupported")]

    assert gated(script) == 2
    assert "NOT MEASURED: run: nothing ran: 0 ok, 0 wrong, 1 unsupported" in capsys.readouterr().out


def test_what_cannot_be_begun_is_said_once(script, capsys):
    """Wrong usage, or a kernel's file that cannot be loaded."""
    script.codes["check"] = 2
    script.rows = {}

    assert gated(script, "--device", "cpu") == 2
    assert script.commands == ["check"]
    assert "NOT MEASURED: check: the words of check" in capsys.readouterr().out


def test_ab_decides_and_the_baseline_is_told(script, tmp_path):
    """A baseline was measured on another day; under --strict-baseline it decides, too."""
    script.sides = {"ab": (GOOD, GOOD), "compare": (GOOD, run(count=3, slow=(1,), by=1.2))}
    save(tmp_path / "baselines", GOOD)
    (tmp_path / "baselines" / "records.jsonl").rename(baseline_of("nvidia-h200", tmp_path / "baselines"))

    assert gated(script, "--base", str(tmp_path)) == 0
    assert script.commands == ["doctor", "check", "run", "ab", "compare"]
    assert script.asked[3][:2] == ("ab", str(tmp_path))
    assert "--layouts=HND,NHD" in script.asked[4]  # the run's own: what it was not asked for is not missing
    said = (script.folder / "summary.md").read_text()
    assert "### PASS: ab: 3 SAME against main" in said
    assert "**bad, does not decide**" in said
    script.out = tmp_path / "again"
    assert gated(script, "--base", str(tmp_path), "--strict-baseline", "--layouts", "KV_NHD") == 1
    assert "--layouts=KV_NHD" in script.asked[-1]
    assert not any(word.startswith("--case") for word in script.asked[-1])  # of all cases none may vanish
    script.out = tmp_path / "third"
    assert gated(script, "--base", str(tmp_path), "--strict-baseline", "--suite", "facts") == 1
    assert "--case=case.0,case.1,case.2" in script.asked[-1]
    assert "### SLOWER: compare: 1 SLOWER, 2 SAME against main" in (script.folder / "summary.md").read_text()


def test_a_base_that_was_asked_for_and_is_not_there_is_wrong_usage(script, capsys, monkeypatch):
    """By option or by environment: exit code 2, and nothing is measured."""
    monkeypatch.setattr(ci, "root_of", lambda _: Path.cwd())
    monkeypatch.setattr(ci, "merge_base", merge_base)
    monkeypatch.setenv("PAGEDBENCH_BASE", "no-such-revision")

    assert gated(script) == 2
    assert "at 'no-such-revision': " in capsys.readouterr().err
    assert script.commands == []


def test_the_jobs_summary_is_added_to(script, monkeypatch, tmp_path):
    """Another step's words stay; the step's outputs name the folder, the file and the exit code."""
    (tmp_path / "job").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "job"))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    gated(script)

    assert (tmp_path / "job").read_text() == "before\n" + (script.folder / "summary.md").read_text()
    assert (tmp_path / "output").read_text().splitlines() == [
        f"folder={script.folder}", f"summary={script.folder / 'summary.md'}", "exit-code=0",
    ]  # fmt: skip


# One step.


def test_a_step_is_a_process_whose_words_are_kept(tmp_path, capfd):
    """Its exit code, its output as it comes, and both in log.txt."""
    code, lines = Job(tmp_path).run("list", "--suite", "smok")

    assert code == 2
    assert lines == ["pagedbench: no suite 'smok'; did you mean smoke?"]
    assert capfd.readouterr().out.splitlines() == ["$ pagedbench list --suite smok", *lines]
    assert (tmp_path / "log.txt").read_text().splitlines()[:3] == ["$ pagedbench list --suite smok", *lines, "exit code 2"]


def test_a_step_that_is_killed_could_not_be_done(tmp_path, monkeypatch):
    """A signal is no verdict."""
    monkeypatch.setattr(gate, "_START", "import os; os.kill(os.getpid(), 9)")

    assert Job(tmp_path).run("check") == (2, [])


# The merge base.


@pytest.fixture
def checkout(tmp_path):
    """main with two commits, and a branch that left it at the first; returns the folder, git, and the commits' ids."""
    def git(*words):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q", "-b", "main")
    ids = []
    for name in ("first", "second"):
        git("commit", "-q", "--allow-empty", "-m", name)
        ids.append(git("rev-parse", "HEAD"))
    git("checkout", "-q", "-b", "branch", ids[0])
    git("commit", "-q", "--allow-empty", "-m", "on the branch")
    return tmp_path, git, ids


def test_a_branch_is_held_against_where_it_left(checkout):
    """Not against what main has become since."""
    folder, _, (first, _) = checkout

    assert merge_base("main", folder) == first


def test_a_push_is_held_against_the_commit_before(checkout):
    """There the merge base is the commit itself, and would be measured against itself."""
    folder, git, (first, _) = checkout
    git("checkout", "-q", "main")

    assert merge_base("main", folder) == first


@pytest.mark.parametrize("case", ["no such revision", "the first commit", "no common history"])
def test_where_there_is_none_it_says_so(checkout, case):
    folder, git, (first, _) = checkout
    if case == "the first commit":
        git("checkout", "-q", first)
    if case == "no common history":
        git("checkout", "-q", "--orphan", "alone")
        git("commit", "-q", "--allow-empty", "-m", "alone")

    with pytest.raises(UsageError, match=r"to compare with at '(main|nowhere)'.*; was the history fetched"):
        merge_base("nowhere" if case == "no such revision" else "main", folder)

"""Two arms, one run: each its own tree, rows in turn, and whatever becomes of an arm is told of its rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness import duel
from harness.cli import main
from harness.duel import ATTEMPTS, OLD, Arm, Duel, Match, Setup, merged
from harness.names import UsageError
from harness.ops.block_copy import BlockCopyCase
from harness.ops.layouts import HND
from harness.registry import Entry, Impl
from harness.rooms import HOUSE
from harness.store import load
from harness.trees import Side, checkouts_of, sides_of, worktree
from tests.harness.interruptible import broken_off, started

TINY = BlockCopyCase(name="copy.tiny", num_kv_heads=1, head_dim=16, block_size=4, num_copies=4, num_blocks=16)
OTHER = replace(TINY, name="copy.other", num_copies=2)

#: An arm that speaks as ours does and loads nothing. Its tree's name says what it is: a time for each visit in
#: microseconds, and what it does at which row.
STAND_IN = """
import json, os, signal, sys, time

channel = os.fdopen(int(sys.argv[2]), "w", buffering=1)
heard = lambda: json.loads(sys.stdin.readline() or "0") or os._exit(0)

def tell(**message):
    channel.write(json.dumps(message) + "\\n")

name = os.path.basename(heard()["tree"])
me = json.loads(name.replace("'", '"')) if name.startswith("{") else {}
if "unborn" in me:
    print("no libtorch", file=sys.stderr, flush=True)
    os._exit(3)
tell(hello={"device": {"slug": me.get("device", "toy"), "uuid": "", "kind": "cpu"}, "toolchain": {"pid": str(os.getpid())},
            "rows": []})
visits = 0

def record(row, status="ok"):
    return json.dumps({
        "schema": 1, "run": "r", "suite": "s", "started_at": "t", "op": "block_copy", "case": work["case"]["name"],
        "case_digest": "d", "shape": {}, "impl": row["entry"].split("[")[0], "layout": "HND", "status": status,
        "reason": "as told", "device": "toy", "device_kind": "cpu", "toolchain": {"pid": str(os.getpid())},
    })

while True:
    work = heard()
    rows = [row for row in work["rows"] if row["entry"].split("[")[0] not in me.get("lacks", [])]
    wrong = [row for row in rows if row["entry"].split("[")[0] in me.get("wrong", [])]
    right = [row for row in rows if row not in wrong]
    for row in wrong:
        tell(record=record(row, "wrong"), row=row["number"])
    if right:
        tell(ready=[row["number"] for row in right])
    slow = {}
    while right:
        asked = heard()
        if "finish" in asked:
            break
        if "spin" in asked:
            slow = {int(number): seconds for number, seconds in asked["spin"].items()}
            tell(ready=[row["number"] for row in right])
            continue
        visits += 1
        if me.get("dies") == work["case"]["name"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if "writes" in me:
            channel.write({"words": "debug\\n", "done": '{"done": true}\\n'}[me["writes"]])
        if me.get("hangs"):
            time.sleep(60)
        noise = 1 + 0.001 * (visits * 7919 % 11 - 5) / 5
        held_down = me.get("throttled") and visits % me["throttled"] == 0
        tell(seconds=None if held_down else me.get("us", 100) * 1e-6 * noise + slow.get(asked["visit"], 0.0))
    for row in right:
        tell(record=record(row), row=row["number"])
    tell(done=True)
"""


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(duel, "_START", STAND_IN)


def entry(name):
    return Entry(Impl(name=name, op="block_copy", prepare="toys:prepare"), HND)


def fight(old, new, *names, cases=(TINY,), rounds=2, visits=6, stall_s=30.0):
    """Two stand-ins against each other: the duel, and each row's pairs by round."""
    matches = [Match(case=case, entries=(entry(name), entry(name))) for case in cases for name in names or ("a",)]
    setup = Setup(sides=(Side(tree=Path(str(old))), Side(tree=Path(str(new)))), run="r", stall_s=stall_s)
    pairs = {number: [] for number in range(len(matches))}

    def play(fight, turn, numbers):
        for number, found in fight.alternate(numbers, visits).items():
            pairs[number].append(found)

    made = Duel(setup, matches)
    made.run(rounds, play)
    return made, pairs


def outcome(fought, number):
    """Status and reason of a row on both sides, over all rounds."""
    made, pairs = fought
    return [(record.status, record.reason) for record in merged(made, number, pairs[number])]


@pytest.mark.usefixtures("stand_in")
def test_pairs_are_of_the_two_trees_and_rounds_of_fresh_processes():
    """Old first in each pair; each round has its own two processes; samples stand pair by pair in the records."""
    made, pairs = fight({"us": 100}, {"us": 150}, "a", "b")

    assert {number: [len(found) for found in rounds] for number, rounds in pairs.items()} == {0: [6, 6], 1: [6, 6]}
    assert all(1.4 < new / old < 1.6 for rounds in pairs.values() for found in rounds for old, new in found)
    old, new = merged(made, 0, pairs[0])
    assert list(zip(old.launch_s.samples, new.launch_s.samples, strict=True)) == [p for found in pairs[0] for p in found]
    pids = {record.toolchain["pid"] for side in made.records[0] for record in side}
    assert len(pids) == 4


@pytest.mark.usefixtures("stand_in")
def test_a_visit_with_the_clock_held_down_makes_no_pair():
    """It is tried again, a bounded number of times, so that an arm that is always throttled ends."""
    _, pairs = fight({"throttled": 3}, {}, rounds=1)
    assert len(pairs[0][0]) == 6

    _, pairs = fight({"throttled": 1}, {}, rounds=1)
    assert pairs[0] == [[]]
    assert ATTEMPTS >= 2


@pytest.mark.usefixtures("stand_in")
def test_a_row_that_is_wrong_in_one_arm_is_not_visited():
    """The other rows of the case are."""
    fought = fight({}, {"wrong": ["a"]}, "a", "b")

    assert outcome(fought, 0) == [("ok", "as told"), ("wrong", "as told")]
    assert (fought[1][0], len(fought[1][1])) == ([], 2)


@pytest.mark.usefixtures("stand_in")
def test_an_implementation_that_a_tree_lacks_is_told():
    """A kernel that is new has no time before."""
    fought = fight({"lacks": ["a"]}, {}, "a", "b")

    status, reason = outcome(fought, 0)[OLD]
    assert status == "unsupported"
    assert "has no such implementation" in reason
    assert outcome(fought, 1) == [("ok", "as told")] * 2


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"dies": "copy.tiny"}, "killed by SIGKILL"),
        ({"hangs": 1}, "silent for 1 s"),
        ({"writes": "words"}, "spoilt its channel in 'starting': no message of ours: b'debug'"),
        ({"writes": "done"}, "spoilt its channel in 'starting': {'done': True}, where seconds was due"),
    ],
    ids=str,
)
def test_an_arm_that_dies_costs_its_case_and_no_other(how, said):
    """Both arms are started afresh for the next case; the reason is on its side, the other side says whose it was."""
    fought = fight({}, how, cases=(TINY, OTHER) if "dies" in how else (TINY,), rounds=1, stall_s=1.0)

    (old_status, old_reason), (new_status, new_reason) = outcome(fought, 0)
    assert (old_status, new_status) == ("skipped", "failed")
    assert said in new_reason
    assert old_reason.startswith("the other arm ")
    if "dies" in how:
        assert [len(found) for found in fought[1][1]] == [6]


@pytest.mark.usefixtures("stand_in")
def test_arms_that_cannot_start_or_are_on_two_devices_end_the_run():
    with pytest.raises(UsageError, match=r"the new arm died in 'starting': ended with exit code 3; last words: no libtorch"):
        fight({}, {"unborn": 1})
    with pytest.raises(UsageError, match="different devices: toy and other"):
        fight({}, {"device": "other"})


@pytest.mark.usefixtures("stand_in")
def test_no_process_is_left(monkeypatch):
    """Also when a play fails."""
    started = []
    monkeypatch.setattr(Arm, "__init__", lambda self, *a, make=Arm.__init__: (started.append(self), make(self, *a))[1])

    def play(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Duel(Setup(sides=(Side(tree=Path("{}")),) * 2), [Match(case=TINY, entries=(entry("a"),) * 2)]).run(1, play)
    assert len(started) == 2
    assert all(arm._child.process.poll() is not None for arm in started)


# Trees.


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A checkout with two commits: the table of implementations says which."""
    folder = tmp_path_factory.mktemp("repository")

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (folder / "impls").mkdir()
    for text in ("one", "two"):
        (folder / "impls/__init__.py").write_text(f"IMPLS = ()  # {text}\n")
        git("add", ".")
        git("commit", "-qm", text)
    return folder


def test_a_revision_becomes_a_tree_and_goes_away(repository):
    """The checkout itself is not touched, and no worktree is left behind."""
    with worktree("HEAD~1", repository) as tree:
        assert "one" in (tree / "impls/__init__.py").read_text()
        assert "two" in (repository / "impls/__init__.py").read_text()
        assert checkouts_of(tree) == checkouts_of(repository) == [repository, tree]

    assert not tree.exists()
    listed = subprocess.run(["git", "-C", repository, "worktree", "list"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1


def test_a_folder_is_used_as_it_is(repository):
    with worktree(str(repository)) as tree:
        assert tree == repository
    assert tree.exists()


@pytest.mark.parametrize("reference", ["nowhere", "--help", "HEAD:impls", ""])
def test_what_is_no_tree_is_refused_by_name(repository, reference):
    with pytest.raises(UsageError, match="neither a folder nor a revision"), worktree(reference, repository):
        pass


def test_another_repositorys_kernels_are_taken_from_its_other_revision(tmp_path, monkeypatch):
    """Its files and what they import come from its worktree; the table of ours is the same in both arms."""
    root, tree = tmp_path / "mine", tmp_path / "before"
    for folder in (root, tree):
        (folder / "kernels").mkdir(parents=True)
        (folder / "kernels/flash.py").touch()
    (root / "kernels/fresh.py").touch()
    monkeypatch.setattr("sys.path", [str(root), str(HOUSE), "/usr/lib"])
    files = [str(root / "kernels/flash.py"), str(root / "kernels/fresh.py")]
    old, new = sides_of(tree, root, files)

    assert (old.tree, new.tree, new.impl_files) == (HOUSE, HOUSE, files)
    assert old.impl_files == [str(tree / "kernels/flash.py")]
    assert old.path == [str(tree), str(HOUSE), "/usr/lib"]


def test_a_file_that_would_be_measured_against_itself_is_refused(tmp_path):
    """Of a file outside the checkout there is no other state, and a gate that finds it SAME has looked at nothing."""
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.touch()
    with pytest.raises(UsageError, match=r"elsewhere\.py lies outside .*both sides would run the same file"):
        sides_of(tmp_path / "before", tmp_path / "mine", [str(elsewhere)])


@pytest.mark.parametrize(
    ("tree", "file", "said"),
    [
        ("mine", "flash.py", "is this checkout itself: both sides would be the same"),
        ("links", "flash.py", r"links/flash\.py leads out of .*links, to .*mine/flash\.py"),
        ("before", "inner/flash.py", r"is of .*mine/inner, a checkout within .*mine, which does not hold it"),
    ],
)
def test_what_is_no_other_state_is_refused(tmp_path, tree, file, said):
    """The same folder, a link back, and a submodule, whose files are never in a worktree of what is around it."""
    for folder in ("mine", "before", "links"):
        (tmp_path / folder).mkdir()
    for folder in ("mine", "mine/inner"):
        subprocess.run(["git", "init", "-q", tmp_path / folder], check=True)
        (tmp_path / folder / "flash.py").touch()
    (tmp_path / "links/flash.py").symlink_to(tmp_path / "mine/flash.py")

    with pytest.raises(UsageError, match=said):
        sides_of(tmp_path / tree, tmp_path / "mine", [str(tmp_path / "mine" / file)])


def test_a_link_and_the_folder_one_stands_in_are_those_of_the_other_state(tmp_path, monkeypatch):
    """Where a link chooses the kernel, the old side's chooses the old one; what is read by a bare name lies beside it."""
    for folder, version in (("mine", "two"), ("before", "one")):
        (tmp_path / folder / "cases").mkdir(parents=True)
        for name in ("one", "two"):
            (tmp_path / folder / f"{name}.py").touch()
        (tmp_path / folder / "kernels.py").symlink_to(f"{version}.py")
    (tmp_path / "mine/fresh").mkdir()
    monkeypatch.chdir(tmp_path / "mine/cases")
    old, new = sides_of(tmp_path / "before", tmp_path / "mine", ["../kernels.py"])

    assert Path(*old.impl_files).resolve() == tmp_path / "before/one.py"
    assert (old.folder, new.folder) == (tmp_path / "before/cases", None)
    monkeypatch.chdir(tmp_path / "mine/fresh")
    assert sides_of(tmp_path / "before", tmp_path / "mine", ["../kernels.py"])[0].folder == tmp_path / "before"


def test_another_checkout_of_ours_gives_its_table_and_not_its_harness(repository, monkeypatch):
    """One instrument measures both."""
    monkeypatch.setattr("sys.path", [str(HOUSE), "/usr/lib"])
    old, new = sides_of(repository, HOUSE, [])

    assert (old.tree, new.tree) == (repository, HOUSE)
    assert old.path == new.path == [str(HOUSE), "/usr/lib"]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    """Both arms would be this checkout, and a gate that looks at nothing would pass."""
    with pytest.raises(UsageError, match="holds no table of implementations"):
        sides_of(tmp_path, HOUSE, [])


# The command, with real arms.

#: The table of another checkout: one kernel of this one, 4 ms slower, and its modules behind it.
TABLE = """
import dataclasses

from harness.ops.layouts import HND
from harness.registry import Impl

PADDED = dataclasses.replace(HND, name="PADDED")

IMPLS = (
    Impl(name="torch.block_copy", op="block_copy", prepare="impls.slow:prepare", layouts=(HND, PADDED)),
    Impl(name="torch.gather", op="attention", prepare="impls.slow:broken"),
    Impl(name="torch.block_gone", op="block_copy", prepare="impls.slow:prepare"),
    Impl(name="numpy.gone", op="block_copy", prepare="impls.slow:prepare"),
)
"""
SLOW = """
import time
from impls.torch_block_copy import BlockCopy


class Slow(BlockCopy):
    def launch(self, *tensors):
        super().launch(*tensors)
        end = time.perf_counter() + 4e-3
        while time.perf_counter() < end:
            pass


prepare = Slow
"""


@pytest.fixture
def other_tree(tmp_path):
    """Another checkout, of the few files that an arm takes from it."""
    folder = tmp_path / "other" / "impls"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(TABLE)
    (folder / "slow.py").write_text(SLOW)
    (folder / "torch_block_copy.py").write_text((HOUSE / "impls/torch_block_copy.py").read_text())
    return folder.parent


def test_each_arm_runs_the_kernels_of_its_own_tree(other_tree, tmp_path, capsys):
    """A launch of some 0.1 ms here takes 4 ms more there: FASTER by far, though one harness measures both."""
    words = ["ab", str(other_tree), "--impl", "torch.block_*[HND],torch.gather[HND],numpy.dense[HND]", "--rounds", "1",
             "--case", "edges.length_1,edges.copy_one", "--device", "cpu", "--visits", "5",
             "--runs-dir", str(tmp_path / "runs")]  # fmt: skip
    assert main([*words, "--json"]) == 0

    data = json.loads(capsys.readouterr().out)
    dense, copy, gather = sorted(data["rows"], key=lambda row: row["impl"])
    assert [dense["verdict"], copy["verdict"], gather["verdict"]] == ["NEW", "FASTER", "NEW"]
    assert "has no such implementation" in dense["reason"]
    assert "prepare: AttributeError" in gather["reason"]
    assert copy["old_s"] > 4e-3 > copy["new_s"]
    (folder,) = (tmp_path / "runs").iterdir()
    old, new = (load(folder / f"{name}.jsonl")[0][-1] for name in ("old", "new"))
    assert (old.run, new.run) == (f"{folder.name}.old", f"{folder.name}.new")
    assert len(old.launch_s.samples) == len(new.launch_s.samples) == 5
    assert old.toolchain["revision"] == "unknown"  # a folder without history
    assert (folder / "summary.md").read_text().startswith("### 2 NEW, 1 FASTER")
    assert "Gone in this checkout: torch.block_copy[PADDED], torch.block_gone." in data["notes"]


#: A kernel of one's own, `slower` seconds longer a launch.
OF_ONES_OWN = SLOW.partition("\n\n\nprepare")[0].replace("4e-3", "{slower}") + """

from harness.registry import Impl

IMPLS = (Impl(name="mine.copy", op="block_copy", prepare="mine_of_no_history:Slow"),)
"""


def test_a_folder_without_history_has_another_state_in_another_folder(tmp_path, monkeypatch, capsys):
    """Where there was no git checkout, the file of the folder that one stands in stood for both, and was SAME as itself."""
    copies = {"op": "block_copy", "num_kv_heads": 1, "head_dim": 16, "block_size": 4, "num_copies": 1, "num_blocks": 8}
    cases = [{**copies, "name": "my.gone"}, {**copies, "name": "my.other"}, {**copies, "name": "my.same"}]
    changed = [{**cases[1], "num_copies": 2}, cases[2]]
    for name, slower, of in (("before", "0", cases), ("now", "4e-3", changed)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cases.json").write_text(json.dumps(of))
        (tmp_path / name / "mine_of_no_history.py").write_text(OF_ONES_OWN.replace("{slower}", slower))
    monkeypatch.chdir(tmp_path / "now")
    words = ["ab", "../before", "--impl-file", "mine_of_no_history.py", "--impl", "mine.copy[HND]", "--rounds", "1",
             "--case-file", "cases.json", "--case", "my.same", "--device", "cpu", "--visits", "5",
             "--runs-dir", "runs", "--json"]  # fmt: skip

    assert main(words) == 1
    data = json.loads(capsys.readouterr().out)
    (row,) = data["rows"]
    assert row["verdict"] == "SLOWER"
    assert "Cases that are gone or others in this checkout: my.gone, my.other." in data["notes"]
    assert row["new_s"] > 4e-3 > row["old_s"]


@pytest.mark.parametrize(
    ("spun", "code", "said"),
    [
        ("float(open('spin').read())", 1, "1 SLOWER"),
        ("__import__('spun_beside').SPIN", 2, "has loaded {now}/spun_beside.py, which is of {now}: both sides would"),
    ],
    ids=["by-a-bare-name", "by-a-path-to-one-place"],
)
def test_what_a_kernel_reads_and_imports_is_of_its_state(tmp_path, monkeypatch, capsys, spun, code, said):
    """Both arms stood in one folder, and imported what a path written out led them to: a slower kernel was SAME as itself."""
    for name, slower in (("before", "0"), ("now", "4e-3")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "spin").write_text(slower)
        (folder / "spun_beside.py").write_text(f"SPIN = {slower}")
        found = f"import sys\nsys.path.insert(0, {str(tmp_path / 'now')!r})\n"
        text = found * (code == 2) + OF_ONES_OWN.replace("{slower}", spun)
        (folder / f"mine_{code}.py").write_text(text.replace("mine_of_no_history", f"mine_{code}"))
    monkeypatch.chdir(tmp_path / "now")
    monkeypatch.setattr("sys.path", [*sys.path])  # which the file changes here, too
    words = ["ab", "../before", "--impl-file", f"mine_{code}.py", "--impl", "mine.copy[HND]", "--rounds", "1",
             "--case", "edges.copy_one", "--device", "cpu", "--visits", "3", "--runs-dir", "runs"]  # fmt: skip

    assert main(words) == code
    assert said.replace("{now}", str(tmp_path / "now")) in "".join(capsys.readouterr())


def test_a_folder_without_the_file_is_no_other_state(tmp_path, monkeypatch, capsys):
    """One folder too deep, or of a branch's name: the kernel was NEW, which is no reason to stop anybody."""
    (tmp_path / "release").mkdir()
    (tmp_path / "mine_alone.py").write_text(OF_ONES_OWN.replace("{slower}", "0").replace("mine_of_no_history", "mine_alone"))
    monkeypatch.chdir(tmp_path)
    words = ["ab", "release", "--impl-file", "mine_alone.py", "--impl", "mine.copy", "--case", "edges.copy_one"]

    assert main([*words, "--device", "cpu", "--runs-dir", "runs"]) == 2
    assert "release: a folder that holds none of mine_alone.py and so no other state of" in capsys.readouterr().err


def test_an_installed_packages_kernels_have_no_other_state_in_ours(tmp_path, monkeypatch, capsys):
    """They were NEW against each of our revisions, however slow they had become."""
    table = [Impl(name="theirs.copy", op="block_copy", prepare="impls.torch_block_copy:prepare")]
    monkeypatch.setattr("harness.registry.load_points", lambda: [table])
    words = ["ab", "HEAD", "--impl", "theirs.copy", "--case", "edges.copy_one", "--device", "cpu"]

    assert main([*words, "--runs-dir", str(tmp_path)]) == 2
    assert "theirs.copy: of an installed package, of which HEAD is no other state" in capsys.readouterr().err


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("end", "at", "before", "after", "said"),
    [
        (KeyboardInterrupt(), 1, [], [], "interrupted; nothing was measured\n"),
        (UsageError("the old arm died"), 1, [], [], "the old arm died\n"),
        (KeyboardInterrupt(), 2, [], [3],
         "interrupted; 1 of 2 rows were not measured, 1 of 2 rows were measured in fewer than 2 rounds; what was measured is "),
        (KeyboardInterrupt(), 4, [3, 3], [6, 3],
         "interrupted; 1 of 2 rows were measured in fewer than 2 rounds; what was measured is kept in "),
        (UsageError("the old arm died"), 3, [3, 3], [3, 3], "the old arm died; 2 of 2 rows were measured in fewer than 2 "),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_that_is_broken_off_keeps_what_was_measured(tmp_path, monkeypatch, capsys, end, at, before, after, said):
    """Two rounds of two cases, three pairs of visits each. A round that is over is kept already when the run ends in the
    middle of the next, and so then is each case that was over; the summary's first word is that there is more to measure.
    Where nothing is kept, no empty folder is.
    """
    def kept():
        """How many samples each row has, the same on both sides."""
        files = [list(tmp_path.glob(f"*/{name}.jsonl")) for name in ("old", "new")]
        old, new = ([len(record.launch_s.samples) for file in of for record in load(file)[0]] for of in files)
        assert old == new
        return old

    found = broken_off(monkeypatch, at, end, kept)
    words = ["ab", "--impl", "torch.block_copy,numpy.block_copy", "--case", "edges.copy_one,edges.copy_chained",
             "--visits", "3", "--device", "cpu", "--runs-dir", str(tmp_path)]  # fmt: skip
    assert main(words) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"pagedbench: {said}")
    assert err.count("\n") == 1
    assert (found, kept()) == (before, after)
    folders = list(tmp_path.iterdir())
    assert len(folders) == bool(after)
    for folder in folders:
        assert (folder / "summary.md").read_text().startswith("### INCOMPLETE: ")
        comparison = json.loads((folder / "comparison.json").read_text())
        assert (comparison["exit_code"], len(comparison["rows"])) == (2, len(after))
        assert any(note.startswith("Incomplete: ") for note in comparison["notes"])


#: A kernel that notes the process it is prepared in; from the third process on, the first of the second round, it sleeps.
SLEEPER = """
import os, time
from pathlib import Path
from harness.registry import Impl

MARKS = Path(os.environ["TOY_MARKS"])

def prepare(spec):
    from impls.torch_block_copy import prepare
    (MARKS / str(os.getpid())).touch()
    if len(list(MARKS.iterdir())) > 2:
        (MARKS.parent / "asleep").touch()
        time.sleep(60)
    return prepare(spec)

IMPLS = (Impl(name="toy.one", op="block_copy", prepare="sleepers:prepare"),)
"""


@pytest.mark.parametrize(
    ("words", "how", "code", "files"),
    [
        (["ab", "before"], signal.SIGINT, 2, ["comparison.json", "new.jsonl", "old.jsonl", "summary.md"]),
        (["calibrate", "--rounds", "1", "--repeats", "2"], signal.SIGTERM, -signal.SIGTERM, ["calibration.json"]),
    ],
)
def test_a_signal_leaves_what_was_measured_and_no_process(tmp_path, words, how, code, files):
    """In the second round, with real arms: SIGTERM ends the command as it ends `run`, and what was over is there."""
    for folder in ("before", "marks"):
        (tmp_path / folder).mkdir()
    for folder in (tmp_path / "before", tmp_path):
        (folder / "sleepers.py").write_text(SLEEPER)
    words = [*words, "--impl-file", "sleepers.py", "--impl", "toy.one", "--case", "edges.copy_one",
             "--visits", "2", "--device", "cpu", "--runs-dir", str(tmp_path / "runs")]  # fmt: skip
    env = {**os.environ, "TOY_MARKS": str(tmp_path / "marks"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOUSE)}
    with started(words, env=env, cwd=tmp_path) as running:
        end = time.monotonic() + 60
        while not (tmp_path / "asleep").exists():
            assert running.poll() is None, running.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.02)
        running.send_signal(how)
        running.communicate(timeout=30)
    pids = [int(mark.name) for mark in (tmp_path / "marks").iterdir()]
    while any(map(lives, pids)) and time.monotonic() < end:  # a parent's death reaches its children a moment later
        time.sleep(0.02)

    assert running.returncode == code
    assert sorted(file.name for file in tmp_path.glob("runs/*/*")) == files
    assert not any(map(lives, pids))


def lives(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_a_folder_of_out_that_cannot_be_is_refused_before_anything_is_measured(tmp_path, capsys):
    """It was found out after both arms had run, in a line that named neither rule nor option."""
    (tmp_path / "file").touch()
    words = ["ab", "--impl", "torch.block_copy,numpy.block_copy", "--case", "edges.copy_one", "--device", "cpu"]

    assert main([*words, "--runs-dir", str(tmp_path / "runs"), "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith(f"pagedbench: cannot write results to {tmp_path / 'file'}: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--impl", "torch.gather"], "must name the two implementations"),
        (["--impl", "torch.gather,torch.block_copy", "--case", "edges.copy_one"], "is of the operator of both"),
        (["nowhere"], "neither a folder nor a revision"),
        (["--impl", "torch.gather,numpy.dense", "--visits", "1"], "--visits must be 2 at least (got 1)"),
        (["--visits", "0"], "must be a whole number of at least 1"),
        (["--impl", "torch.*,numpy.dense"], "torch.* means torch.gather, torch.blocked"),
        (["--impl", "torch.gather,numpy.dense", "--stall", "nan"], "must be seconds above 0 (got 'nan')"),
    ],
)
def test_wrong_usage_is_named(tmp_path, capsys, words, error):
    try:
        code = main(["ab", *words, "--runs-dir", str(tmp_path), "--device", "cpu"])
    except SystemExit as left:
        code = left.code

    assert code == 2
    assert error in capsys.readouterr().err

"""A broken run is continued where it broke off, and only as the run that it was."""

from __future__ import annotations

import json

import pytest

from harness.cli import main
from harness.record import parse_line
from harness.store import RECORDS, Appender, load

IMPLS = "numpy.dense[HND],numpy.online[HND],torch.gather[HND]"
CASES = "edges.length_1,edges.length_0"


def check(out, *more, cases=CASES, command="check"):
    words = [command, "--impl", IMPLS, "--case", cases, "--device", "cpu", "--in-process", "--out", str(out), *more]
    return main(words)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that ended as it should: six records."""
    out = tmp_path_factory.mktemp("runs")
    assert check(out) == 0
    (folder,) = out.iterdir()
    return folder


@pytest.fixture
def broken(whole, tmp_path):
    """The same run, killed in the middle of its third line and before it wrote how it ended."""
    folder = tmp_path / whole.name
    folder.mkdir()
    lines = (whole / RECORDS).read_text().splitlines(keepends=True)
    (folder / RECORDS).write_text("".join(lines[:2]) + lines[2][:100])
    (folder / "run.json").write_text((whole / "run.json").read_text())
    return folder


def test_only_what_has_no_record_is_measured_again(broken, whole, capsys):
    """Records that are there stay as they are, byte for byte; the torn line is told and its row done again."""
    before = (broken / RECORDS).read_text().splitlines()[:2]

    assert check(broken.parent, "--resume", str(broken)) == 0

    records, problems = load(broken)
    assert (broken / RECORDS).read_text().splitlines()[:2] == before
    assert [(r.case, r.row, r.status) for r in records] == [(r.case, r.row, r.status) for r in load(whole)[0]]
    assert len(problems) == 1
    assert f"{RECORDS}:3: skipped" in capsys.readouterr().err


def test_a_run_that_lacks_nothing_is_only_shown(whole, capsys):
    """Resuming twice measures nothing twice, and the tables show every record."""
    before = (whole / RECORDS).read_bytes()

    assert check(whole.parent, "--resume", str(whole)) == 0

    assert (whole / RECORDS).read_bytes() == before
    assert "numpy.online" in capsys.readouterr().out


def test_rows_that_differ_in_parameters_only_are_rows_of_their_own(tmp_path):
    """`--set tile=16` is not done because tile=256 is."""
    words = ["check", "--impl", "torch.blocked[HND]", "--case", "edges.length_1", "--device", "cpu", "--in-process"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    assert main([*words, "--set", "tile=16", "--resume", str(folder)]) == 0

    assert [record.params for record in load(folder)[0]] == [{"tile": 256}, {"tile": 16}]


def test_another_device_is_refused_by_name(broken, capsys):
    """Numbers of two machines in one run would be compared with each other."""
    rewrite(broken, device="nvidia-h200")

    assert check(broken.parent, "--resume", str(broken)) == 2
    error = capsys.readouterr().err
    assert "begun on nvidia-h200, this is" in error
    assert len(load(broken)[0]) == 2


def test_another_case_under_the_same_name_is_refused_by_name(broken, capsys):
    """A case file that was edited in between would give one name to two problems."""
    rewrite(broken, case_digest="0" * 12)

    assert check(broken.parent, "--resume", str(broken)) == 2
    assert "the case edges.length_0 was 000000000000 there and is" in capsys.readouterr().err


def test_another_command_is_refused_by_name(broken, capsys):
    """A row that was only checked would pass for one that was timed."""
    assert check(broken.parent, "--resume", str(broken), command="bench") == 2
    assert "was begun by `pagedbench check` (got `pagedbench bench`)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "run"])
def test_what_the_run_was_asked_for_must_be_said_again(broken, capsys, command):
    """Else the default suite would be measured into it: its command is told, and what of it is missing now."""
    facts = {"command": command, "arguments": [command, "--suite=full", "--impl", "a b", "--patient", "--device", "cpu"]}
    (broken / "run.json").write_text(json.dumps(facts))
    before = (broken / RECORDS).read_bytes()

    assert main([command, "--impl", "numpy.dense", "--resume", str(broken)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"pagedbench: --resume {broken}: was begun by `pagedbench {command} --suite=full --impl 'a b' --patient --device cpu`; "
        "give its --patient, --suite again, too"
    )
    assert (broken / RECORDS).read_bytes() == before


def test_a_run_of_the_default_selection_needs_no_words(broken, capsys, monkeypatch):
    """What was asked for is what is asked for again."""
    monkeypatch.setattr("harness.commands.engines.InProcess.records", lambda _: iter(()))
    (broken / "run.json").write_text(json.dumps({"command": "check", "arguments": ["check"]}))

    assert main(["check", "--in-process", "--resume", str(broken)]) == 0


def test_a_run_that_does_not_say_what_it_was_is_not_guessed(broken, capsys):
    """Without a run.json, what is missing is named by the user or nothing is measured."""
    (broken / "run.json").unlink()

    assert main(["check", "--device", "cpu", "--in-process", "--resume", str(broken)]) == 2
    assert "does not say what it was asked for; say it again, with --suite, --impl" in capsys.readouterr().err
    assert check(broken.parent, "--resume", str(broken)) == 0


def test_a_damaged_run_json_is_told(broken, capsys):
    """What the run was can no longer be held against what is asked now; its records still can."""
    (broken / "run.json").write_text('{"command": "bench')

    assert check(broken.parent, "--resume", str(broken)) == 0
    assert f"{broken / 'run.json'}: skipped, not JSON: " in capsys.readouterr().err


def test_a_folder_with_one_run_is_that_run(broken, capsys):
    """What --out named: its run is continued where it lies."""
    assert check(broken.parent, "--resume", str(broken.parent)) == 0
    assert len(load(broken)[0]) == 6
    assert not (broken.parent / RECORDS).exists()


def test_no_folder_is_refused_by_name(tmp_path, capsys):
    assert check(tmp_path, "--resume", str(tmp_path / "nowhere")) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "garbage\n"])
def test_a_folder_without_a_record_is_not_continued(broken, capsys, text):
    """It would be a whole run, of whatever suite is the default, and nobody has asked for that."""
    (broken / RECORDS).write_text(text)
    assert check(broken.parent, "--resume", str(broken)) == 2

    assert f"--resume {broken}: holds no record that can be read; start a run of its own" in capsys.readouterr().err
    assert (broken / RECORDS).read_text() == text


def test_a_run_that_is_still_written_is_not_continued(broken, capsys):
    """Two writers would measure everything twice."""
    running = Appender(broken)
    try:
        assert check(broken.parent, "--resume", str(broken)) == 2
    finally:
        running.close()
    assert "another run is writing to it" in capsys.readouterr().err


def test_a_run_says_what_it_was_before_it_ends(tmp_path, monkeypatch):
    """One that is killed leaves its command and arguments, and no end."""
    monkeypatch.setattr("harness.commands.engines.InProcess.records", lambda _: iter(()))
    check(tmp_path)
    (folder,) = tmp_path.iterdir()

    said = json.loads((folder / "run.json").read_text())
    assert said["command"] == "check"
    assert said["arguments"][:3] == ["check", "--impl", IMPLS]
    assert "ended_at" not in said


def rewrite(folder, **fields):
    """Change fields of every whole record of a run."""
    lines = (folder / RECORDS).read_text().splitlines()[:2]
    (folder / RECORDS).write_text("".join(json.dumps({**json.loads(line), **fields}) + "\n" for line in lines))
    assert all(parse_line(line) for line in (folder / RECORDS).read_text().splitlines())

"""A run becomes the baseline when nothing speaks against it, or when somebody says that it shall."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace

import pytest

from harness.baseline import baseline_of, load_baseline, log_of, read_log
from harness.cli import main
from harness.names import UsageError
from tests.harness.runs import row, run, save, untimed


@pytest.fixture(autouse=True)
def _this_is_an_h200(monkeypatch):
    monkeypatch.setattr("harness.commands.accept._device_here", lambda wanted: "nvidia-h200")


def accept(tmp_path, records, *more, message="first"):
    """Accept a run of these records; its exit code."""
    folder = save(tmp_path / f"run{len(list(tmp_path.glob('run*')))}", records)
    return main(["accept", str(folder), "-m", message, "--baselines", str(tmp_path / "baselines"), *more])


def baseline(tmp_path):
    return load_baseline("nvidia-h200", tmp_path / "baselines")[0]


def test_a_clean_run_becomes_the_baseline(tmp_path, capsys):
    """Its records, byte for byte, and a line in the log with the message, the run and the revision."""
    assert accept(tmp_path, run(3)) == 0

    assert baseline(tmp_path) == run(3)
    (entry,) = read_log(baseline_of("nvidia-h200", tmp_path / "baselines"))
    assert (entry["message"], entry["runs"], entry["revisions"], entry["timed"]) == ("first", ["r"], ["aaaa"], 3)
    assert "3 timed rows; accepted 1 times so far" in capsys.readouterr().out


def test_a_new_run_is_held_against_it(tmp_path, capsys):
    """`compare RUN` finds the baseline by the run's device."""
    accept(tmp_path, run(3))
    new = save(tmp_path / "new", run(3, seed=1, slow=(1,), by=1.1))

    assert main(["compare", str(new), "--baselines", str(tmp_path / "baselines")]) == 1
    assert "against the baseline of nvidia-h200" in capsys.readouterr().out


def test_history_is_kept(tmp_path):
    """Accepting again replaces the records and adds to the log."""
    accept(tmp_path, run(3))
    accept(tmp_path, run(3, seed=1), message="a faster merge")

    assert baseline(tmp_path) == run(3, seed=1)
    log = read_log(baseline_of("nvidia-h200", tmp_path / "baselines"))
    assert [entry["message"] for entry in log] == ["first", "a faster merge"]


OBSTACLES = {
    "failures": lambda: [untimed(row(), "failed", "out of memory")],
    "wrong": lambda: [untimed(row(), "wrong", "3 outputs off")],
    "throttled": lambda: [row(flags=("throttled: 3 visits discarded",))],
    "doubts": lambda: [row(flags=("timers disagree: events say 1, the second opinion 2",))],
    "device": lambda: [row(device="nvidia-a100")],
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_speaks_against_a_run_is_named_and_can_be_allowed(tmp_path, capsys, name):
    """Exit code 2, the row and the reason; --allow NAME lets that one thing pass, and the log says that it did."""
    records = OBSTACLES[name]()
    records.append(replace(records[0], **{"case": "other", "case_digest": "o", "status": "ok", "reason": None, "flags": (),
                                          "launch_s": row().launch_s}))  # fmt: skip
    others = ",".join({*OBSTACLES, "missing"} - {name})
    folder = tmp_path / "baselines"

    assert accept(tmp_path, records, "--allow", others) == 2
    assert f"--allow {name} makes it one" in capsys.readouterr().err
    assert not folder.exists()
    assert accept(tmp_path, records, "--allow", name) == 0
    (log,) = folder.glob("*.log.jsonl")
    assert json.loads(log.read_text())["allowed"] == ({} if name == "device" else {name: 1})


@pytest.mark.parametrize("flag", ["never converged: within 2% after 15 visits", "workspace: declares 0 bytes, holds 4"])
def test_remarks_that_say_nothing_of_the_time_do_not_matter(tmp_path, flag):
    assert accept(tmp_path, [row(flags=(flag,))]) == 0


def test_a_peer_that_fails_does_not_matter(tmp_path):
    """As for the exit code of a run."""
    assert accept(tmp_path, [row(), untimed(row(impl="peer.x"), "failed")]) == 0


def test_a_baseline_loses_no_row_by_accident(tmp_path, capsys):
    """A run of fewer rows is refused by name; --merge keeps the others, --allow missing lets them go."""
    accept(tmp_path, run(4))
    part = run(2, seed=1)

    assert accept(tmp_path, part) == 2
    assert "cuda.split_kv[HND] on case.3: in the baseline, and not timed in this run" in capsys.readouterr().err
    assert accept(tmp_path, part, "--merge") == 0
    assert {r.case: r for r in baseline(tmp_path)} == {r.case: r for r in (*run(4)[2:], *part)}
    assert accept(tmp_path, part, "--allow", "missing") == 0
    assert baseline(tmp_path) == part


@pytest.mark.parametrize(
    ("records", "more", "error"),
    [
        ([untimed(row(), "skipped")], [], "has no time of any row"),
        ([row(), row(device="nvidia-a100")], [], "holds records of nvidia-a100 and nvidia-h200"),
        ([row()], ["--allow", "anything"], "must be of failures, wrong"),
        ([row()], ["-m", " "], "--message must say something"),
        ([row(device="../../etc/x")], ["--allow", "device"], "a device's name must be of lower-case letters"),
    ],
)
def test_what_cannot_be_a_baseline_is_refused(tmp_path, capsys, records, more, error):
    assert accept(tmp_path, records, *more) == 2
    assert error in capsys.readouterr().err


def test_a_baseline_of_another_schema_is_refused_by_name(tmp_path):
    """Skipped as odd lines, its rows would pass for missing."""
    accept(tmp_path, run(2))
    file = baseline_of("nvidia-h200", tmp_path / "baselines")
    file.write_text(file.read_text().replace('"schema":1', '"schema":7'))

    with pytest.raises(UsageError, match=r"jsonl:1: a record of schema 7, this version reads and writes 1"):
        baseline(tmp_path)


def test_compare_refuses_a_baseline_of_another_schema(tmp_path, capsys):
    """Exit code 2, the file, both schemas and the way out; no row is called MISSING."""
    accept(tmp_path, run(2))
    file = baseline_of("nvidia-h200", tmp_path / "baselines")
    file.write_text(file.read_text().replace('"schema":1', '"schema":7'))
    new = save(tmp_path / "new", run(2))

    assert main(["compare", str(new), "--baselines", str(tmp_path / "baselines")]) == 2
    said = capsys.readouterr()
    assert f"{file}:1: a record of schema 7, this version reads and writes 1; measure again" in said.err
    assert "MISSING" not in said.out


def test_a_baseline_of_another_schema_can_be_replaced(tmp_path, capsys):
    """Told to, since what it holds cannot be seen to be lost; and whole, since its rows cannot be kept."""
    accept(tmp_path, run(2))
    file = baseline_of("nvidia-h200", tmp_path / "baselines")
    file.write_text(file.read_text().replace('"schema":1', '"schema":7'))

    assert accept(tmp_path, run(3)) == 2
    assert "--allow schema makes it one" in capsys.readouterr().err
    assert accept(tmp_path, run(3), "--merge", "--allow", "schema") == 2
    assert accept(tmp_path, run(3), "--allow", "schema") == 0
    assert baseline(tmp_path) == run(3)


def _merge_one(tmp_path, start, number):
    """Accept one row into the baseline, at the same moment as the others."""
    folder = save(tmp_path / f"part{number}", [row(case=f"case.{number}")])
    start.wait()
    main(["accept", str(folder), "-m", f"part {number}", "--merge", "--baselines", str(tmp_path / "baselines")])


def test_processes_that_merge_at_once_lose_nothing(tmp_path):
    """Each reads the baseline, adds its row and writes it: every row is there, and every line of the log."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(6)
    writers = [context.Process(target=_merge_one, args=(tmp_path, start, number)) for number in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert {record.case for record in baseline(tmp_path)} == {f"case.{number}" for number in range(6)}
    log = read_log(baseline_of("nvidia-h200", tmp_path / "baselines"))
    assert {entry["message"] for entry in log} == {f"part {number}" for number in range(6)}


def test_a_run_accepted_twice_changes_the_log_alone(tmp_path):
    """Nor does a clock that has gone back between the two."""
    accept(tmp_path, run(3, started_at="2031-01-01T00:00:00+00:00"))
    accept(tmp_path, run(3, started_at="1999-01-01T00:00:00+00:00"), message="again")
    new = save(tmp_path / "new", run(3, started_at="1999-01-01T00:00:00+00:00"))

    assert baseline(tmp_path) == run(3, started_at="1999-01-01T00:00:00+00:00")
    assert main(["compare", str(new), "--baselines", str(tmp_path / "baselines")]) == 0


def test_a_torn_line_in_the_baseline_or_its_log_harms_no_other(tmp_path):
    """A checkout cut short in either file."""
    accept(tmp_path, run(2))
    file = baseline_of("nvidia-h200", tmp_path / "baselines")
    file.write_text(file.read_text()[:-50])
    log_of(file).write_text(log_of(file).read_text()[:-10])
    records, problems = load_baseline("nvidia-h200", tmp_path / "baselines")

    assert (records, len(problems)) == (run(2)[:1], 1)
    accept(tmp_path, run(2), message="again")
    assert [entry["message"] for entry in read_log(file)] == ["again"]


def test_no_baseline_is_said_with_the_way_to_one(tmp_path, capsys):
    new = save(tmp_path / "new", run(1))

    assert main(["compare", str(new), "--baselines", str(tmp_path)]) == 2
    assert "no baseline for nvidia-h200" in capsys.readouterr().err

"""The history of rows: nothing twice, nothing lost, and a step is found when there is one."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
from dataclasses import replace

import pytest

from harness.cli import main
from harness.history import add, by_series, points, read
from harness.steps import find_steps
from tests.harness.runs import row, run, save, untimed


def series(seed, length=20, noise=0.003, at=None, by=1.0):
    """Seconds over runs, with one step before run `at`."""
    chance = random.Random(seed)
    return [
        100e-6 * (by if at is not None and i >= at else 1.0) * math.exp(chance.gauss(0, noise)) for i in range(length)
    ]


@pytest.mark.parametrize("length", [4, 6, 12, 40])
def test_a_series_without_a_step_shows_one_as_rarely_as_stated(length):
    """5% asked for: at most that of 1,000 quiet series, up to what chance adds, at any length."""
    alarms = sum(bool(find_steps(series(seed, length), 0.05)) for seed in range(1000))

    assert alarms <= 65


def test_the_stated_rate_is_not_bought_with_blindness():
    """Places overlap, which Bonferroni does not know, so the true rate is lower; asked for one in two, alarms do come."""
    assert sum(bool(find_steps(series(seed, 40), 0.5)) for seed in range(300)) >= 6


@pytest.mark.parametrize(("at", "by"), [(10, 1.02), (10, 0.98), (17, 1.03), (3, 1.03)])
def test_a_step_is_found_where_it_is(at, by):
    """2% at 0.3% of scatter between runs: always, and at its place in at least 90 of 100."""
    found = [find_steps(series(seed, at=at, by=by), 0.001) for seed in range(100)]

    assert sum(len(steps) == 1 for steps in found) >= 97
    assert sum(bool(steps) and steps[0].at == at for steps in found) >= 90
    assert sum(steps[0].ratio for steps in found if steps) / len(found) == pytest.approx(by, abs=0.03)


@pytest.mark.parametrize(
    ("length", "at", "by"), [(6, 3, 1.3), (8, 6, 1.1), (8, 4, 2.0), (10, 5, 1.05), (12, 10, 0.7), (20, 10, 1.02)]
)
def test_a_large_step_does_not_hide_itself_in_a_short_history(length, at, by):
    """At the level of one of 300 rows on a page that keeps 1%: the step is no part of the scatter that it is held against."""
    found = [find_steps(series(seed, length, at=at, by=by), 0.01 / 300) for seed in range(100)]

    assert sum([step.at for step in steps] == [at] for steps in found) >= 95


@pytest.mark.parametrize("rise", [True, False])
def test_steps_do_not_hide_each_other(rise):
    """Three of 10% in 24 runs, all up or up and down: where each one is."""
    for seed in range(20):
        passed = [sum(i >= at for at in (6, 12, 18)) for i in range(24)]
        values = [x * 1.1 ** (n if rise else n % 2) for x, n in zip(series(seed, 24), passed, strict=True)]

        assert [step.at for step in find_steps(values, 0.001)] == [6, 12, 18]


def test_two_steps_are_two():
    """Up at run 8, down again at run 16."""
    values = [x * (1.03 if 8 <= i < 16 else 1.0) for i, x in enumerate(series(1, 24))]
    steps = find_steps(values, 0.001)

    assert [step.at for step in steps] == [8, 16]
    assert steps[0].ratio * steps[1].ratio == pytest.approx(1, abs=0.005)


def test_one_odd_run_is_no_step():
    """It takes a second run to make one, also at the end."""
    values = series(2, 16, noise=0.002)

    assert find_steps([*values[:8], values[8] * 1.3, *values[9:]], 0.01) == []
    assert find_steps([*values, values[0] * 1.05], 0.01) == []
    assert [s.at for s in find_steps([*values, values[0] * 1.05, values[1] * 1.05], 0.01)] == [16]


def test_steps_below_the_threshold_are_left_out():
    """A thousandth, however certain, is nobody's alarm."""
    values = series(3, 40, noise=0.0005, at=20, by=1.004)

    assert len(find_steps(values, 0.01)) == 1
    assert find_steps(values, 0.01, least_change=0.01) == []


def test_runs_equal_to_the_digit_are_no_proof():
    """A step of 0.005% between readings without any scatter is a clock's own."""
    assert find_steps([1.0] * 5 + [1.00005] * 5, 0.01) == []


# The file.


def a_run(name, seed=0, **fields):
    return [replace(record, run=name) for record in run(3, seed=seed, **fields)]


def test_a_run_adds_one_line_a_timed_row(tmp_path):
    """Rows without a time and controls say nothing about time."""
    records = [*a_run("one"), untimed(row(case="x"), "wrong"), row(case="y", role="control")]
    file = tmp_path / "h.jsonl"

    assert add(file, points(records)) == 3
    found, problems = read(file)
    assert (found, problems) == (points(records), [])
    assert (found[0].revision, found[0].kernel, found[0].launch_s) == ("aaaa", "aa", records[0].launch_s.median)


def test_a_run_added_twice_leaves_no_second_line(tmp_path):
    file = tmp_path / "h.jsonl"
    add(file, points(a_run("one")))
    before = file.read_bytes()

    assert add(file, points(a_run("one"))) == 0
    assert file.read_bytes() == before


@pytest.mark.parametrize("name", ["case_digest", "run", "revision", "started_at", "unit"])
def test_a_line_whose_text_is_none_is_named_and_skipped(tmp_path, name):
    """The others stay, and another run can be added."""
    file = tmp_path / "h.jsonl"
    add(file, points(a_run("one")))
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps({**json.loads(first), name: ["x"]}), *others]) + "\n")

    found, problems = read(file)
    assert len(found) == 2
    assert f"{name} must be a text (got ['x'])" in problems[0]
    assert add(file, points(a_run("two"))) == 3


def test_order_is_that_of_adding_whatever_the_clocks_say(tmp_path):
    """A machine whose clock is ten years slow does not rewrite the past."""
    file = tmp_path / "h.jsonl"
    for name, at in (("one", "2026-11-30T00:00:00+00:00"), ("two", "2016-11-30T00:00:00+00:00")):
        add(file, points(a_run(name, started_at=at)))

    assert {tuple(point.run for point in line) for line in by_series(read(file)[0]).values()} == {("one", "two")}


def _add_many(file, name):
    for i in range(20):
        add(file, points(a_run(f"{name}.{i}")))


def test_two_processes_adding_at_once_lose_nothing(tmp_path):
    """Every line whole, every row there, once."""
    file = tmp_path / "h.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_many, args=(file, name)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    found, problems = read(file)
    assert (len(found), problems) == (2 * 20 * 3, [])
    assert len({(point.run, *point.series) for point in found}) == 2 * 20 * 3


def test_a_torn_last_line_swallows_nothing(tmp_path):
    """It is named and skipped; what is added next begins a line of its own."""
    file = tmp_path / "h.jsonl"
    add(file, points(a_run("one")))
    file.write_bytes(file.read_bytes()[:-30])
    add(file, points(a_run("two")))
    found, problems = read(file)

    assert [point.run for point in found] == ["one", "one", "two", "two", "two"]
    assert len(problems) == 1
    assert f"{file}:3: skipped" in problems[0]


@pytest.mark.parametrize(
    "line",
    ["[]", "3", '{"schema": 2}', '{"schema": 1, "launch_s": 1e-4}', '{"schema": 1, "launch_s": 0, "params": {}}'],
    ids=str,
)
def test_odd_lines_are_named_and_skipped(tmp_path, line):
    file = tmp_path / "h.jsonl"
    file.write_text(line + "\n")
    found, problems = read(file)

    assert found == []
    assert problems[0].startswith(f"{file}:1: skipped")


# The command.


@pytest.fixture
def history(tmp_path):
    """Twelve runs of three rows; from the seventh on, at revision r6, case.1 takes 4% longer."""
    folder = tmp_path / "history"
    for i in range(12):
        gpu = {"uuid": "GPU-1" if i < 6 else "GPU-2"}
        records = a_run(
            f"run{i:02}", seed=i, slow=(1,) if i >= 6 else (), by=1.04, toolchain={"revision": f"r{i}"}, unit=gpu
        )
        assert main(["history", "add", str(save(tmp_path / f"run{i}", records)), "--history", str(folder)]) == 0
    return folder


def test_show_names_the_revision_that_brought_the_step(history, capsys):
    """With the one before it, the size, and that the binary is the same and the GPU is not."""
    capsys.readouterr()
    assert main(["history", "show", "--history", str(history)]) == 0

    said = capsys.readouterr().out
    (step,) = [line for line in said.splitlines() if "at revision" in line]
    assert step.startswith("cuda.split_kv[HND] on case.1: +3.") or step.startswith("cuda.split_kv[HND] on case.1: +4.")
    assert "at revision r6 (run run06; before it r5, run run05), same binary, another GPU of the kind, p = " in step


def test_show_as_json_and_of_chosen_rows(history, capsys):
    capsys.readouterr()
    assert main(["history", "show", "--history", str(history), "--json", "--case", "case.1,case.2"]) == 0

    data = json.loads(capsys.readouterr().out)
    assert [(line["case"], len(line["runs"]), [s["revision"] for s in line["steps"]]) for line in data] == [
        ("case.1", 12, ["r6"]), ("case.2", 12, []),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["show", "--case", "nothing"], "choose none of 3 rows"),
        (["show", "--device", "other"], "cannot read history"),
        (["add", "nowhere"], "cannot read records of nowhere"),
    ],
)
def test_wrong_usage_is_named(history, capsys, words, error):
    assert main(["history", *words, "--history", str(history)]) == 2
    assert error in capsys.readouterr().err


def test_no_history_says_how_to_begin_one(tmp_path, capsys):
    assert main(["history", "show", "--history", str(tmp_path)]) == 2
    assert "`pagedbench history add RUN` begins one" in capsys.readouterr().err

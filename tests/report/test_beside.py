"""What report.html shows beside the records: means, other runs, the history, the kill matrix, the pool, the run's facts."""

import json
import math
from dataclasses import replace

import pytest

from harness.audit import audit
from harness.cli import main
from harness.commands.compare import compared
from harness.history import add, points
from harness.names import UsageError
from harness.report import Beside, against, pool, rows, trends
from harness.report.beside import of_run
from harness.report.html import html as page_of
from harness.report.packed import unpacked
from harness.report.standing import standings
from tests.harness.runs import row, run, save, untimed
from tests.report.conftest import HOSTILE, full_run, slowed
from tests.report.test_html import Page

WASTE = {"schema": 1, "kind": "memory", "trace": "chat", "allocator": "paged 16", "num_requests": 20, "tokens": 0.5,
         "internal": 0.25, "external": 0.0, "free": 0.25, "mean_running": 8.5, "num_preemptions": 3, "copied_tokens": 0}
PNG = b"\x89PNG\r\n\x1a\n"


def against_of(old, new, name="OLD"):
    """A comparison as `pagedbench report --against` makes it."""
    return compared(old, new, (name, "NEW"), None, "geomean")


def test_means_are_geometric_and_say_over_what():
    """Twice as slow in one case and as fast in the other is 1.41 of the best; a case without a time is not hidden."""
    made = [row(case, impl, seconds=seconds, noise=0, ceiling_s=50e-6, ceiling_share=50e-6 / seconds)
            for case, impl, seconds in (("a", "cuda.x", 100e-6), ("a", "cuda.y", 200e-6), ("b", "cuda.x", 100e-6),
                                        ("b", "cuda.y", 100e-6), ("c", "cuda.x", 100e-6))]
    made.append(untimed(row("c", "cuda.y"), "wrong"))
    [[first, second]] = standings(rows.by_case(made)).values()

    assert (first.label, first.num_timed, first.num_cases, first.num_best) == ("cuda.x[HND]", 3, 3, 3)
    assert (second.label, second.num_timed, second.num_cases, second.num_best) == ("cuda.y[HND]", 2, 3, 1)
    assert second.to_best == pytest.approx(math.sqrt(2))
    assert second.share == pytest.approx(math.sqrt(0.25 * 0.5))
    assert (second.worst, second.worst_in) == (pytest.approx(2.0), 0)


def test_a_slower_row_is_in_the_first_line_and_named():
    """The page's verdict is bad news, and the row with its change and interval stands under it."""
    text = page_of(run(slow={3}, by=1.05), Beside(comparisons=[against_of(run(seed=1), run(slow={3}, by=1.05))]))

    assert "<h1 class=\"bad\">All 40 rows that ran are right; 1 SLOWER against OLD</h1>" in text
    assert "<li>SLOWER cuda.split_kv[HND] on case.3: +" in text


def test_a_run_that_is_the_same_is_good_news():
    """No alarm, no alarm in the verdict."""
    text = page_of(run(), Beside(comparisons=[against_of(run(seed=1), run())]))

    assert "<h1 class=\"good\">All 40 rows that ran are right</h1>" in text
    assert "40 SAME" in text


def test_a_run_over_two_others_shows_both():
    """Each row once, with time, change, interval and verdict against either; the worst first; what one lacks is a dash."""
    new, first, second = run(5), run(5, slow={2}, by=0.5), run(3, seed=3)
    text = page_of(new, Beside(comparisons=[against_of(first, new, name="FIRST"), against_of(second, new, name="SECOND")]))
    table = against.beside([against_of(first, new), against_of(second, new)])
    lines = [line for line in Page(text).rows["against"] if line[0].startswith("cuda.split_kv[HND]case.")]

    assert lines[0][0] == "cuda.split_kv[HND]case.2"
    assert len(lines) == len(table.lines) == 5
    assert lines[0][2].startswith("SLOWER")
    assert lines[0][6:] == ["SAME", *lines[0][7:]]
    assert [cell.verdict for cell in table.lines[-1].cells] == ["SAME", "SAME"]
    assert {line[6][:3] for line in lines if line[0][-1] in "34"} == {"NEW"}
    assert "against FIRST" in text
    assert "against SECOND" in text


def test_a_row_that_is_gone_is_shown():
    """What the new run lacks has a line of its own, with the old time and the reason."""
    line = next(line for line in against.beside([against_of(run(5), run(4))]).lines if line.case == "case.4")

    assert (line.now, line.cells[0].verdict) == ("-", "MISSING")
    assert line.cells[0].then.endswith(" µs")


@pytest.mark.parametrize(("ratio", "place"), [(1.0, 50), (1.05, 100), (1 / 1.05, 0), (9.0, 100), (0.1, 0)])
def test_the_scale_has_no_change_in_its_middle(ratio, place):
    """A ratio and its inverse lie as far from the middle; what is beyond an end lies at it."""
    assert against._place(ratio, 0.05) == place


def history(at=8, by=1.1, length=16, **fields):
    """Points of one row whose time changes at one run."""
    records = [
        row("case.0", seconds=100e-6 * (by if n >= at else 1.0), seed=n, run=f"run{n}", **fields,
            toolchain={"revision": f"rev{n}"})
        for n in range(length)
    ]
    return [point for record in records for point in points([record])]


def test_a_step_is_drawn_with_the_revision_that_brought_it():
    """The table names it, the picture has a mark for each run, and the words say how sure that is."""
    text = page_of([row("case.0")], Beside(history=history()))
    step = next(line for line in Page(text).rows["history"] if line[0] == "cuda.split_kv[HND] on case.0")

    assert "1 step in 1 row over up to 16 runs." in text
    assert step[1:3] == ["rev7 to rev8, same binary", "run8"]
    assert text.count("<title>run run") == 16


def test_history_is_of_the_rows_on_the_page():
    """Other cases, other devices and rows of one run are no trend here."""
    here = [row("case.0"), row("case.1")]
    lone = points([row("case.1")])

    assert [trend.name for trend in trends.find_trends([*history(), *lone], here)] == ["cuda.split_kv[HND] on case.0"]
    assert trends.find_trends(history(device="nvidia-b200"), here) == []
    assert 'id="history"' not in page_of(here, Beside(history=lone))


def test_the_kill_matrix_is_the_audits():
    """A control a line with what it does wrong, a letter where it was caught, a point where it passed; survivors stand out."""
    controls = [row(case, f"control.{name}", role="control", launch_s=None, status=status, reason=reason)
                for case, name, status, reason in (("a", "dead", "wrong", "plain inputs: x"), ("b", "dead", "ok", None),
                                                   ("a", "alive", "ok", None))]
    text = page_of([row("a")], Beside(audit=audit([row("a"), *controls]), faults={"control.dead": "drops the last block"}))
    lines = Page(text).rows["audit"]

    assert lines[0] == ["control", "caught", "a", "b"]
    assert lines[1] == ["deaddrops the last block", "1 of 2", "P", "."]
    assert lines[2] == ["alive survives", "0 of 1", ".", " "]
    assert 'title="caught by plain on a"' in text
    assert "SURVIVES: control.alive passed a" in text


def test_a_run_of_controls_shows_its_own_matrix(gpu_run):
    """Where a run holds controls there is a matrix without asking; where it holds none there is none."""
    assert 'id="audit"' in page_of(gpu_run)
    assert 'id="audit"' not in page_of([row("a")])


def waste(folder, *lines, **pictures):
    """A folder as `pagedbench memory --out` leaves it."""
    (folder / "waste.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
    return folder


def test_the_pool_is_drawn_from_what_memory_wrote(tmp_path):
    """A bar an allocator with its shares on hover, the numbers as a table, the pictures inside the page."""
    found = pool.read(waste(tmp_path, WASTE, {**WASTE, "allocator": "reserve-max"}, pool=PNG))
    text = page_of([row("a")], Beside(pool=found))
    lines = Page(text).rows["memory"]

    assert ["paged 16", "50.0%", "25.0%", "0.0%", "25.0%", "8.500", "3", "0"] in lines
    assert "<title>paged 16: 50.0% tokens</title>" in text
    assert "<title>reserve-max: 0.0% external" not in text
    assert 'src="data:image/png;base64,iVBORw0KGgo="' in text


def test_what_cannot_be_shown_of_a_pool_is_said(tmp_path):
    """Torn lines, other schemas, pictures that are none or too large: left out, and named."""
    found = pool.read(waste(tmp_path, WASTE, {**WASTE, "schema": 2}, {**WASTE, "free": "x"}, [], a=b"GIF8",
                            b=PNG + bytes(pool.MOST_BYTES)))

    assert len(found.lines) == 1
    assert found.notes == ["3 lines of waste.jsonl could not be read", "a.png is not shown: no PNG",
                           "b.png is not shown: the pictures are too large"]


@pytest.mark.parametrize("lines", [[], [{"schema": 2}]], ids=["none", "another schema"])
def test_a_folder_without_waste_is_an_error(tmp_path, lines):
    """It is named, with what writes one."""
    with pytest.raises(UsageError, match=r"waste\.jsonl"):
        pool.read(waste(tmp_path, *lines) if lines else tmp_path)


def test_the_run_says_what_it_was(tmp_path):
    """run.json's command line, device and self-test are in the environment, in units that people read."""
    facts = {"command": "run", "arguments": ["run", "--suite", "my suite"], "ended_at": "then",
             "device": {"memory_bytes": 150109880320, "num_sms": 132, "capability": [9, 0]},
             "selftest": {"copy_bytes_per_s": 4.2125e12, "sm_clock_hz": 1.98e9}, "spent_s": {"check": 121.02}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    beside, problems = of_run(tmp_path, [row("a")], tmp_path)
    lines = Page(page_of([row("a")], beside)).rows["fact-2"]

    assert problems == []
    for line in (["command", "pagedbench run --suite 'my suite'"], ["device memory", "150 GB"], ["device num sms", "132"],
                 ["selftest copy", "4.21 TB/s"], ["selftest sm clock", "1980 MHz"], ["spent check", "121 s"]):
        assert line in lines


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON: "),
        ('{"run": "2026', "not JSON: "),
        ("[" * 9999, "not JSON: "),
        ("[]", "not an object (got list)"),
        ('{"a": ' + "[" * 60 + "]" * 60 + "}", "nested more than 50 deep"),
        ('{"device": {"memory_bytes": ' + "9" * 1000 + "}}", "not JSON: a number of 1000 digits"),
        ('{"command": ["run"]}', "command must be a text (got list)"),
        ('{"arguments": ["run", 1]}', "arguments must be a list of texts"),
        ('{"arguments": "run"}', "arguments must be a list of texts"),
    ],
    ids=["empty", "torn", "deep", "a list", "deeper than records", "a long number", "command", "words", "no list"],
)
def test_odd_facts_are_none_and_told(tmp_path, text, why):
    """A run.json that is none says nothing, breaks nothing, and is named in one line."""
    (tmp_path / "run.json").write_text(text)
    beside, [problem] = of_run(tmp_path, [], tmp_path)

    assert beside.facts == {}
    assert problem.startswith(f"{tmp_path / 'run.json'}: skipped, {why}")
    assert len(problem) < 500
    assert "\n" not in problem


def test_a_run_without_facts_is_no_problem(tmp_path):
    """Records alone make a report."""
    assert of_run(tmp_path, [], tmp_path)[1] == []


def test_the_history_beside_a_run_is_found(tmp_path):
    """That of its device, its odd lines told of; a device that is no file's name has none."""
    add(tmp_path / "nvidia-h200.jsonl", history())
    with open(tmp_path / "nvidia-h200.jsonl", "a") as file:
        file.write("torn")
    beside, [problem] = of_run(tmp_path, [row("a"), row("a", device="../nvidia-h200")], tmp_path)

    assert len(beside.history) == 16
    assert "skipped" in problem


def test_nothing_beside_the_records_can_break_out(tmp_path):
    """Markup in names of other runs, revisions, allocators, traces, controls, faults and facts stays text."""
    bad = f"{HOSTILE}\"'&`"
    hostile = {"case": bad, "impl": bad, "run": bad, "toolchain": {"revision": bad, bad: bad}, "params": {bad: bad}}
    records = [row(**hostile), row("control", f"control.{bad}", role="control", status="wrong", reason=bad, launch_s=None)]
    steps = [replace(point, revision=bad, case=bad, impl=bad, params={bad: bad}) for point in history()]
    steps = [replace(point, case_digest=records[0].case_digest, run=f"{bad}{n}") for n, point in enumerate(steps)]
    beside = Beside(
        facts={bad: {bad: bad}, "arguments": [bad, "--shape", bad]}, history=steps,
        audit=audit(records), faults={f"control.{bad}": bad},
        comparisons=[against_of([row(**{**hostile, "seconds": 50e-6})], records, name=bad)],
        pool=pool.read(waste(tmp_path, {**WASTE, "trace": bad, "allocator": bad}, **{"<b>": PNG})),
    )
    text = page_of(records, beside)
    page = Page(text)

    assert {"against", "history", "audit", "memory"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "b" not in [tag for tag, attributes in page.tags if attributes.get("alt")]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert HOSTILE not in text


def test_a_full_run_with_everything_stays_under_three_megabytes():
    """Thousands of rows beside a baseline and twelve runs of history: long tables are packed, and all of it is in there."""
    records = full_run()
    past = [point for n in range(12)
            for point in points([replace(r, run=f"run{n}") for r in slowed(records, "cuda.split_kv", 0.9 if n < 6 else 1.0)])]
    beside = Beside(comparisons=[against_of(slowed(records, "cuda.split_kv", 0.97), records)], history=past)
    text = page_of(records, beside)
    whole = unpacked(text)

    num_timed, num_heads = sum(r.launch_s is not None for r in records), 2
    assert whole.count("<code>pagedbench run ") == len(records)
    assert len(Page(whole).rows["against"]) == num_heads + len({r.row for r in records}) + num_timed
    assert len(text.encode()) < 3e6


@pytest.fixture
def runs(tmp_path):
    """A run, an older one, one of an audit, one of another device, and the pool's waste."""
    save(tmp_path / "new", run(slow={0}, by=1.5))
    save(tmp_path / "old", run(seed=1))
    control = untimed(row("a", "control.lse_in_base_2", role="control"), "wrong", "plain inputs: x")
    save(tmp_path / "audit", [row("a"), control])
    save(tmp_path / "elsewhere", run(device="nvidia-b200"))
    add(tmp_path / "history" / "nvidia-h200.jsonl", history())
    (tmp_path / "memory").mkdir()
    waste(tmp_path / "memory", WASTE)
    return tmp_path


def test_the_command_puts_all_of_it_on_one_page(runs, capsys):
    """--against twice, --history, --audit and --memory; what a control does wrong comes from the table of implementations."""
    words = [f"--{option}={runs / folder}" for option, folder in (("against", "old"), ("against", "old"), ("audit", "audit"),
                                                                  ("history", "history"), ("memory", "memory"))]
    code = main(["report", str(runs / "new"), *words, "--out", str(runs / "out")])
    page = Page((runs / "out" / "report.html").read_text())

    assert code == 0
    assert {"verdict", "standing", "overview", "against", "heat", "history", "memory", "cases", "audit"} <= set(page.ids)
    assert page.rows["audit"][1][0].startswith("lse_in_base_2")
    assert page.rows["audit"][1][0] != "lse_in_base_2"
    assert (runs / "out" / "report.md").exists()
    assert not (runs / "old" / "report.html").exists()


@pytest.mark.parametrize(("words", "error"), [
    (["--audit={}/old"], "holds no control"), (["--against={}/elsewhere"], "different devices are never compared"),
    (["--against={}/none"], "cannot read records"), (["--memory={}/old"], "waste.jsonl"),
    (["--threshold=x"], "must be a share"),
], ids=str)
def test_wrong_usage_is_named(runs, capsys, words, error):
    """What cannot be shown is an error, and no page without it is written."""
    try:
        code = main(["report", str(runs / "new"), *(word.format(runs) for word in words), "--out", str(runs / "out")])
    except SystemExit as leaving:  # argparse's way
        code = leaving.code

    assert code == 2
    assert error in capsys.readouterr().err
    assert not (runs / "out").exists()

"""report.md: complete, true to the records, and safe to show."""

import dataclasses
import re

import pytest

from harness.record import STATUSES
from harness.report.markdown import markdown


def sections(text):
    """Map each heading to what stands below it."""
    parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_case_table_equals_its_records(gpu_run):
    """Parsed back, the times and rates of a case are those of its records, fastest first."""
    wanted = {r.row: r for r in gpu_run if r.case == "facts.a" and r.launch_s}
    lines = [line for line in sections(markdown(gpu_run))["facts.a"].splitlines() if "`" in line and line.startswith("|")]
    cells = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines]
    times = [float(line[1]) for line in cells]

    assert {line[0] for line in cells} == set(wanted)
    assert times == sorted(times)
    for name, time, rate, *_ in cells:
        seconds = wanted[name].launch_s.median
        assert float(time) == pytest.approx(seconds * 1e6, rel=5e-4)
        assert float(rate) == pytest.approx(wanted[name].traffic_bytes / seconds / 1e12, rel=5e-3, abs=5e-4)


def test_the_best_row_is_bold(gpu_run):
    """One row a case is bold: the fastest that is neither reader nor control."""
    bold = [line for line in sections(markdown(gpu_run))["facts.a"].splitlines() if "**" in line]

    assert len(bold) == 1
    assert "cuda.split_kv[HND_SWIZZLED]" in bold[0]


def test_the_verdict_comes_first_and_every_status_shows(gpu_run):
    """The first line says what is wrong; each status that occurs is counted, each bad row's reason is quoted."""
    text = markdown(gpu_run)

    assert text.splitlines()[0] == "# 1 row wrong, 1 row failed, 1 row timed out; peers: 1 row wrong"
    for status in STATUSES[1:]:
        assert f"**{status}**" in text
    assert "worst [seq 2, head 5, dim 17]: got 0.4131" in text
    assert "throttled: power cap in 3 of 8 visits" in text


def test_no_column_is_empty(gpu_run):
    """What no row has is no column: peers where there are none, statuses that did not occur."""
    ours = [r for r in gpu_run if r.row == "cuda.split_kv[HND]" and r.status == "ok"]
    text = markdown(ours)
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)]

    assert "fastest peer" in markdown(gpu_run)
    assert "fastest peer" not in text
    for heads, _, *lines in tables:
        for column in range(1, heads.count("|") - 1):
            assert {line.split("|")[column + 1].strip() for line in lines} != {"-"}, heads


def test_a_doubted_time_is_not_bold(gpu_run):
    """The fastest time is marked and not bold where it is in doubt, and the mark is explained."""
    best = next(r for r in gpu_run if r.row == "cuda.split_kv[NHD]" and r.launch_s)
    text = markdown([dataclasses.replace(best, flags=("never converged: one visit, which has no interval",))])

    assert "µs\\* `cuda.split_kv[NHD]`" in text
    assert "**" not in text
    assert "\\* the time is in doubt" in text


def test_a_clean_run_says_so(gpu_run):
    """Without a bad row the verdict is that all are right, and no reason is made up."""
    clean = [record for record in gpu_run if record.status == "ok" and record.role == "implementation"]

    assert markdown(clean).startswith("# All 319 rows that ran are right")
    assert "None: every row has a number." in markdown(clean)


def test_names_cannot_break_out(hostile_run):
    """Markup in any text of a record stays text, and no table gains a column by it."""
    text = markdown(hostile_run)

    outside = re.sub(r"`[^`\n]*`", "", re.sub(r"^ {6}.*$", "", text, flags=re.MULTILINE))
    assert "<script" not in outside
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_a_case_under_one_name_with_two_digests_is_two_tables(gpu_run):
    """Rows of different digests never meet in one table, whatever their names."""
    first = gpu_run[0]
    changed = dataclasses.replace(first, case_digest="0" * 12)

    assert markdown([first, changed]).count("### facts.a") == 2

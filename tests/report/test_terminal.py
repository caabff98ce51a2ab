"""The terminal's tables: narrow enough, complete, and about the records that are there."""

import re
from dataclasses import replace

import pytest

from harness.record import STATUSES
from harness.report import summary_line, terminal_table


def checked_only(records):
    """The records as `pagedbench check` makes them: verdicts, no times."""
    return [replace(record, launch_s=None, plan_s=None) for record in records]


def test_a_table_fits_a_hundred_columns(gpu_run, cpu_run):
    """No line of any table is wider than 100 columns, whatever was measured and however long its name is."""
    longest = [replace(record, impl="peer.a_name_that_nobody_would_choose_" + "x" * 70) for record in gpu_run[:3]]
    flagged = [replace(record, flags=("a remark of many words " * 8,)) for record in gpu_run[:3]]

    for records in (gpu_run, cpu_run, checked_only(gpu_run), checked_only(gpu_run[:9]), longest, flagged):
        assert max(map(len, terminal_table(records).splitlines())) <= 100


def test_a_row_shows_its_record(gpu_run):
    """Time, interval, rate and share of the ceiling are the record's, in units for people."""
    record = next(r for r in gpu_run if r.case == "facts.a" and r.row == "cuda.split_kv[NHD]")
    line = next(line for line in terminal_table([record]).splitlines() if line.startswith("cuda.split_kv[NHD]"))
    name, time, interval, rate, ceiling, *_ = line.split()
    half = max(record.launch_s.high - record.launch_s.median, record.launch_s.median - record.launch_s.low)

    assert name == record.row
    assert float(time) == pytest.approx(record.launch_s.median * 1e6, rel=5e-4)
    assert float(interval.rstrip("%")) == pytest.approx(100 * half / record.launch_s.median, abs=0.06)
    assert float(rate) == pytest.approx(record.traffic_bytes / record.launch_s.median / 1e12, abs=0.006)
    assert float(ceiling.rstrip("%")) == pytest.approx(100 * record.ceiling_share, abs=0.06)


def test_a_cpu_is_measured_in_gigabytes_a_second(cpu_run):
    """A CPU's rates are GB/s and a GPU's TB/s: neither fills a column with zeros."""
    assert "GB/s" in terminal_table(cpu_run)
    assert "TB/s" not in terminal_table(cpu_run)


def test_nothing_vanishes(gpu_run):
    """Every row that has no number is named with its reason, also the second line of it."""
    text = " ".join(terminal_table(gpu_run).split())

    for record in gpu_run:
        if record.status != "ok" and record.role != "control":
            assert re.search(rf"{re.escape(record.impl)}\[[^]]*\b{record.layout}\b", text)
            assert " ".join(record.reason.split()) in text


def test_check_alone_gives_verdicts(gpu_run):
    """Records without times give verdicts: a line each where they are few, counts an implementation where they are many."""
    few, many = terminal_table(checked_only(gpu_run[:9])), terminal_table(checked_only(gpu_run))

    assert few.splitlines()[0].split() == ["implementation", "case", "verdict", "of", "allowed"]
    assert many.splitlines()[0].split() == ["implementation", *STATUSES, "worst", "error"]


def test_the_summary_counts_every_row_once(gpu_run):
    """Statuses add up to the rows of implementations and peers; readers and controls stand apart."""
    assert summary_line(gpu_run) == (
        "319 ok, 2 wrong, 13 unsupported, 4 skipped, 1 failed, 1 timed out; controls: 17 wrong; readers: 17 ok"
    )
    assert len(gpu_run) == 319 + 2 + 13 + 4 + 1 + 1 + 17 + 17


def test_a_wrong_row_is_not_infinite_percent_wrong(gpu_run):
    """NaN in an output is said in words."""
    wrong = replace(gpu_run[0], status="wrong", reason="NaN", launch_s=None, check={"plain": {"ratios": {"l2": "inf"}}})

    assert "not finite" in terminal_table([wrong])
    assert "inf%" not in terminal_table([wrong] * 50)


@pytest.mark.parametrize("copies", [1, 50])
def test_an_error_within_tolerance_does_not_stand_beside_wrong(gpu_run, copies):
    """What a relation found says nothing of the numbers: no share is shown; what the numbers show is."""
    ok = replace(gpu_run[0], status="ok", launch_s=None, check={"plain": {"ratios": {"l2": 0.524}}})
    related = replace(ok, status="wrong", reason="relation batch_order: differs")
    numeric = replace(related, check={"plain": {"ratios": {"l2": 3.5}}})

    assert "52.4%" in terminal_table([ok] * copies)
    assert "52.4%" not in terminal_table([related] * copies)
    assert "350.0%" in terminal_table([numeric] * copies)


def test_what_must_be_acted_on_comes_last(gpu_run):
    """Wrong and failed rows stand nearest to the prompt."""
    text = terminal_table(gpu_run)

    assert text.index("\nskipped: ") < text.index("\nunsupported: ") < text.index("\nfailed: ") < text.index("\nwrong: ")


def test_no_records_make_no_table():
    """An empty run says so."""
    assert terminal_table([]) == "no rows"
    assert summary_line([]) == "0 ok, 0 wrong, 0 unsupported, 0 skipped, 0 failed"


def test_swept_parameters_tell_rows_apart(gpu_run):
    """A row that occurs with several parameters in one case is shown with them."""
    record = next(r for r in gpu_run if r.impl == "cuda.split_kv")
    text = terminal_table([record, replace(record, params={"splits": 4, "warps": 8})])

    assert "splits=0" in text
    assert "splits=4" in text

"""results/: lines are appended whole, read back with odd ones named, and a disk that is full says so."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from harness import store
from harness.names import UsageError
from harness.record import parse_line
from harness.store import RECORDS, Appender, latest_run, load, new_run, write_json

HOUSE = Path(store.__file__).parent.parent
LINE = json.dumps({
    "schema": 1, "run": "r", "suite": "s", "started_at": "t", "op": "attention", "case": "c", "case_digest": "d", "shape": {},
    "impl": "i", "layout": "HND", "status": "ok", "device": "cpu", "device_kind": "cpu", "toolchain": {},
})  # fmt: skip
RECORD = parse_line(LINE)


def test_what_was_appended_is_loaded(tmp_path):
    """In order, from the folder and from the file."""
    appender = Appender(tmp_path)
    wanted = [dataclasses.replace(RECORD, case=f"case.{i}") for i in range(3)]
    for record in wanted:
        appender.append(record)
    appender.close()

    assert load(tmp_path) == (wanted, [])
    assert load(tmp_path / RECORDS) == (wanted, [])
    assert appender.count == 3
    assert appender.path == tmp_path / RECORDS


def test_a_record_is_on_disk_once_it_is_appended(tmp_path):
    """A run that dies keeps what it had: nothing waits in a buffer."""
    Appender(tmp_path).append(RECORD)

    assert load(tmp_path)[0] == [RECORD]


def test_lines_are_put_in_order(tmp_path):
    """Whole ones as they stand, equal ones as they came; what is no record stays behind the record that it followed."""
    text = ["torn", *(LINE.replace('"c"', f'"{case}"') for case in ("b.1", "a.1")), "odd \xff", LINE.replace('"c"', '"b.2"')]
    (tmp_path / RECORDS).write_bytes(b"".join(line.encode("latin-1") + b"\n" for line in text))
    appender = Appender(tmp_path)
    appender.arrange(lambda record: record.case[0])
    appender.append(RECORD)
    appender.close()

    lines = (tmp_path / RECORDS).read_bytes().decode("latin-1").splitlines()
    assert lines == [text[0], text[2], text[3], text[1], text[4], RECORD.to_line()]
    assert os.listdir(tmp_path) == [RECORDS]


def test_lines_that_are_in_order_are_left_alone(tmp_path):
    """Most runs are: nothing is written twice."""
    appender = Appender(tmp_path)
    appender.append(RECORD)
    before = os.stat(tmp_path / RECORDS)
    appender.arrange(lambda record: record.case)
    appender.close()

    assert os.path.samestat(os.stat(tmp_path / RECORDS), before)


def test_a_file_that_was_put_in_order_is_still_locked(tmp_path):
    """Two runs that append to one file would lose lines, whatever its order."""
    appender = Appender(tmp_path)
    for case in "ba":
        appender.append(dataclasses.replace(RECORD, case=case))
    appender.arrange(lambda record: record.case)

    with pytest.raises(UsageError, match="another run is writing to it"):
        Appender(tmp_path)
    appender.close()
    Appender(tmp_path).close()


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_again(tmp_path, monkeypatch):
    """Between opening it and taking its lock another run may have put it in order: what it was is no longer there."""
    old, flock = Appender(tmp_path), store.fcntl.flock
    for case in "ba":
        old.append(dataclasses.replace(RECORD, case=case))

    def late(file, how):
        monkeypatch.setattr(store.fcntl, "flock", flock)
        old.arrange(lambda record: record.case)
        old.close()
        flock(file, how)

    monkeypatch.setattr(store.fcntl, "flock", late)
    new = Appender(tmp_path)
    new.append(RECORD)
    new.close()

    assert [record.case for record in load(tmp_path)[0]] == ["a", "b", "c"]


def test_odd_lines_are_named_and_skipped(tmp_path):
    """The file, the line's number and the reason; all good lines are kept, an unfinished last one included."""
    lines = [LINE, "", "{", "not json", LINE, "[1]", LINE.replace('"schema": 1', '"schema": 9'), "\xff\x00", LINE[:40]]
    (tmp_path / RECORDS).write_bytes("\n".join(lines).encode("latin-1"))
    records, problems = load(tmp_path)

    assert records == [RECORD, RECORD]
    places = [problem.split(": skipped, ")[0] for problem in problems]
    assert places == [f"{tmp_path / RECORDS}:{number}" for number in (3, 4, 6, 7, 8, 9)]
    assert "schema must be 1 (got 9)" in problems[3]
    assert all("\n" not in problem for problem in problems)


def test_strange_line_ends_cut_nothing(tmp_path):
    """U+2028 and the like inside a text end no line; a carriage return before the end is no part of the record."""
    text = LINE.replace('"case": "c"', '"case": "a\u2028b\u0085c"')
    (tmp_path / RECORDS).write_text(text + "\r\n" + LINE, encoding="utf-8", newline="")
    records, problems = load(tmp_path)

    assert [record.case for record in records] == ["a\u2028b\u0085c", "c"]
    assert problems == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "No such file or directory"), ("empty-folder", f"the folder has no {RECORDS}"),
        ("folder-for-file", "Is a directory"), ("x" * 300, "File name too long"), ("a\0b", "embedded null byte"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(tmp_path, name, why):
    """A missing folder, one without records, a folder in the file's place, a name that no file can have."""
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "folder-for-file" / RECORDS).mkdir(parents=True)

    with pytest.raises(UsageError, match=f"cannot read records of .*: {why}") as caught:
        load(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_two_runs_never_write_to_one_file(tmp_path):
    """The second is told before it measures anything; once the first has ended the file is free."""
    first = Appender(tmp_path)
    code = f"import pathlib; from harness.store import Appender; Appender(pathlib.Path({str(tmp_path)!r}))"
    second = subprocess.run([sys.executable, "-c", code], cwd=HOUSE, capture_output=True, text=True, timeout=60)
    first.append(RECORD)
    first.close()
    Appender(tmp_path).append(RECORD)

    assert f"UsageError: {tmp_path / RECORDS}: another run is writing to it" in second.stderr
    assert load(tmp_path) == ([RECORD, RECORD], [])


def test_a_torn_line_swallows_no_record(tmp_path):
    """A run that was killed in the middle of a line is continued behind it."""
    (tmp_path / RECORDS).write_text(LINE + "\n" + LINE[:40])
    Appender(tmp_path).append(RECORD)
    records, problems = load(tmp_path)

    assert records == [RECORD, RECORD]
    assert len(problems) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path):
    """Not one byte can be written: the error says which file."""
    (tmp_path / RECORDS).symlink_to("/dev/full")
    appender = Appender(tmp_path)

    with pytest.raises(OSError, match="No space left on device") as caught:
        appender.append(RECORD)
    assert str(tmp_path / RECORDS) in str(caught.value)
    assert appender.count == 0


@pytest.fixture
def limit():
    """Limit the size of files for one test."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_keeps_whole_lines(tmp_path, limit):
    """The line that no longer fits is told; the ones before can be read, the cut one is named."""
    appender = Appender(tmp_path)
    limit(2 * len(RECORD.to_line()) + 50)
    try:
        for _ in range(2):
            appender.append(RECORD)
        with pytest.raises(OSError, match=r"only 48 of \d+ bytes could be written; is the disk full\?") as caught:
            appender.append(RECORD)
    finally:
        limit(resource.RLIM_INFINITY)
    records, problems = load(tmp_path)

    assert str(tmp_path / RECORDS) in str(caught.value)
    assert records == [RECORD, RECORD]
    assert len(problems) == 1


def test_a_run_has_a_folder_of_its_own(tmp_path):
    """Three runs within a second, and the newest is found, however many there are."""
    folders = [new_run(tmp_path / "deep" / "runs") for _ in range(12)]
    for folder in folders:
        Appender(folder).append(RECORD)

    assert len(set(folders)) == 12
    assert latest_run(tmp_path / "deep" / "runs") == folders[-1]


def test_a_run_without_records_is_not_the_latest(tmp_path):
    """A run that never got so far, and files beside the runs, are passed over."""
    run = new_run(tmp_path)
    Appender(run).append(RECORD)
    (tmp_path / "99999998T000000Z").mkdir()
    Appender(tmp_path / "99999998T000000Z")
    (tmp_path / "99999999T999999Z").mkdir()
    (tmp_path / "zzz").write_text("no run")

    assert latest_run(tmp_path) == run


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_no_run_at_all_says_what_makes_one(tmp_path, name):
    """An empty or missing results folder is no error of the harness."""
    with pytest.raises(UsageError, match=r"no run under .*; `pagedbench run` makes one"):
        latest_run(tmp_path / name)


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nowhere", "x" * 300])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, out):
    """A file in the way, a file system that takes none, a name too long."""
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(UsageError, match="cannot write results to "):
        new_run(tmp_path / out)


def test_json_is_written_whole(tmp_path):
    """Nothing but the file remains, and what was there is replaced."""
    write_json(tmp_path / "run.json", {"a": 1})
    write_json(tmp_path / "run.json", {"b": [1, 2]})

    assert json.loads((tmp_path / "run.json").read_text()) == {"b": [1, 2]}
    assert os.listdir(tmp_path) == ["run.json"]


def test_json_that_does_not_fit_leaves_the_old_and_says_where(tmp_path, limit):
    """The file as it was, no scratch beside it, and the file's name in the error."""
    write_json(tmp_path / "run.json", {"a": 1})
    limit(100)
    try:
        with pytest.raises(OSError, match=r"run\.json"):
            write_json(tmp_path / "run.json", {"b": "x" * 1000})
    finally:
        limit(resource.RLIM_INFINITY)

    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["run.json"]

"""`pagedbench memory` from its words to its files."""

import argparse
import json

import pytest

from harness.names import UsageError
from runtime import memory
from runtime.pool_picture import CACHED, FREE, film


def run(*words):
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    return memory.main(parser.parse_args(words))


def test_the_study_writes_records_tables_and_pictures(tmp_path, capsys):
    """A row for each allocator, the claims beside them, and seven pictures."""
    words = ("--trace", "azure_code", "--requests", "20", "--slots", "16384", "--block-sizes", "1,16", "--out", str(tmp_path))
    assert run(*words) == 0
    records = [json.loads(line) for line in (tmp_path / "waste.jsonl").read_text(encoding="utf-8").splitlines()]
    names = [record["allocator"] for record in records]

    assert names[:6] == ["reserve-max", "power of two", "grow-and-copy", "oracle", "paged 1", "paged 16"]
    assert all(record["schema"] == 1 and record["num_requests"] == 20 for record in records)
    text = capsys.readouterr().out
    assert "| the Ascend article       | paged        | 90.0%" in text
    assert "2.15 GB" in text
    for picture in ("utilisation", "pool_shares", "block_size", "at_once", "preemptions", "copied", "pool"):
        assert (tmp_path / f"{picture}.png").stat().st_size > 10_000


def test_counting_needs_no_manager(capsys):
    """The same row, for as many requests as one likes."""
    assert run("--trace", "sharegpt", "--requests", "3000", "--count") == 0
    assert "3,000 requests counted in" in capsys.readouterr().out


def test_a_csv_is_a_trace(tmp_path, capsys):
    """The user's own requests, named after the file."""
    path = tmp_path / "mine.csv"
    path.write_text("arrival,prompt,output\n" + "".join(f"{i / 4},{50 + i},{9 + i}\n" for i in range(20)), encoding="utf-8")

    assert run("--trace", str(path), "--slots", "8192", "--step-ms", "50", "--block-sizes", "16") == 0
    assert "## mine: 20 requests, 8,192 slots" in capsys.readouterr().out


def test_the_longest_request_is_the_longest_for_every_allocator(tmp_path):
    """What one row rejects, all do: rows that serve different requests could not be held against each other."""
    path = tmp_path / "MINE.CSV"
    path.write_text("arrival, prompt, output\n0, 60, 4\n1, 60, 5\n", encoding="utf-8")

    assert run("--trace", str(path), "--max-length", "64", "--block-sizes", "1,16", "--out", str(tmp_path)) == 0
    records = [json.loads(line) for line in (tmp_path / "waste.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(record["allocator"], record["num_rejected"]) for record in records if record["num_rejected"] != 1] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trace", "bard"), "no trace 'bard': there are sharegpt, azure_chat, azure_code, or give a CSV file"),
        (("--requests", "0"), "--requests must be at least 1"),
        (("--block-sizes", "16,0"), "one of block_sizes must be 1 to 65536, got 0"),
        (("--block-sizes", "16,"), "--block-sizes must be whole numbers"),
        (("--slots", "8", "--block-sizes", "1"), "num_slots must be at least a block of 16"),
        (("--step-ms", "0"), "step_s must be at least a microsecond"),
        (("--step-ms", "nan"), "step_s must be at least a microsecond"),
        (("--block-sizes", "16,1,16"), "block_sizes must be different, got 16, 1, 16"),
        (("--trace", "sharegpt", "--trace", "sharegpt"), "names must be different, got sharegpt, sharegpt"),
        (("--seed", "-1"), "seed must be 0 to"),
        (("--out", "/dev/null/folder"), "/dev/null/folder"),
    ],
)
def test_wrong_words_are_usage_errors(words, message):
    """One line, exit code 2."""
    with pytest.raises(UsageError, match=message):
        run(*words)


def test_the_film_shows_the_whole_pool():
    """Every block of every step is somebody's, cached or free; some are shared, and owners change."""
    shots = film()

    assert len(shots.owners) > 300
    for owner, holders in zip(shots.owners, shots.holders, strict=True):
        assert ((owner >= 0) == (holders > 0)).all()
    assert any((owner == CACHED).any() for owner in shots.owners)
    assert any((owner == FREE).any() for owner in shots.owners)
    assert any((holders > 1).any() for holders in shots.holders)

"""What a device is known to read at best: kept, looked up, and printed without measuring."""

from __future__ import annotations

import dataclasses
import json
import operator
from types import SimpleNamespace

import pytest

from harness import cli
from harness.ceilings import chunk_bytes, estimate, fastest_readers, hold_against, load_ceilings, save_ceilings
from harness.device import find_device
from harness.ops.attention import AttentionCase
from harness.record import Record, Samples

CASE = AttentionCase(
    name="ceiling.hnd.4kb.8mb", num_q_heads=1, num_kv_heads=1, head_dim=128, block_size=16, seq_lens=(1024,) * 16
)


def read(traffic_bytes, seconds, block_size=16, **changes):
    """A reader's record of so many bytes in chunks of 256 bytes a token of a block."""
    shape = json.loads(json.dumps({**CASE.to_json(), "block_size": block_size}))
    fields = {
        "run": "20261130T080000Z", "suite": "ceiling", "started_at": "2026-11-30T08:00:00+00:00", "op": "attention",
        "case": f"ceiling.hnd.{block_size // 4}kb.{traffic_bytes}", "case_digest": str(traffic_bytes), "shape": shape,
        "impl": "ceiling.load_16b", "layout": "HND", "role": "reader", "status": "ok", "device": "nvidia-h200",
        "device_kind": "cuda", "toolchain": {}, "traffic_bytes": traffic_bytes,
        "launch_s": Samples(median=seconds, low=seconds, high=seconds, samples=(seconds,)),
    }
    return Record(**{**fields, **changes})


SWEEP_ORDER = operator.attrgetter("case")
SWEEP = [read(1000, 2.0), read(3000, 4.0), read(1000, 8.0, block_size=4), read(3000, 16.0, block_size=4)]


def test_the_fastest_reader_of_each_case_is_kept(tmp_path):
    """Whatever its launch shape; what is wrong, untimed or no reader is left out. A part measured again replaces that part."""
    slow = dataclasses.replace(SWEEP[0], impl="ceiling.bulk_copy", launch_s=SWEEP[1].launch_s)
    others = [
        dataclasses.replace(SWEEP[0], role="implementation", launch_s=Samples(median=1.0, low=1.0, high=1.0, samples=(1.0,))),
        dataclasses.replace(SWEEP[0], status="skipped", reason="would take minutes", launch_s=None),
    ]
    for order in ([slow, *SWEEP, *others], [*others, *SWEEP, slow]):
        assert fastest_readers(order) == SWEEP

    faster = read(1000, 1.5)
    save_ceilings(SWEEP, tmp_path)
    save_ceilings([faster], tmp_path)
    found, problems = load_ceilings("nvidia-h200", tmp_path)
    assert sorted(found, key=SWEEP_ORDER) == sorted([faster, *SWEEP[1:]], key=SWEEP_ORDER)
    assert problems == []
    assert load_ceilings("cpu-other", tmp_path) == ([], [])


@pytest.mark.parametrize(
    ("traffic_bytes", "block_size", "seconds"),
    [(1000, 16, 2.0), (2000, 16, 3.0), (3000, 16, 4.0), (6000, 16, 8.0), (2000, 32, 3.0), (2000, 1, 12.0), (999, 16, None)],
)
def test_a_ceiling_is_estimated_from_the_nearest_chunk(traffic_bytes, block_size, seconds):
    """On the line between two sizes, at the rate of the largest above it; below the smallest nothing is known."""
    found = estimate(SWEEP, {**CASE.to_json(), "block_size": block_size}, traffic_bytes)

    assert (found and found[0]) == seconds


def test_a_chunk_is_of_what_lies_in_the_cache():
    """Of a quantised cache its own elements; a shape of another operator, or one that somebody wrote, has none."""
    shape = CASE.to_json()

    assert chunk_bytes(shape) == 16 * 128 * 2
    assert chunk_bytes({**shape, "kv_dtype": "e4m3"}) == 16 * 128
    for odd in ({}, {**shape, "dtype": "f17"}, {**shape, "block_size": "16"}, {**shape, "dtype": ["bf16"]}):
        assert chunk_bytes(odd) == 0


def test_a_row_without_a_ceiling_is_held_against_what_is_known():
    """It says so; a row that has one of its own, or is of another operator, or has no time, stays as it is."""
    row = dataclasses.replace(SWEEP[0], role="implementation", impl="cuda.new", traffic_bytes=2000)
    held = hold_against(lambda device: SWEEP, row)

    assert (held.ceiling_s, held.ceiling_share) == (3.0, 1.5)
    assert held.ceiling_by == "ceiling.load_16b[HND] in chunks of 4 KB, as known since 2026-11-30"
    for other in (
        dataclasses.replace(row, ceiling_s=1.0), dataclasses.replace(row, op="cache_write"),
        dataclasses.replace(row, launch_s=None), SWEEP[0], dataclasses.replace(row, shape={}),
    ):
        assert hold_against(lambda device: SWEEP, other) is other
    assert hold_against(lambda device: [], row) is row


def test_the_sweep_is_measured_once(tmp_path, monkeypatch, capsys):
    """By the CPU's reader, each case in its own layout; printed as known from then on, until --again."""
    monkeypatch.chdir(tmp_path)
    small = [dataclasses.replace(CASE, name=f"ceiling.{name}.4kb.8mb", seq_lens=(64,) * 16) for name in ("hnd", "nhd")]
    monkeypatch.setattr("harness.commands.selection.suite", lambda name: small)
    arguments = ["ceiling", "--device", "cpu", "--in-process"]

    assert cli.main(arguments) == 0
    first = capsys.readouterr().out
    assert cli.main(arguments) == 0
    again = capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert "kept:    results/ceilings/cpu-" in first
    assert "--again measures once more" in again
    assert first.splitlines()[:4] == again.splitlines()[:4]
    assert [(line["case"].split(".")[1], line["layout"]) for line in lines] == [("hnd", "HND"), ("nhd", "NHD")]
    assert {name for line in lines for name in line["check"]} == {"timed"}  # as a sweep is, and what is named is not
    assert cli.main([*arguments, "--impl", "ceiling.torch_read[HND]"]) == 0
    some = capsys.readouterr().out
    assert "best parameters" in some
    assert "kept:" not in some  # the best of some readers is not that of all
    assert cli.main([*arguments, "--again"]) == 0
    assert "kept:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "slug"),
    [([], "first"), (["--device", "cuda:1"], "cuda-1"), (["--devices", "cuda:1,cuda:0"], "cuda-1"), (["--devices=cpu"], "cpu")],
    ids=str,
)
def test_what_is_printed_is_known_of_the_device_that_was_named(tmp_path, monkeypatch, capsys, words, slug):
    """Of the first of several."""
    monkeypatch.chdir(tmp_path)
    save_ceilings([dataclasses.replace(record, device=slug) for record in SWEEP])
    monkeypatch.setattr("harness.device.find_device", lambda name: SimpleNamespace(slug=(name or "first").replace(":", "-")))

    assert cli.main(["ceiling", *words]) == 0
    assert f"{slug}, measured 2026-11-30" in capsys.readouterr().out


def test_what_a_cluster_reads_is_not_known_here(tmp_path, monkeypatch):
    """The driver's own device may be of another kind, or none."""
    monkeypatch.chdir(tmp_path)
    save_ceilings([dataclasses.replace(record, device=find_device("cpu").slug) for record in SWEEP])
    monkeypatch.setattr("harness.commands.ceiling.execute", lambda *_, **__: 7)

    assert cli.main(["ceiling", "--engine", "ray", "--device", "cpu"]) == 7
    assert cli.main(["ceiling", "--device", "cpu"]) == 0


def test_only_the_sweep_can_be_measured_again(capsys):
    """Cases are measured each time they are named."""
    assert cli.main(["ceiling", "--device", "cpu", "--again", "--case", "facts.j"]) == 2
    assert "--again measures the sweep again" in capsys.readouterr().err

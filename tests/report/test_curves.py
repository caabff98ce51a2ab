"""Curves join cases that differ in one thing only, and pictures show what they hold."""

import re
from dataclasses import replace

import pytest

from harness.report import figures, plots, rows
from harness.report.curves import find_curves


def curves_of(records):
    return {(curves.axis, curves.fixed): curves for curves in find_curves(rows.by_case(records))}


def reshaped(record, name, **fields):
    """The record as it would stand for another case."""
    return replace(record, case=name, case_digest=name, shape={**record.shape, "name": name, **fields})


def test_the_sweeps_of_a_run_are_found(gpu_run):
    """The context sweep at batch 16 and the block sizes are curves, with every case of them."""
    found = curves_of(gpu_run)

    context = found["context", "attention, batch 16, heads 32/8 x 128, block 16, bf16"]
    blocks = found["block size", "attention, 32 x 8192 tokens, heads 32/8 x 128, bf16"]
    assert context.xs == (512, 1024, 4096, 16384, 65536)
    assert blocks.xs == (1, 8, 16, 64, 256)
    assert len(context.ceiling) == 5


def test_a_batch_sweep_is_a_curve(gpu_run):
    """Cases that differ in the number of equal sequences lie over the batch."""
    first = next(r for r in gpu_run if r.launch_s)
    records = [reshaped(first, f"x.{n}", seq_lens=(2048,) * n, q_lens=(1,) * n) for n in (4, 1, 2)]

    assert [(axis, curves.xs) for (axis, _), curves in curves_of(records).items()] == [("batch", (1, 2, 4))]


@pytest.mark.parametrize("fields", [
    {"dtype": "f16"}, {"num_kv_heads": 4}, {"block_size": 32}, {"pool_slack": 9.0}, {"q_lens": (2,) * 16},
    {"seq_lens": (512, *(1,) * 15)},
], ids=lambda fields: next(iter(fields)))
def test_cases_that_differ_in_more_are_no_curve(gpu_run, fields):
    """One case of three that differs in a second thing, or is ragged, leaves no curve of three."""
    records = [r for r in gpu_run if r.case in ("context.512", "context.1024", "context.4096") and r.launch_s]
    changed = [reshaped(r, r.case, **fields) if r.case == "context.512" else r for r in records]

    assert [curves.axis for curves in curves_of(records).values()] == ["context"]
    assert curves_of(changed) == {}


def test_runs_and_devices_do_not_mix(gpu_run):
    """A curve holds one run on one device."""
    records = [r for r in gpu_run if r.case in ("context.512", "context.1024", "context.4096") and r.launch_s]
    moved = [replace(r, device="another") if r.case == "context.512" else r for r in records]

    assert curves_of(moved) == {}


def test_a_picture_marks_every_point_and_names_it(gpu_run):
    """Every measured point is a mark with a title; the slower rows are there too, and the table has the same numbers."""
    figure = figures.curve_figures(gpu_run)[0]
    curves = find_curves(rows.by_case(gpu_run))[0]
    count = sum(map(len, curves.points.values()))

    assert len(re.findall("<title>[^<]+TB/s, [0-9.]+% of ceiling</title>", figure.picture)) == count
    assert len(figure.table.lines) == len(curves.points) + 1


@pytest.mark.parametrize(("top", "ticks"), [
    (4.47, [0, 1, 2, 3, 4, 5]), (0.83, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (18.0, [0, 5, 10, 15, 20]), (6.0, [0, 1, 2, 3, 4, 5, 6]),
    (0.0, [0, 1]),
])
def test_ticks_are_round(top, ticks):
    """Steps of 1, 2 or 5; the last tick is at or above the top."""
    assert plots.nice_ticks(top) == ticks


@pytest.mark.parametrize(("number", "text"), [
    (512, "512"), (1024, "1k"), (131072, "128k"), (1000, "1000"), (1, "1"), (1 << 20, "1M"),
])
def test_context_lengths_are_short(number, text):
    """k is 1024, and what is no multiple of it stays as it is."""
    assert plots.short(number) == text


def test_most_memory_over_all_cases_is_shown(gpu_run):
    """The memory table names the most that a row held, and the case."""
    line = next(line for line in figures.memory_figure(gpu_run).table.lines if line[0] == "torch.gather[HND]")
    most = max((r for r in gpu_run if r.row == "torch.gather[HND]"), key=lambda r: r.memory["allocator_peak_bytes"])

    assert line[3:] == ("16.1 GB", most.case)


def test_no_memory_no_picture(gpu_run):
    """Where nothing was held and nothing measured there is no empty picture."""
    assert figures.memory_figure([replace(r, workspace_bytes=0, memory={}) for r in gpu_run]) is None

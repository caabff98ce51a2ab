"""Synthetic runs: rows whose visits scatter by a known share around a known time."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from harness.interval import summarise
from harness.record import Record
from harness.store import Appender

KERNEL = {"name": "k", "registers": 64, "spill_bytes": 0, "digest": "aa"}


def row(case="decode.a", impl="cuda.split_kv", seconds=100e-6, noise=0.002, visits=6, seed=0, **fields):
    """A right, timed row of an H200 whose visits scatter log-normally by `noise` around `seconds`."""
    chance = random.Random(f"{seed} {case} {impl}")
    samples = [seconds * math.exp(chance.gauss(0, noise)) for _ in range(visits)]
    made = Record(
        run="r", suite="quick", started_at="2026-11-30T08:00:00+00:00", op="attention", case=case, case_digest=f"digest {case}",
        shape={}, impl=impl, layout="HND", status="ok", device="nvidia-h200", device_kind="cuda",
        toolchain={"torch": "2.11.0", "revision": "aaaa"}, launch_s=summarise(samples), workspace_bytes=4096,
        memory={"allocator_peak_bytes": 1 << 20}, energy_j=0.01, kernels=(KERNEL,),
    )  # fmt: skip
    return replace(made, **fields)


def run(count=40, seed=0, slow=(), by=1.0, **fields):
    """`count` rows; those numbered in `slow` take `by` times as long."""
    return [
        row(case=f"case.{i}", seconds=100e-6 * (by if i in slow else 1.0), seed=seed, **fields) for i in range(count)
    ]


def untimed(record, status, reason="because"):
    """The row, had it ended in another way."""
    return replace(record, status=status, reason=reason, launch_s=None)


def save(folder, records):
    """Write a run's folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    store = Appender(folder)
    for record in records:
        store.append(record)
    store.close()
    return folder

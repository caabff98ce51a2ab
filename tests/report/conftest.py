"""Synthetic runs: an H200-like one with every status, and a CPU-like one. Deterministic; no number is not a number."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from harness.ops.attention import AttentionCase
from harness.record import Record, Samples
from harness.rooms import load_room

HOSTILE = "<script>alert(1)</script>"

LLAMA3 = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
SKEW = (65536, 65536, *(512 + 61 * i for i in range(60)), 300, 77)

#: implementation, layouts, share of the ceiling it reaches on a large case, seconds that every launch costs
ROWS = (
    ("numpy.dense", ("HND",), 0.0004, 2e-3),
    ("torch.gather", ("HND", "NHD"), 0.21, 60e-6),
    ("torch.blocked", ("HND",), 0.03, 400e-6),
    ("torch.contiguous", ("CONTIGUOUS",), 0.88, 9e-6),
    ("cuda.per_token", ("HND", "NHD"), 0.27, 5e-6),
    ("cuda.block_parallel", ("HND", "NHD", "KV_NHD", "X_PACKED"), 0.71, 4e-6),
    ("cuda.split_kv", ("HND", "NHD", "HND_SWIZZLED"), 0.955, 5e-6),
    ("triton.split_kv", ("HND", "NHD"), 0.83, 9e-6),
    ("peer.flashattention3", ("NHD",), 0.94, 7e-6),
    ("peer.flashinfer_batch_attention", ("NHD", "HND"), 0.962, 8e-6),
    ("peer.vllm_v2", ("X_PACKED",), 0.3, 12e-6),
)


def cases() -> list[AttentionCase]:
    """The twelve of suite facts in kind, a sweep over context and one over block size."""
    made = [AttentionCase(name=f"facts.{letter}", **{**LLAMA3, **fields}) for letter, fields in (
        ("a", {"seq_lens": (8192,) * 64}),
        ("b", {"seq_lens": (131072,)}),
        ("d", {"seq_lens": (4096,) * 16, "num_kv_heads": 32}),
        ("e", {"seq_lens": (2048,) * 8}),
        ("f", {"seq_lens": SKEW}),
        ("i", {"seq_lens": (8192,) * 32, "num_kv_heads": 2}),
    )]
    made += [AttentionCase(name=f"context.{n}", **LLAMA3, seq_lens=(n,) * 16) for n in (512, 1024, 4096, 16384, 65536)]
    made += [AttentionCase(name=f"block_size.{n}", **{**LLAMA3, "block_size": n}, seq_lens=(8192,) * 32)
             for n in (1, 8, 16, 64, 256)]
    return [*made, AttentionCase(name="edges.head_dim_80", **{**LLAMA3, "head_dim": 80}, seq_lens=(0, 1, 15, 16, 17))]


def make_run(device_kind: str = "cuda", bandwidth: float = 4.47e12) -> list[Record]:
    """Every row of ROWS on every case, some of them wrong, failed, unsupported, skipped, timed out, throttled."""
    chance = random.Random(7)
    made = []
    for case in cases():
        for impl, layouts, share, fixed in ROWS:
            if device_kind == "cpu" and impl.startswith(("cuda.", "peer.")):
                continue
            for layout in layouts:
                made.append(_row(chance, case, impl, layout, device_kind, bandwidth * share * _block_penalty(case), fixed))
        made.append(_row(chance, case, "reader.bulk", "HND", device_kind, bandwidth, 2e-6, role="reader"))
        made.append(replace(_row(chance, case, "control.base2_lse", "HND", device_kind, 1.0, 0.0, role="control"),
                            status="wrong", reason="lse off by ln 2 on 64 of 64 rows", launch_s=None))
    return _mishaps(made)


def full_run() -> list[Record]:
    """What `--suite full` makes: 20 rows on every attention case, those of edges and faults checked and not timed."""
    chance, suites = random.Random(1), load_room("cases").SUITES
    untimed = {case.name for name in ("edges", "faults") for case in suites[name]}
    made = [
        _row(chance, case, impl, layout, "cuda", 4.47e12 * share, fixed)
        for case in suites["full"] if case.op == "attention"
        for impl, layouts, share, fixed in ROWS for layout in layouts
    ]
    bare: dict[str, Any] = {"launch_s": None, "plan_s": None, "energy_j": None, "power_w": None, "ceiling_share": None}
    return [replace(record, **bare) if record.case in untimed else record for record in made]


def slowed(records: list[Record], impl: str, by: float) -> list[Record]:
    """The same rows, those of one implementation by so much longer."""
    def scaled(samples: Samples) -> Samples:
        values = tuple(value * by for value in samples.samples)
        return Samples(median=samples.median * by, low=samples.low * by, high=samples.high * by, samples=values)

    return [replace(r, launch_s=scaled(r.launch_s)) if r.impl == impl and r.launch_s else r for r in records]


def _block_penalty(case: AttentionCase) -> float:
    return {1: 0.55, 8: 0.93}.get(case.block_size, 1.0)


def _row(chance: random.Random, case: AttentionCase, impl: str, layout: str, device_kind: str, speed: float, fixed: float,
         role: str = "implementation") -> Record:
    ceiling = 2e-6 + case.traffic_bytes / (4.47e12 if device_kind == "cuda" else 18e9)
    median = fixed + case.traffic_bytes / speed * chance.uniform(0.97, 1.03)
    median = max(median, ceiling * chance.uniform(1.01, 1.04))
    gpu = device_kind == "cuda"
    host = {} if not gpu else {
        "nvml": {"before": {"sm_clock_mhz": 1980, "temperature_c": 41}, "after": {"sm_clock_mhz": 1965, "temperature_c": 55},
                 "throttles": []},
        "power_w": 540.0 + chance.uniform(-40, 40), "energy_j": 560 * median, "host_s": 4.4e-6, "plan_host_s": 2.2e-6,
    }
    kernel = {
        "name": impl.split(".")[1], "registers": 128, "shared_bytes": 65536, "spill_bytes": 0, "digest": "0a1b2c3d4e5f6789",
    }
    return Record(
        run="20261130-074501", suite="quick", started_at="2026-11-30T07:45:01Z", op="attention", case=case.name,
        case_digest=case.digest, shape=case.to_json(), impl=impl, layout=layout, role=role, status="ok",
        device="nvidia-h200" if gpu else "epyc-9554", device_kind=device_kind,
        toolchain={"python": "3.12.3", "torch": "2.11.0", "driver": "580.159", "nvrtc": "13.3", "revision": "6fc740a"},
        params={"splits": 0, "warps": 8} if impl == "cuda.split_kv" else {},
        check={family: {"ratios": {"l2": chance.uniform(0.2, 0.8), "max": 0.2}} for family in ("plain", "needles")},
        launch_s=_samples(chance, median), plan_s=_samples(chance, 21e-6) if "flash" in impl else None,
        traffic_bytes=case.traffic_bytes, flops=case.flops, ceiling_s=ceiling, ceiling_by="reader.bulk[HND]",
        ceiling_share=ceiling / median, workspace_bytes=case.num_seqs * 32 * 132 * 516 if "split" in impl else 0,
        memory={"allocator_peak_bytes": case.cache_bytes * (3 if impl == "torch.gather" else 1), "nvml_bytes": 2**31},
        kernels=(kernel,) if impl.startswith("cuda.") else (),
        ledger={"timed": "graph of 16 launches, events", "inputs": f"{4 + case.num_seqs % 3} sets, rotated"}
        | ({"casts": "query to f32, out back"} if impl == "torch.blocked" else {}),
        **host,
    )


def _samples(chance: random.Random, median: float) -> Samples:
    values = tuple(sorted(median * chance.uniform(0.996, 1.004) for _ in range(5)))
    return Samples(median=values[2], low=values[0], high=values[4], samples=values)


def _mishaps(records: list[Record]) -> list[Record]:
    """Turn chosen rows into what else can come of a row."""
    def spoil(record: Record) -> Record:
        def untimed(status: str, reason: str) -> Record:
            bare: dict[str, Any] = {"launch_s": None, "ceiling_share": None, "energy_j": None, "power_w": None}
            return replace(record, status=status, reason=reason, **bare)

        if record.role != "implementation":
            return record
        if record.case == "edges.head_dim_80" and record.impl.startswith(("cuda.", "peer.")):
            return untimed("unsupported", "head_dim must be one of 64, 128 (got 80)")
        if record.case in ("facts.b", "context.65536") and record.impl.startswith(("numpy.", "torch.blocked")):
            return untimed("skipped", "would take about 4 minutes (the limit is 60 s); run it alone with --impl")
        match record.case, record.row:
            case "facts.f", "torch.gather[NHD]":
                return untimed("wrong", "3 of 65536 outputs outside tolerance\n"
                               "  worst [seq 2, head 5, dim 17]: got 0.4131, want 0.4019, error 1.1e-2, allowed 1.9e-3\n"
                               "  seq 2 holds 64 tokens in blocks 7 3 12 40")
            case "block_size.256", "peer.vllm_v2[X_PACKED]":
                return untimed("wrong", "NaN in 12 of 4096 rows; first [seq 0, head 3]")
            case "facts.d", "triton.split_kv[NHD]":
                return untimed("failed", "CompileError: split_kv.py:88: shared memory 245760, the device has 232448")
            case "context.16384", "torch.contiguous[CONTIGUOUS]":
                return untimed("timeout", "no answer within 60 s; the worker was stopped")
            case "facts.e", "cuda.split_kv[NHD]":
                return replace(record, flags=("throttled: power cap in 3 of 8 visits", "never converged"))
            case _:
                return record

    return [spoil(record) for record in records]


@pytest.fixture(scope="session")
def gpu_run() -> list[Record]:
    """15 or so cases on an H200 in about 20 rows each."""
    return make_run()


@pytest.fixture(scope="session")
def cpu_run() -> list[Record]:
    """The same cases on a CPU."""
    return make_run("cpu", 18e9)


@pytest.fixture(scope="session")
def hostile_run(gpu_run: list[Record]) -> list[Record]:
    """Every text that a record can carry holds markup."""
    bad = f"{HOSTILE}|`]]>\"'&"
    texts: dict[str, Any] = dict.fromkeys(("run", "suite", "case", "impl", "layout", "device", "role", "ceiling_by"), bad)
    facts: dict[str, Any] = {name: {bad: bad} for name in ("toolchain", "ledger", "params", "nvml")}
    facts |= {"flags": (bad,), "kernels": ({"name": bad},)}
    first = [replace(record, **texts, **facts) for record in gpu_run[:3]]
    return [*first, replace(first[0], status="wrong", reason=f"{bad}\n{bad}", launch_s=None), *gpu_run[3:60]]

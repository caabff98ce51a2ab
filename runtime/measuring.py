"""What a serving run's record holds: an engine made for a case, warmed up, and given its load a few times."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.device import Device
from harness.interval import summarise
from harness.nvml import Nvml, NvmlMissing
from runtime.clock import StepClock, Timed
from runtime.engine import Engine
from runtime.floor import Costs, Rates, floor_s, measure_rates
from runtime.loads import ServeCase, prompts_of
from runtime.model import Model
from runtime.serving import Served, serve
from runtime.settings import Settings
from runtime.traces import Trace

WARM_UP_OUTPUT = 4  # tokens of each request of the warm-up
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The row that decoded, and fields of its record."""

    impl: str
    layout: str
    fields: dict[str, Any]


def rates_of(device: Device, dtype: str) -> Rates:
    """How fast this device multiplies and copies."""
    return measure_rates(device.name, dtype)


def measure(model: Model, case: ServeCase, settings: Settings, device: Device, rates: Rates, repeats: int) -> Measured:
    """Serve the case `repeats` times; the times of the record are those of whole runs, the details of the median one."""
    if device.kind == "cuda":
        torch.cuda.empty_cache()  # what an engine before has left
        torch.cuda.reset_peak_memory_stats(device.index)
    engine = Engine(model, settings)
    try:
        return _measure(engine, case, device, rates, repeats)
    finally:
        engine.close()
        gc.unfreeze()


def _measure(engine: Engine, case: ServeCase, device: Device, rates: Rates, repeats: int) -> Measured:
    trace, model, settings = case.load(), engine.model, engine.settings
    engine.warm_up()
    serve(engine, warm_up_of(trace, settings), prompts_of(trace, model.vocab_size, case.seed + repeats), case.sampling)
    gc.collect()
    gc.freeze()  # to walk over all that torch and its compiler have made would hold a step up for a quarter of a second
    nvml, readings, runs = nvml_of(device), [], []
    for repeat in range(repeats):
        engine.clock = StepClock(device.name)
        served = serve(engine, trace, prompts_of(trace, model.vocab_size, case.seed + repeat), case.sampling)
        device.synchronize()
        runs.append((served.elapsed_s, repeat, served, engine.clock))
        readings += [nvml.read()] if nvml else []
    _, _, served, clock = sorted(runs, key=lambda run: run[:2])[(repeats - 1) // 2]
    floor = floor_s(clock.steps, Costs.of(model), rates)
    launch = summarise([elapsed for elapsed, *_ in runs])
    kernels = engine.kernels
    fields = {
        "launch_s": launch, "ceiling_s": floor, "ceiling_by": "floor of prompts' FLOPs and decode's bytes",
        "ceiling_share": floor / launch.median, "params": params_of(engine), "flags": flags_of(engine, device),
        "serving": {**serving_of(served, clock.steps), **steps_of(clock, model, rates), "num_blocks": kernels.shape.num_blocks},
        "memory": memory_of(device), "nvml": readings_of(readings),
    }  # fmt: skip
    return Measured(impl=kernels.decode.impl.name, layout=kernels.layout.name, fields=fields)


def warm_up_of(trace: Trace, settings: Settings) -> Trace:
    """A few of the load's requests, enough for two full steps, with short answers."""
    count = int(np.searchsorted(np.cumsum(trace.prompt), 2 * settings.max_num_tokens)) + 1
    return Trace(name="warm-up", prompt=trace.prompt[:count], output=np.minimum(trace.output[:count], WARM_UP_OUTPUT))


def params_of(engine: Engine) -> dict[str, Any]:
    """The settings that are no part of the case, and the entry that takes prompts."""
    settings = engine.settings
    return {
        "prefill": str(engine.kernels.prefill), "compile": settings.compile, "graphs": engine.why_no_graphs is None,
        "preempt_by": settings.preempt_by,
    }  # fmt: skip


def flags_of(engine: Engine, device: Device) -> tuple[str, ...]:
    """What makes a GPU's row slower than it need be."""
    why = engine.why_no_graphs
    return (f"no graphs: {why}",) if device.kind == "cuda" and why is not None else ()


def percentiles(values: NDArray[np.float64]) -> dict[str, float] | None:
    """p50, p90 and p99, and the mean; None of nothing."""
    if not len(values):
        return None
    found = dict(zip([f"p{q}" for q in PERCENTILES], np.percentile(values, PERCENTILES).tolist(), strict=True))
    return {**found, "mean": float(values.mean())}


def serving_of(served: Served, steps: list[Timed]) -> dict[str, Any]:
    """What a user of the engine sees."""
    return {
        "num_requests": len(served.tokens_at), "num_output_tokens": served.num_tokens,
        "output_tokens_per_s": served.num_tokens / served.elapsed_s,
        "requests_per_s": len(served.tokens_at) / served.elapsed_s, "ttft_s": percentiles(served.first_token_s()),
        "tpot_s": percentiles(served.per_token_s()), "itl_s": percentiles(served.between_tokens_s()),
        "utilisation": float(np.mean(served.utilisation)) if served.utilisation else None,
        "num_preemptions": served.num_preemptions, "num_steps": len(steps),
    }  # fmt: skip


def steps_of(clock: StepClock, model: Model, rates: Rates) -> dict[str, Any]:
    """What its steps took: a decode step end to end, over its floor, and the share of it in which no model ran.

    Of steps at the largest number of rows; `all_decode_over_floor` is of all, for an uneven load has most at fewer rows.
    """
    steps, whole, gaps = clock.decode_steps()
    found: dict[str, Any] = {"flops_per_s": rates.flops, "bytes_per_s": rates.bytes}
    if not steps:
        return found
    costs = Costs.of(model)
    most = max(step.num_rows for step in steps)
    full = [i for i, step in enumerate(steps) if step.num_rows == most]
    floors = np.array([costs.step_s(step, rates) for step in steps])
    return {
        **found, "decode_rows": most, "decode_step_s": percentiles(whole[full]),
        "decode_over_floor": float(whole[full].sum() / floors[full].sum()),
        "all_decode_over_floor": float(whole.sum() / floors.sum()),
        "gap_share": float(gaps[full].sum() / whole[full].sum()),
    }  # fmt: skip


def memory_of(device: Device) -> dict[str, int]:
    if device.kind != "cuda":
        return {}
    return {"allocator_peak_bytes": torch.cuda.max_memory_allocated(device.index)}


def nvml_of(device: Device) -> Nvml | None:
    """NVML's view of a GPU, where there is one."""
    try:
        return Nvml(device.uuid) if device.kind == "cuda" else None
    except NvmlMissing:
        return None


def readings_of(readings: list[Any]) -> dict[str, Any]:
    """The middle reading, and every reason for which a clock was lowered."""
    if not readings:
        return {}
    middle = dataclasses.asdict(sorted(readings, key=lambda reading: reading.sm_clock_mhz)[len(readings) // 2])
    fields = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c")
    throttles = sorted({why for reading in readings for why in reading.throttles})
    return {**{field: middle[field] for field in fields}, "throttles": throttles}

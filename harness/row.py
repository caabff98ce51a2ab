"""One row of the matrix while it is worked on: an implementation, in a layout, on a case."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from harness import timing
from harness.device import Device
from harness.interval import summarise
from harness.nvml import Nvml, Reading
from harness.ops import operator
from harness.ops.case import Case
from harness.ops.contract import Staged
from harness.record import TIMERS_DISAGREE, Samples
from harness.registry import Entry, Unsupported
from harness.tamper import Untouched
from harness.trial import Breach, Trial, lend, lend_layer, remarks
from harness.words import message, of_error, shortened

Stage = Callable[[], Staged]

#: A row further than this from its own cross-examination is marked: the larger of a share and of seconds a launch.
DOUBT_SHARE, DOUBT_S = 0.03, 0.3e-6
#: Seconds of replays for power and energy: NVML steps every 100 ms.
POWER_WINDOW_S = 0.7
#: Bytes that a row may hold besides the workspace it declares: what a plan keeps of a step.
SMALL_BYTES = 32 << 10
#: Seconds for which a device that has reached its power limit is left alone before the next visit.
REST_S = 0.2

_CLOCK = time.perf_counter


@dataclasses.dataclass
class Row:
    """What is known of a row so far; `fields` is what its record will say besides who and where.

    number       of the row in its run: tells rows apart that differ in parameters only; None for what is measured beside them
    untouched    what no row may replace
    timed_on     the inputs that are timed; owns_outputs says whether no other row writes their outputs
    """

    case: Case
    entry: Entry
    device: Device
    nvml: Nvml | None
    number: int | None = None
    untouched: Untouched | None = None
    status: str = "ok"
    reason: str | None = None
    flags: list[str] = dataclasses.field(default_factory=list)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    prepared: Any = None
    trial: Any = None
    timer: timing.Timer | None = None
    timed_on: Stage | None = None
    owns_outputs: bool = False
    samples: list[float] = dataclasses.field(default_factory=list)
    readings: list[Reading] = dataclasses.field(default_factory=list)
    discarded: int = 0
    spent_s: float = 0.0

    @property
    def params(self) -> dict[str, Any]:
        """Every declared parameter and its value."""
        return self.entry.impl.resolve_params(self.entry.params)

    def attempt(self, work: Callable[[], object], doing: str) -> bool:
        """Run `work`, a function of no arguments, and turn what it raises into this row's status; True if it ran."""
        begin = _CLOCK()
        try:
            try:
                work()
                self.device.settle()
            finally:
                self._left_alone(doing)
            return self.status == "ok"
        except Unsupported as why:
            self.end("unsupported", message(why) or f"{doing}: Unsupported was raised without a reason")
        except Breach as how:
            self.end("failed", f"{doing}: {how}")
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            self.end("failed", f"{doing}: {of_error(error)}")
            # What the launch was refused for may be known to CUDA still, and is not the next row's.
            with contextlib.suppress(Exception):
                self.device.settle()
        finally:
            self.spent_s += _CLOCK() - begin
        return False

    def _left_alone(self, doing: str) -> None:
        """End the row where it has replaced what rows are judged and timed by; the next one finds it as it was."""
        replaced = self.untouched.put_back() if self.untouched else []
        if replaced:
            more = f" and {len(replaced) - 1} more" if len(replaced) > 1 else ""
            self.end("wrong", f"{doing}: guard: replaced {replaced[0]}{more}, by which rows are judged and timed")

    def remark(self, topic: str, words: str) -> None:
        """Add to the ledger."""
        self.fields["ledger"] = {**self.fields.get("ledger", {}), topic: words}

    def end(self, status: str, reason: str) -> None:
        """Settle the row; the first reason stays."""
        if self.status == "ok":
            self.status, self.reason = status, shortened(reason)

    def prepare(self) -> bool:
        """Compile and take workspace, from shapes alone."""

        def work() -> None:
            spec = operator(self.case.op).spec(self.case, self.entry.layout, self.device.name, self.params)
            self.trial = Trial.of(self.entry.impl.load(), spec, self.device)
            self.prepared = self.trial.prepared
            self.fields["workspace_bytes"] = int(self.prepared.workspace_bytes)
            self.fields["kernels"] = tuple(dict(kernel) for kernel in self.prepared.kernels)
            if not self.entry.impl.lse:
                self.remark("lse", "not given: judged by the output alone")
            if self.entry.impl.tails == "finite":
                self.remark("unused slots", "finite: the entry multiplies by 0 what it masks, and 0 * NaN is NaN")
            if self.entry.impl.tails == "window" and getattr(self.case, "window", None):
                self.remark("slots behind the window", "tokens, not poison: the entry multiplies by 0 what it masks there")

        before = _Memory.read(self.device, self.nvml)
        if not self.attempt(work, "prepare"):
            return False
        self._before = before
        return True

    def measure_memory(self) -> None:
        """Note what the row has taken since before it was prepared, and compare it with what it declares."""
        if "memory" in self.fields:
            return
        now, before = _Memory.read(self.device, self.nvml), self._before
        if now is None or before is None:
            return
        self.fields["memory"] = {
            "allocator_peak_bytes": max(now.peak - before.held, 0),
            "nvml_bytes": max(now.nvml - before.nvml, 0),
        }
        measured = now.held - before.held - self.trial.guard_bytes
        declared = self.fields["workspace_bytes"] = int(self.prepared.workspace_bytes)  # with what a plan took
        if measured > declared + SMALL_BYTES:
            self.flags.append(f"workspace: declares {declared} bytes, holds {measured} bytes")

    def make_timer(self, stage: Stage) -> bool:
        """Plan for the timed inputs and get ready to time; also times the plan, and the host on a GPU."""

        def work() -> None:
            staged = stage()
            plan = functools.partial(self.prepared.plan, staged.step)
            self.fields["plan_s"] = summarise(timing.plan_seconds(plan, self.device))
            # Nobody waits for what stands beside rows, and there are many: all readers of every case.
            wants_host = self.device.kind == "cuda" and self.entry.impl.role not in ("reader", "floor")
            if wants_host:
                # Before launches are captured, which hold what the last plan left; equal steps, each an object of its own.
                plans = [functools.partial(self.prepared.plan, copy.copy(staged.step)) for _ in range(timing.BURST)]
                self.fields["plan_host_s"] = timing.host_seconds(plans, self.device)
            launches = [
                functools.partial(self.prepared.launch, *lend(staged.arguments(layer)), **lend_layer(staged.keywords(layer)))
                for layer in range(staged.num_layers)
            ]
            self.timer = timing.make_timer(launches, self.device, self.entry.impl.graph)
            if wants_host:
                self.fields["host_s"] = timing.host_seconds(launches, self.device)
            self.fields["ledger"] = {
                "timed": self.timer.how,
                "inputs": self._rotation(self.timer.num_sets),
                "plan": "outside, once for all sets; its time is plan_s, plan_host_s",
                "layout": "converted outside",
                **remarks(self.prepared.ledger),
                **self.fields.get("ledger", {}),
            }
            why = self.trial.damage(staged)
            if why:
                self.end("wrong", f"timed launches: {why}")

        return self.attempt(work, "time")

    def _rotation(self, num_sets: int) -> str:
        held = num_sets * self.case.traffic_bytes / self.device.cache_bytes
        return f"{num_sets} sets in rotation, {held:.1f} times the last-level cache" + ("" if held >= 2 else ": warm")

    def visit(self) -> bool:
        """Take one sample; one during which the clock was held down is discarded and counted."""

        def work() -> None:
            assert self.timer is not None
            readings: list[Reading] = []
            during = None if self.nvml is None else functools.partial(_append_reading, self.nvml, readings)
            seconds = self.timer.visit(during)
            self.readings += readings
            if any(reading.throttles for reading in readings):
                self.discarded += 1
                time.sleep(REST_S)
            else:
                self.samples.append(seconds)

        return self.attempt(work, "time")

    def summary(self) -> Samples | None:
        """The samples so far."""
        return summarise(self.samples) if self.samples else None

    def cross_examine(self) -> None:
        """Time by a second way and mark the row where the two disagree, twice: once may be chance."""
        summary = self.summary()

        def dissent() -> float | None:
            assert self.timer is not None
            assert summary is not None
            second = self.timer.second_opinion()
            allowed = max(DOUBT_SHARE * summary.median, DOUBT_S)
            return None if second is None or abs(second - summary.median) <= allowed else second

        def work() -> None:
            if summary is not None and dissent() is not None and (second := dissent()) is not None:
                self.flags.append(f"{TIMERS_DISAGREE}: events say {summary.median:.3g} s, the second opinion {second:.3g} s")

        self.attempt(work, "cross-examine")

    def measure_power(self) -> None:
        """Hold a window of replays and note power, and energy a launch between two steps of the energy counter."""
        if self.nvml is None:
            self.remark("power", "not measured: there is no NVML")
            return
        watts: list[float] = []
        steps: list[tuple[float, float]] = []

        def during() -> None:
            assert self.nvml is not None
            power, energy = self.nvml.instant_power_w(), self.nvml.energy_j()
            if power is not None:
                watts.append(power)
            if energy is not None and (not steps or energy != steps[-1][1]):
                steps.append((time.perf_counter(), energy))

        def work() -> None:
            assert self.timer is not None
            begin = time.perf_counter()
            launches = self.timer.run_for(POWER_WINDOW_S, during)
            rate = launches / (time.perf_counter() - begin)
            if watts:
                self.fields["power_w"] = sorted(watts)[len(watts) // 2]
            # The first entry is no step of the counter but the moment the window began.
            if len(steps) >= 4:
                (first_s, first_j), (last_s, last_j) = steps[1], steps[-1]
                self.fields["energy_j"] = (last_j - first_j) / (last_s - first_s) / rate
            else:
                self.flags.append("energy: the counter stepped fewer than three times in the window")

        self.attempt(work, "power")

    def release(self) -> None:
        """Let go of workspace and graphs."""
        self.prepared = self.timer = self.trial = self.timed_on = None


def _append_reading(nvml: Nvml, readings: list[Reading]) -> None:
    readings.append(nvml.read())


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Bytes: asked of the allocator and held, their peak since the last read, in use on the GPU as NVML says."""

    held: int
    peak: int
    nvml: int

    @classmethod
    def read(cls, device: Device, nvml: Nvml | None) -> _Memory | None:
        if device.kind != "cuda":
            return None
        # What was asked for: the allocator hands out up to a megabyte more rather than cut a large block.
        stats = torch.cuda.memory_stats(device.index)
        held, peak = stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]
        torch.cuda.reset_peak_memory_stats(device.index)
        return cls(held, peak, nvml.used_bytes() if nvml else 0)

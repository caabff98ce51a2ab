"""Is this machine fit to judge by? What a GPU runner must be before its times may fail anybody's change."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.nvml import Nvml, NvmlMissing

if TYPE_CHECKING:
    from harness.device import Device

#: NVML looks back a second at most: an idle GPU is one that was idle at every look, so many seconds apart.
LOOKS, LOOK_S = 5, 0.25
#: Monitoring shows as a percent or two.
BUSY = 0.05
#: The driver keeps about half a GiB. In a container, NVML may not show other processes, but their memory it does.
IDLE_BYTES = 1 << 30
#: A clock may lie so far from the expected one.
CLOCK_SHARE = 0.05
#: A copy reaches 86% of the pins' rate on an H200; less than this is no GPU in order.
COPY_SHARE = 0.7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that speaks against the machine: what, the rule that it breaks, what was got, what to do."""

    what: str
    rule: str
    got: str
    todo: str

    def __str__(self) -> str:
        return f"{self.what}: {self.rule} (got {self.got}); {self.todo}"


def preflight(sm_clock_mhz: int | None = None) -> tuple[list[Finding], dict[str, Any]]:
    """Examine the one visible GPU: everything that speaks against it, and what its self-test measured ({} without one).

    sm_clock_mhz    the clock that it is locked to; None expects its highest
    """
    import torch

    from harness.device import find_device
    from harness.selftest import selftest

    findings = list(visible(torch.cuda.device_count()))
    if torch.cuda.device_count() == 0:
        return findings, {}
    device = find_device("cuda:0")
    try:
        nvml = Nvml(device.uuid)
    except NvmlMissing as why:
        return [*findings, _no_nvml(str(why))], {}
    # In this order: the self-test is work, and its process would be found.
    findings += idle(nvml)
    measured = selftest(device, nvml)
    return [*findings, *in_order(device, nvml, measured, sm_clock_mhz)], measured


def visible(count: int) -> Iterator[Finding]:
    """Exactly one GPU, so that nobody need ask which one a time is of."""
    todo = "set CUDA_VISIBLE_DEVICES to one of them" if count else "`pagedbench doctor` says what torch and the driver lack"
    if count != 1:
        yield Finding(what="GPUs", rule="exactly one must be visible", got=str(count), todo=todo)


def _no_nvml(why: str) -> Finding:
    todo = "install nvidia-ml-py, and give the runner the driver's libnvidia-ml"
    return Finding(what="NVML", rule="it must answer for the GPU, or nothing here can be known", got=why, todo=todo)


def idle(nvml: Nvml) -> Iterator[Finding]:
    """Nobody else computes on the GPU or holds its memory."""
    others, used = nvml.other_processes(), nvml.used_bytes()
    if others:
        told = f"process {', '.join(map(str, others))}"
        yield Finding(what="processes", rule="no other may compute on the GPU", got=told, todo="end it, or wait for it")
    if used > IDLE_BYTES:
        rule = f"at most {IDLE_BYTES / 2**30:.0f} GiB may be in use before we begin"
        todo = "find whose it is with nvidia-smi on the host: a container does not see other containers' processes"
        yield Finding(what="GPU memory", rule=rule, got=f"{used / 2**30:.1f} GiB", todo=todo)
    busiest = max(_looks(nvml), default=None)
    if busiest is not None and busiest > BUSY:
        rule = f"no kernel may run in more than {BUSY:.0%} of the time"
        yield Finding(what="GPU utilisation", rule=rule, got=f"{busiest:.0%}", todo="let one job have the GPU at a time")


def _looks(nvml: Nvml) -> Iterator[float]:
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        found = nvml.utilisation()
        if found is not None:
            yield found


def in_order(device: Device, nvml: Nvml, measured: dict[str, Any], sm_clock_mhz: int | None) -> Iterator[Finding]:
    """Clocks as expected, by NVML and by the self-test's spin; memory as fast as its pins promise, and without faults."""
    from harness.selftest import doubts

    doubt = doubts(measured)
    if doubt:
        todo = "times of this machine are not seconds: look at its driver"
        yield Finding(what="timer", rule="a spin of known length must agree with NVML's clock", got=doubt, todo=todo)
    highest, clock = nvml.max_clocks_mhz(), measured.get("sm_clock_hz")
    wanted = sm_clock_mhz or (highest[0] if highest else None)
    if wanted and clock and abs(clock / 1e6 - wanted) > CLOCK_SHARE * wanted:
        rule = f"it must be within {CLOCK_SHARE:.0%} of {wanted} MHz under the self-test"
        todo = "`nvidia-smi -rgc` unlocks it; --sm-clock MHZ expects the clock that you lock it to"
        yield Finding(what="SM clock", rule=rule, got=f"{clock / 1e6:.0f} MHz", todo=todo)
    pins, copied = nvml.memory_bytes_per_s(), measured.get("copy_bytes_per_s")
    if pins and copied and copied < COPY_SHARE * pins:
        rule = f"a copy must reach {COPY_SHARE:.0%} of the pins' {pins / 1e12:.2f} TB/s"
        todo = "look for other work, a lowered memory clock, or a broken GPU"
        yield Finding(what="memory", rule=rule, got=f"{copied / 1e12:.2f} TB/s", todo=todo)
    throttles = nvml.read().throttles
    if throttles:
        todo = "look at power and cooling; `nvidia-smi -q -d PERFORMANCE` has the counters"
        yield Finding(what="throttling", rule="the clock must not be held down", got=", ".join(throttles), todo=todo)
    for fault in nvml.memory_faults():
        todo = f"reset the GPU, and replace it if that does not help; {device.slug} is not to be measured until then"
        yield Finding(what="ECC", rule="the memory must have no faults", got=fault, todo=todo)

"""Is the clock right? Two things of known length, timed as every row is, at the start of every run on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from harness import timing
from harness.device import Device
from harness.nvml import Nvml

COPY_BYTES = 256 << 20
SPIN_CYCLES = 2_000_000


def selftest(device: Device, nvml: Nvml | None) -> dict[str, Any]:
    """Return what was timed and what it should be; {} on a CPU, whose clock is the system's own.

    copy_bytes_per_s    a device-to-device copy, bytes read plus bytes written
    spin_s, spin_hz     a kernel that counts SPIN_CYCLES cycles, and the clock this makes; sm_clock_hz is NVML's
    """
    if device.kind != "cuda":
        return {}
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    copy_s = timing.make_timer([lambda: target.copy_(source)], device, graph=True).visit()
    clocks: list[float] = []
    during = None if nvml is None else lambda: clocks.append(nvml.read().sm_clock_mhz * 1e6)
    spin = functools.partial(torch.cuda._sleep, SPIN_CYCLES)
    spin_s = timing.make_timer([spin], device, graph=True).visit(during)
    return {
        "copy_bytes_per_s": 2 * COPY_BYTES / copy_s,
        "spin_s": spin_s,
        "spin_hz": SPIN_CYCLES / spin_s,
        "sm_clock_hz": clocks[0] if clocks else None,
    }


def doubts(found: dict[str, Any]) -> str | None:
    """Return why the run's times are in doubt, or None: the spin's clock must be within 5% of NVML's."""
    clock = found.get("sm_clock_hz")
    if clock and abs(found["spin_hz"] - clock) > 0.05 * clock:
        return f"a spin of known length ran at {found['spin_hz'] / 1e6:.0f} MHz by the timer, NVML says {clock / 1e6:.0f}"
    return None

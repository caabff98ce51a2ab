"""What NVML says of one GPU, found by its UUID: an NVML index is not an index into CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import dataclasses
from typing import Any

#: Reasons for a lowered clock that make a sample worthless; the idle and application-clock reasons do not.
_THROTTLES = {
    "power cap": "SwPowerCap",
    "hardware slowdown": "HwSlowdown",
    "software thermal": "SwThermalSlowdown",
    "hardware thermal": "HwThermalSlowdown",
    "hardware power brake": "HwPowerBrakeSlowdown",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """One moment: MHz, degrees Celsius, watts (None where this GPU does not say), and why the clock is lowered."""

    sm_clock_mhz: int
    memory_clock_mhz: int
    temperature_c: int
    power_w: float | None
    throttles: tuple[str, ...]


class Nvml:
    """NVML's view of one GPU. Raises NvmlMissing, saying why, where there is none."""

    def __init__(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise NvmlMissing(f"nvidia-ml-py is not installed: {error}") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise NvmlMissing(f"NVML does not answer for {uuid}: {error}") from error

    def read(self) -> Reading:
        """Read clocks, temperature, power and throttle reasons now."""
        nvml, handle = self._nvml, self._handle
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        return Reading(
            sm_clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1000,
            throttles=tuple(name for name, reason in _THROTTLES.items() if reasons & _reason_bit(nvml, reason)),
        )

    def instant_power_w(self) -> float | None:
        """Instantaneous board power in watts; the plain reading is an average over a second on newer GPUs."""
        nvml = self._nvml
        try:
            field = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            if field.nvmlReturn == nvml.NVML_SUCCESS:
                return float(field.value.uiVal) / 1000
        except nvml.NVMLError:
            return None
        return None

    def energy_j(self) -> float | None:
        """Energy since the driver was loaded, in joules."""
        millijoules = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if millijoules is None else millijoules / 1000

    def used_bytes(self) -> int:
        """Memory in use on the GPU by everyone."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def utilisation(self) -> float | None:
        """The share of the last sample period, a sixth of a second to a second, in which any kernel ran."""
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates)
        return None if rates is None else rates.gpu / 100

    def max_clocks_mhz(self) -> tuple[int, int] | None:
        """The highest SM and memory clock that this GPU can be set to."""
        nvml = self._nvml
        clocks = [
            self._ask(lambda handle, kind=kind: nvml.nvmlDeviceGetMaxClockInfo(handle, kind))
            for kind in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)
        ]
        return None if None in clocks else (clocks[0], clocks[1])

    def memory_bytes_per_s(self) -> float | None:
        """What the memory's pins can carry at its highest clock, at two transfers a cycle."""
        clocks, bits = self.max_clocks_mhz(), self._ask(self._nvml.nvmlDeviceGetMemoryBusWidth)
        return None if clocks is None or bits is None else 2 * clocks[1] * 1e6 * bits / 8

    def memory_faults(self) -> tuple[str, ...]:
        """What speaks against the GPU's memory: errors that ECC could not correct, repairs that wait for a reset."""
        nvml = self._nvml
        errors = self._ask(
            lambda handle: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )
        _, _, pending, failed = self._ask(nvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
        retiring = self._ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus)
        found = (
            (errors, f"{errors} uncorrected ECC errors since the driver was loaded"),
            (pending, "a row remapping pending"),
            (failed, "a row remapping failed"),
            (retiring, "a page retirement pending"),
        )
        return tuple(text for is_so, text in found if is_so)

    def driver(self) -> str:
        """The driver's version."""
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)

    def other_processes(self) -> list[int]:
        """Process ids, this one's apart, that compute on the GPU."""
        import os

        found = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses) or []
        return [process.pid for process in found if process.pid != os.getpid()]

    def _ask(self, function: Any) -> Any:
        """The answer of one query, or None where this GPU or driver does not support it."""
        try:
            return function(self._handle)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission):
            return None


def _reason_bit(nvml: Any, reason: str) -> int:
    """The bit of a reason; nvidia-ml-py renamed "throttle reasons" to "event reasons"."""
    for prefix in ("nvmlClocksEventReason", "nvmlClocksThrottleReason"):
        if hasattr(nvml, prefix + reason):
            return int(getattr(nvml, prefix + reason))
    raise NvmlMissing(f"this nvidia-ml-py knows no throttle reason {reason}")


class NvmlMissing(Exception):
    """There is no NVML to ask; the message says why."""

"""A runner is fit to judge by, or each thing that speaks against it is a line: what, which rule, what was got, what to do."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from harness import device, preflight, selftest
from harness.cli import main
from harness.nvml import Nvml, NvmlMissing, Reading

GOOD = {"copy_bytes_per_s": 4.24e12, "spin_s": 1.01e-3, "spin_hz": 1.975e9, "sm_clock_hz": 1.98e9}


class Gpu:
    """NVML of an H200 on which nothing is amiss, but for what a test says."""

    def __init__(self, others=(), used=600 << 20, busy=(0.0,), throttles=(), faults=(), highest=(1980, 3201), pins=4.917e12):
        self._others, self._used, self._busy = list(others), used, list(busy)
        self._throttles, self._faults, self._highest, self._pins = throttles, faults, highest, pins

    def other_processes(self):
        return self._others

    def used_bytes(self):
        return self._used

    def utilisation(self):
        return self._busy.pop(0) if len(self._busy) > 1 else self._busy[0]

    def max_clocks_mhz(self):
        return self._highest

    def memory_bytes_per_s(self):
        return self._pins

    def memory_faults(self):
        return self._faults

    def read(self):
        return Reading(sm_clock_mhz=1980, memory_clock_mhz=3201, temperature_c=40, power_w=80.0, throttles=self._throttles)


@pytest.fixture
def machine(monkeypatch):
    """Give this machine `count` GPUs with that NVML, and a self-test that measures what it is told."""

    def make(gpu, measured=GOOD, count=1):
        def find(_):
            if isinstance(gpu, Exception):
                raise gpu
            return gpu

        monkeypatch.setattr(preflight.time, "sleep", lambda _: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(device, "find_device", lambda _: SimpleNamespace(uuid="GPU-1", slug="nvidia-h200"))
        monkeypatch.setattr(preflight, "Nvml", find)
        monkeypatch.setattr(selftest, "selftest", lambda *_: dict(measured))

    return make


def test_a_runner_in_order_is_good(machine, capsys):
    machine(Gpu())

    assert main(["doctor", "--strict"]) == 0
    assert capsys.readouterr().out == "fit to judge by: one GPU, idle, at its clock, memory in order\n"


@pytest.mark.parametrize(
    ("gpu", "measured", "line"),
    [
        (Gpu(others=[41, 42]), {}, "processes: no other may compute on the GPU (got process 41, 42); end it"),
        (Gpu(used=3 << 30), {}, "GPU memory: at most 1 GiB may be in use before we begin (got 3.0 GiB); find whose it is"),
        (Gpu(busy=[0.0, 0.0, 0.4, 0.0]), {}, "GPU utilisation: no kernel may run in more than 5% of the time (got 40%); let"),
        (Gpu(), {"spin_hz": 1.5e9}, "timer: a spin of known length must agree with NVML's clock (got a spin"),
        (Gpu(), {"spin_hz": 1.2e9, "sm_clock_hz": 1.2e9}, "SM clock: it must be within 5% of 1980 MHz under the self-test"),
        (Gpu(), {"copy_bytes_per_s": 2e12}, "memory: a copy must reach 70% of the pins' 4.92 TB/s (got 2.00 TB/s); look"),
        (Gpu(throttles=("hardware thermal",)), {}, "throttling: the clock must not be held down (got hardware thermal); look"),
        (Gpu(faults=("a row remapping pending",)), {}, "ECC: the memory must have no faults (got a row remapping pending)"),
        (NvmlMissing("no libnvidia-ml"), {}, "NVML: it must answer for the GPU, or nothing here can be known (got no lib"),
    ],
    ids=["processes", "memory", "busy", "timer", "clock", "copy", "throttled", "ecc", "nvml"],
)  # fmt: skip
def test_each_thing_amiss_is_one_line_and_exit_1(machine, capsys, gpu, measured, line):
    """One finding, and no other one with it."""
    machine(gpu, {**GOOD, **measured})

    assert main(["doctor", "--strict"]) == 1
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(line)


@pytest.mark.parametrize(("count", "todo"), [(0, "`pagedbench doctor` says"), (4, "set CUDA_VISIBLE_DEVICES to one")])
def test_another_number_of_gpus_than_one_is_a_finding(machine, capsys, count, todo):
    """A machine without a GPU, and one on which nobody knows which is meant."""
    machine(Gpu(), count=count)

    assert main(["doctor", "--strict"]) == 1
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"GPUs: exactly one must be visible (got {count}); {todo}")


def test_a_clock_that_is_locked_on_purpose_is_expected(machine, capsys):
    """--sm-clock takes the place of the highest clock, in both directions."""
    machine(Gpu(), {**GOOD, "spin_hz": 1.5e9, "sm_clock_hz": 1.5e9})
    assert main(["doctor", "--strict", "--sm-clock", "1500"]) == 0
    machine(Gpu())
    assert main(["doctor", "--strict", "--sm-clock", "1500"]) == 1
    assert main(["doctor", "--sm-clock", "1500"]) == 2


def test_what_this_gpu_does_not_say_is_no_finding(machine, capsys):
    """No utilisation, no clocks, no bus width: the rest is judged."""
    machine(Gpu(busy=[None], highest=None, pins=None))

    assert main(["doctor", "--strict"]) == 0


def test_findings_as_json(machine, capsys):
    machine(Gpu(others=[41]))

    assert main(["doctor", "--strict", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"] == [
        {"what": "processes", "rule": "no other may compute on the GPU", "got": "process 41", "todo": "end it, or wait for it"}
    ]
    assert found["selftest"] == GOOD


def test_a_harness_that_fails_is_no_finding(machine, capsys):
    """Exit code 2."""
    machine(RuntimeError("unforeseen"))

    assert main(["doctor", "--strict"]) == 2


class NotSupported(Exception):
    pass


def library(**answers):
    """A pynvml that answers what it is given and supports nothing else."""

    def refuse(*_):
        raise NotSupported

    asked = (
        "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetMemoryBusWidth",
        "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPagesPendingStatus",
    )  # fmt: skip
    made = dict.fromkeys(asked, refuse) | {name: lambda *_, answer=answer: answer for name, answer in answers.items()}
    return SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda _: "handle", NVMLError=NotSupported,
        NVMLError_NotSupported=NotSupported, NVMLError_NoPermission=PermissionError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1, NVML_VOLATILE_ECC=0, **made,
    )  # fmt: skip


def nvml_of(monkeypatch, **answers):
    monkeypatch.setitem(sys.modules, "pynvml", library(**answers))
    return Nvml("GPU-1")


def test_nvml_is_read_in_si_units(monkeypatch):
    """A share, MHz as they come, bytes a second of 6144 pins at two transfers a cycle."""
    gpu = nvml_of(
        monkeypatch,
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=37),
        nvmlDeviceGetMaxClockInfo=3201,
        nvmlDeviceGetMemoryBusWidth=6144,
    )

    assert gpu.utilisation() == 0.37
    assert gpu.max_clocks_mhz() == (3201, 3201)
    assert gpu.memory_bytes_per_s() == pytest.approx(4.917e12, rel=1e-3)


@pytest.mark.parametrize(
    ("answers", "faults"),
    [
        ({}, ()),
        ({"nvmlDeviceGetTotalEccErrors": 0, "nvmlDeviceGetRemappedRows": (3, 1, 0, 0)}, ()),
        ({"nvmlDeviceGetTotalEccErrors": 2}, ("2 uncorrected ECC errors since the driver was loaded",)),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 1, 1)}, ("a row remapping pending", "a row remapping failed")),
        ({"nvmlDeviceGetRetiredPagesPendingStatus": 1}, ("a page retirement pending",)),
    ],
    ids=["not-said", "repaired", "errors", "remapping", "retiring"],
)
def test_faults_of_the_memory_are_named(monkeypatch, answers, faults):
    """A row that was remapped is repaired; what waits for a reset is not."""
    assert nvml_of(monkeypatch, **answers).memory_faults() == faults


def test_what_nvml_does_not_support_is_none(monkeypatch):
    gpu = nvml_of(monkeypatch)

    assert (gpu.utilisation(), gpu.max_clocks_mhz(), gpu.memory_bytes_per_s()) == (None, None, None)

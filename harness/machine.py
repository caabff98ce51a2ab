"""The devices of this machine as lanes: a worker process each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from harness.names import UsageError, split_names
from harness.record import Record
from harness.spread import Facts, Say
from harness.supervisor import Supervisor
from harness.work import Rows, Work
from harness.workers import Spare


class LocalLane:
    """One device of this machine; its worker is kept from one case to the next, and replaced when it dies."""

    def __init__(self, work: Work, device: str) -> None:
        self.name = device
        self.work = dataclasses.replace(work, device=device, rows=())
        self._spare = Spare()

    def introduce(self) -> Facts:
        return Supervisor(self.work, spare=self._spare).introduce()

    def measure(self, rows: Rows, say: Say) -> tuple[list[Record], Mapping[str, float]]:
        work = dataclasses.replace(self.work, rows=rows)
        boss = Supervisor(work, lambda doing: say(f"{self.name}: {doing}"), self._spare)
        records = list(boss.records())
        return records, boss.spent.get("spent_s", {})

    def stop(self) -> None:
        self._spare.stop()

    def close(self) -> None:
        self._spare.close()


class Machine:
    """The named devices of this machine."""

    def __init__(self, work: Work, devices: Sequence[str]) -> None:
        self.option = f"--devices {','.join(devices)}"
        self._work, self._devices = work, devices

    def lanes(self, at_most: int) -> Sequence[LocalLane]:
        return [LocalLane(self._work, device) for device in self._devices[:at_most]]

    def replacement(self) -> None:
        """A device of this machine that is gone stays so."""

    def close(self) -> None:
        """Its lanes hold all there is."""


def devices_of(text: str, is_timed: bool) -> list[str]:
    """Return the devices that --devices names. Raises UsageError for one named twice, and for CPUs that would be timed.

    "all" is every GPU that torch sees. "cpu" may stand several times, a worker each, where nothing is timed.
    """
    if text == "all":
        return _all_gpus()
    names = ["cuda:0" if name == "cuda" else name for name in split_names("--devices", [text])]
    twice = {name for name in names if names.count(name) > 1}
    for name in sorted(twice - {"cpu"}):
        raise UsageError(f"--devices {text}: {name} is named twice")
    if "cpu" in twice and is_timed:
        raise UsageError(f"--devices {text}: workers that share cores would time each other; several CPUs can only `check`")
    return names


def _all_gpus() -> list[str]:
    import torch

    count = torch.cuda.device_count()  # by NVML: no context is made in this process
    if not count:
        raise UsageError(f"--devices all: torch {torch.__version__} sees no CUDA device; --device cpu runs on the CPU")
    return [f"cuda:{index}" for index in range(count)]

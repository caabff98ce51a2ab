"""Facts about the device that runs the kernels, and about what built and ran them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from harness.names import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    name            as torch takes it: "cuda:0", "cpu"
    slug            keys results: "nvidia-h200", "cpu-amd-epyc-2-cores"
    cache_bytes     the last-level cache: L2 of a GPU, L3 of a CPU
    memory_bytes    in all
    num_sms         streaming multiprocessors; cores of a CPU
    uuid            of a GPU as NVML spells it ("GPU-..."), else ""
    """

    name: str
    kind: str
    slug: str
    cache_bytes: int
    memory_bytes: int
    num_sms: int
    capability: tuple[int, int] = (0, 0)
    uuid: str = ""

    @property
    def index(self) -> int:
        return int(self.name.partition(":")[2] or 0)

    def make_current(self) -> None:
        """Make it the one that launches, graphs and streams mean which name none."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.index)

    def free_bytes(self) -> int:
        """Memory that can be had now."""
        if self.kind == "cuda":
            free = torch.cuda.mem_get_info(self.index)[0]
            return int(free + torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index))
        return _meminfo("MemAvailable")

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.index)

    def settle(self) -> None:
        """Wait for all work on the device, and raise what a launch was refused for and told nobody.

        A launch out of bounds (a grid of more than 65,535 in z, say) leaves its error with CUDA, which gives it to whoever
        launches next, once.
        """
        if self.kind == "cuda":
            _word(self.index).zero_()
            torch.cuda.synchronize(self.index)


@functools.cache
def _word(index: int) -> torch.Tensor:
    return torch.zeros(1, device=f"cuda:{index}")


def find_device(wanted: str | None = None) -> Device:
    """Return the device named, or the first GPU, or the CPU. Raises UsageError for one that is not there."""
    name = wanted or ("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return _cpu()
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if not match:
        raise UsageError(f"--device must be cpu, cuda or cuda:INDEX (got {name!r})")
    index = int(match[1] or 0)
    if index >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices")
    return _cuda(index)


def _cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        name=f"cuda:{index}",
        kind="cuda",
        slug=_slug(properties.name),
        cache_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        num_sms=properties.multi_processor_count,
        capability=(properties.major, properties.minor),
        uuid=f"GPU-{properties.uuid}",
    )


def _cpu() -> Device:
    cores = len(os.sched_getaffinity(0))
    found = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    model = re.sub(r"\(.*?\)|\b(cpu|processor|\d+-core)\b|@.*", " ", (found[1] if found else platform.machine()).lower())
    return Device(
        name="cpu",
        kind="cpu",
        slug=_slug(f"cpu {model} {cores} cores"),
        cache_bytes=_last_level_cache(),
        memory_bytes=_meminfo("MemTotal"),
        num_sms=cores,
    )


def _last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0; 32 MiB where the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM])", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"K": 10, "M": 20}[match[2]])
    return max(sizes) or 32 << 20


def _meminfo(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", _read("/proc/meminfo"))
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@functools.cache
def toolchain() -> dict[str, str]:
    """Versions of what builds and runs the kernels, and the revision of this checkout; absent packages are left out."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for package in ("torch", "numpy", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda and torch.cuda.is_available():
        found["torch-cuda"] = torch.version.cuda
    found["threads"] = str(torch.get_num_threads())
    found["revision"] = revision()
    return found


#: the checkout, or where this is installed
ROOT = Path(__file__).resolve().parent.parent


def revision(root: Path = ROOT) -> str:
    """The short commit id of a checkout, "+" behind it where files differ from it; "unknown" outside one."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return "unknown"
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

"""`doctor`: what this machine has, and for each thing it lacks, why.

`doctor --strict` asks instead whether a GPU runner is fit to judge by, and exits 1 with a line for each thing that is not so.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any

from harness.names import UsageError, count_of
from harness.registry import default_registry


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--impl-file", action="append", default=[], metavar="PATH", help="a Python file with a table IMPLS of your own"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--strict", action="store_true", help="exit 1 unless this is a runner to judge by: one GPU, idle, at its clock"
    )
    parser.add_argument(
        "--sm-clock", type=count_of, metavar="MHZ",
        help="for --strict: the clock that the GPU is locked to (default: its highest)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print what was found; good without --strict, since a machine without a GPU is no error."""
    if arguments.strict:
        return _strict(arguments)
    if arguments.sm_clock is not None:
        raise UsageError("--sm-clock says what --strict expects; give both")
    found = examine(arguments.impl_file)
    if arguments.json:
        print(json.dumps(found))
        return 0
    for section, facts in found.items():
        print(section)
        width = max(map(len, facts), default=0)
        for name, fact in facts.items():
            print(f"  {name.ljust(width)}  {fact}")
    return 0


def _strict(arguments: argparse.Namespace) -> int:
    from harness.preflight import preflight

    findings, measured = preflight(arguments.sm_clock)
    if arguments.json:
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings], "selftest": measured}))
    else:
        for finding in findings:
            print(finding)
        if not findings:
            print("fit to judge by: one GPU, idle, at its clock, memory in order")
    return int(bool(findings))


def examine(impl_files: list[str]) -> dict[str, dict[str, str]]:
    """Return sections of facts: devices, compilers, packages, implementations that cannot run here, folders."""
    import torch

    from harness.device import find_device, toolchain

    devices = {"cpu": _describe(find_device("cpu"))}
    for index in range(torch.cuda.device_count()):
        devices[f"cuda:{index}"] = _describe(find_device(f"cuda:{index}")) + _nvml(find_device(f"cuda:{index}"))
    if torch.cuda.device_count() == 0:
        built = f"torch {torch.__version__} is built " + (
            f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        )
        devices["cuda"] = f"none: {built}; {_driver()}"
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    able = _able(kind, impl_files)
    return {
        "devices": devices,
        "toolchain": dict(toolchain()),
        "packages": {
            name: _version(name)
            for name in ("pytest", "pytest-benchmark", "nvidia-ml-py", "tabulate", "jinja2", "tqdm", "hypothesis", "ray")
        },
        "tools": {name: shutil.which(name) or "not found on PATH" for name in ("nvcc", "ncu", "compute-sanitizer", "git")},
        f"implementations on {kind}": {name: said for name, said in able.items() if not name.startswith("peer.")},
        f"peers on {kind}": {name: said for name, said in able.items() if name.startswith("peer.")},
        "folders": {"kernel cache": _cache(), "results": _writable(Path("results"))},
    }


def _describe(device: Any) -> str:
    cores = (
        f"{device.num_sms} SMs, sm_{device.capability[0]}{device.capability[1]}"
        if device.kind == "cuda"
        else f"{device.num_sms} cores"
    )
    return (
        f"{device.slug}: {cores}, {device.memory_bytes / 2**30:.0f} GiB, last-level cache {device.cache_bytes / 2**20:.0f} MiB"
    )


def _nvml(device: Any) -> str:
    from harness.nvml import Nvml, NvmlMissing

    try:
        nvml = Nvml(device.uuid)
        others = nvml.other_processes()
        busy = f"; shared with processes {', '.join(map(str, others))}" if others else ""
        return f"; driver {nvml.driver()}, {nvml.read().sm_clock_mhz} MHz{busy}"
    except NvmlMissing as why:
        return f"; {why}"


def _driver() -> str:
    found = Path("/proc/driver/nvidia/version")
    return "an NVIDIA driver is loaded" if found.exists() else "no NVIDIA driver is loaded (/proc/driver/nvidia is not there)"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed (pip install {package})"


def _able(kind: str, impl_files: list[str]) -> dict[str, str]:
    """What each implementation says to this machine: a peer of its library first, which may be there for a GPU to come."""
    found = {}
    for impl in default_registry(impl_files):
        elsewhere = None if kind in impl.devices else f"runs on {' or '.join(impl.devices)} only"
        if impl.name.startswith("peer."):
            missing = impl.why_missing(impl.devices[0])
            found[impl.name] = f"no: {missing}" if missing else f"found; {elsewhere}" if elsewhere else "yes"
        else:
            why = elsewhere or impl.why_missing(kind)
            found[impl.name] = f"no: {why}" if why else "yes"
    return found


def _cache() -> str:
    return _writable(Path(os.environ.get("PAGEDBENCH_CACHE") or Path.home() / ".cache" / "pagedbench"))


def _writable(folder: Path) -> str:
    place = folder
    while not place.exists():
        place = place.parent
    return f"{folder.absolute()}" if os.access(place, os.W_OK) else f"{folder.absolute()}: cannot be written"

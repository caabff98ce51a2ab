"""What compiling needs from this machine: the CUDA headers, and NVRTC and its version."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path

#: the headers that kernels include; a folder that holds the first holds all
HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "math_constants.h", "vector_types.h")


class ToolkitMissing(Exception):
    """NVRTC, the CUDA headers or the driver is not on this machine; the message says which and where was looked."""


def header_candidates() -> list[Path]:
    """Folders that may hold the CUDA headers, best first: NVIDIA's wheels, $CUDA_HOME or $CUDA_PATH, /usr/local/cuda."""
    spec = importlib.util.find_spec("nvidia")
    roots = sorted(map(Path, spec.submodule_search_locations or ())) if spec else []
    folders = [root / name / "include" for root in roots for name in ("cu13", "cuda_runtime")]
    toolkits = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)] + ["/usr/local/cuda"]
    return folders + [Path(toolkit) / "include" for toolkit in toolkits]


@functools.cache
def header_folder() -> Path:
    """Return the folder of the CUDA headers. Raises ToolkitMissing with the places tried."""
    for folder in header_candidates():
        if (folder / HEADERS[0]).is_file():
            return folder
    tried = ", ".join(map(str, header_candidates()))
    raise ToolkitMissing(
        f"no CUDA headers ({HEADERS[0]}): looked in {tried}; install nvidia-cuda-runtime, or set CUDA_HOME to a toolkit"
    )


@functools.cache
def header_digest() -> str:
    """SHA-256 over the headers that kernels include, since what they hold ends up in the cubin."""
    digest = hashlib.sha256()
    for name in HEADERS:
        file = header_folder() / name
        digest.update(file.read_bytes() if file.is_file() else b"absent")
    return digest.hexdigest()


@functools.cache
def nvrtc_version() -> str:
    """Return NVRTC's version, "13.5". Raises ToolkitMissing when it or its Python binding cannot be loaded."""
    try:
        from cuda.bindings import nvrtc

        if importlib.util.find_spec("cuda.core") is None:  # not imported: a warm start does not need it
            raise ModuleNotFoundError("No module named 'cuda.core'")
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise errors of their own kinds for a library that is not there
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        raise ToolkitMissing(
            f"no NVRTC: {type(error).__name__}: {reason}; install cuda-python and nvidia-cuda-nvrtc"
        ) from error
    if int(status) != 0:
        raise ToolkitMissing(f"no NVRTC: nvrtcVersion() answered {status.name}")
    return f"{major}.{minor}"


@functools.cache
def compiler_why_missing() -> str | None:
    """Return why kernels cannot be compiled here, or None."""
    try:
        header_folder()
        nvrtc_version()
    except ToolkitMissing as error:
        return str(error)
    return None


@functools.cache
def why_missing(device_kind: str) -> str | None:
    """Return why kernels cannot be compiled and run here, or None; the `available` of every entry of this folder."""
    missing = compiler_why_missing()
    if missing or device_kind != "cuda":
        return missing
    from cuda.bindings import driver

    try:
        status, count = driver.cuInit(0)[0], 0
        if int(status) == 0:
            status, count = driver.cuDeviceGetCount()
    except RuntimeError as error:  # raised by the bindings when libcuda.so.1 cannot be found
        return f"no CUDA driver: {str(error).strip().splitlines()[0]}"
    if int(status) != 0:
        return f"no CUDA driver: it answered {status.name}"
    return None if count else "the CUDA driver sees no device"


def why_older(device_kind: str, least: tuple[int, int], what: str) -> str | None:
    """Return why kernels cannot run here, or that `what` needs a newer GPU than torch's current one, or None."""
    reason = why_missing(device_kind)
    if reason or device_kind != "cuda":
        return reason
    import torch

    got = torch.cuda.get_device_capability()
    return None if got >= least else f"{what} needs compute capability {least[0]}.{least[1]} or newer (got {got[0]}.{got[1]})"


def why_other(device_kind: str, only: tuple[int, int], what: str) -> str | None:
    """Return why kernels cannot run here, or that torch's current GPU is another one than those that have `what`, or None."""
    reason = why_missing(device_kind)
    if reason or device_kind != "cuda":
        return reason
    import torch

    got = torch.cuda.get_device_capability()
    return None if got == only else f"{what} is of compute capability {only[0]}.{only[1]} alone (got {got[0]}.{got[1]})"


def versions() -> dict[str, str]:
    """Versions of what builds kernels, for records: NVRTC, its headers, and the Python packages."""
    found = {"nvrtc": nvrtc_version(), "cuda_headers": header_digest()[:12]}
    for package in ("cuda-core", "cuda-bindings", "nvidia-cuda-runtime"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found

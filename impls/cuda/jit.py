"""Compile one kernel through NVRTC to a cubin for one architecture, and keep it on disk.

    kernel = jit.compile("split_kv.cu", entry="split_kv", macros={"PA_HEAD_DIM": 128}, device="cuda:0")
    launch = kernel.launcher("PPPqif", shared_bytes=4096)            (loads it; see launch.py)
    launch((grid_x, 1, 1), 128, stream, ...)

Given `arch` instead of `device` it needs no GPU, and `kernel.resources` says what the kernel takes.

The cache holds NAME-KEY.cubin and NAME-KEY.json (resources) in $PAGEDBENCH_CACHE, else ~/.cache/pagedbench. KEY covers all
that changes the result: source, every .cuh beside it and here, whatever else these include by name (not by a macro), macros,
entry, architecture, options, NVRTC, CUDA headers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impls.cuda import toolkit
from impls.cuda.toolkit import why_missing

if TYPE_CHECKING:
    from impls.cuda.launch import Launcher

__all__ = ["CompileError", "Kernel", "cache_folder", "compile", "why_missing"]

FOLDER = Path(__file__).parent
OPTIONS = ("std=c++17", "ptxas -v")  # part of the cache's key: change it together with _nvrtc
FORMAT = 1  # of a cache entry
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
_IMPORTING = threading.Lock()  # cuda.core fails when two threads import it at once


class CompileError(Exception):
    """A kernel that NVRTC refused: says file, architecture, NVRTC, macros, and NVRTC's own log."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel.

    resources    name, arch, registers (a thread), shared_bytes (static), stack_bytes, spill_bytes (stored and loaded), digest;
                 losses: the assembler's own words about what it could not leave asynchronous
    device       "cuda:0", or None when it was compiled for an architecture only
    """

    entry: str
    arch: str
    cubin: bytes = dataclasses.field(repr=False)
    resources: Mapping[str, Any]
    device: str | None = None

    def launcher(self, signature: str, shared_bytes: int = 0, early: bool = False) -> Launcher:
        """Load the kernel on its device, with `shared_bytes` of dynamic shared memory; see launch.py for the others."""
        from impls.cuda.launch import Launcher

        if self.device is None:
            raise ValueError(f"{self.entry}, {self.arch}: compiled without a device; give jit.compile a device to launch it")
        return Launcher(self, signature, shared_bytes, early)


def compile(  # named as a reader says it: jit.compile
    source: str | Path,
    *,
    entry: str,
    macros: Mapping[str, str | int] | None = None,
    device: str | None = None,
    arch: str | None = None,
) -> Kernel:
    """Compile `entry` (an extern "C" kernel) of `source`, a file of this folder or a path, or take it from the cache.

    macros    the only ones the file uses, besides NVRTC's own
    device    "cuda:0": compile for its architecture, ready to launch
    arch      "sm_90", "sm_90a"; without a device, compile only

    Raises CompileError, and ToolkitMissing where there is no NVRTC or no CUDA headers.
    """
    if device is not None:
        arch = arch or arch_of(device)
    if arch is None:
        raise ValueError(f"jit.compile({source}): give device or arch")
    request = _Request(
        path=FOLDER / source, entry=entry, arch=arch,
        macros=tuple(sorted((name, str(value)) for name, value in (macros or {}).items())),
    )
    cached = _load(request) or _store(request, *_nvrtc(request))
    return Kernel(entry=entry, arch=request.arch, cubin=cached[0], resources=cached[1], device=device)


@functools.cache
def arch_of(device: str) -> str:
    """Return the architecture of a CUDA device: "sm_90"."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.lru_cache(maxsize=256)
def _included(text: str) -> tuple[str, ...]:
    """The names that a source includes, each once; asked of the same headers for every kernel."""
    return tuple(dict.fromkeys(_INCLUDE.findall(text)))


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("PAGEDBENCH_CACHE") or Path.home() / ".cache" / "pagedbench")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    path: Path
    entry: str
    arch: str
    macros: tuple[tuple[str, str], ...]

    def folders(self) -> list[Path]:
        return list(dict.fromkeys((self.path.parent, FOLDER)))

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text()

    def others(self, headers: Sequence[Path]) -> list[Path]:
        """What the source and `headers` include, and these in turn, that is none of `headers` and not the toolkit's."""
        folders, known = self.folders(), {file.name for file in headers}
        given, waiting = {file.resolve() for file in headers}, [self.path, *headers]
        found: list[Path] = []
        while waiting:
            file = waiting.pop()
            for name in _included(file.read_text()):
                if name in known and file.parent in folders:  # as nearly all are: not looked for on the disk
                    continue
                places = [folder / name for folder in (file.parent, *folders)]
                there = dict.fromkeys(place.resolve() for place in places if place.is_file())
                fresh = [place for place in there if place not in (*given, *found)]
                found += fresh
                waiting += fresh
        return found

    @functools.cached_property
    def stem(self) -> str:
        """File name of the cache entry, without suffix."""
        parts = [
            str(FORMAT), self.path.name, self.text, self.entry, self.arch, repr(self.macros), repr(OPTIONS),
            toolkit.nvrtc_version(), toolkit.header_digest(),
        ]
        headers = [file for folder in self.folders() for file in sorted(folder.glob("*.cuh"))]
        for file in (*headers, *self.others(headers)):
            parts += [file.name, file.read_text()]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(f"{len(part)}:{part}".encode())
        return f"{self.entry}-{self.arch}-{digest.hexdigest()[:24]}"


def _nvrtc(request: _Request) -> tuple[bytes, dict[str, Any]]:
    """Compile; return the cubin and its resources."""
    version, headers = toolkit.nvrtc_version(), toolkit.header_folder()
    with _IMPORTING:
        from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=request.path.name, arch=request.arch, std="c++17", define_macro=list(request.macros) or None,
        include_path=[*map(str, request.folders()), str(headers)], ptxas_options=["-v"],
        no_cache=True,  # NVRTC 13 has a cache of its own; what it finds there, ptxas says nothing of
    )
    log = io.StringIO()
    try:
        cubin = bytes(Program(request.text, "c++", options).compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's own classes, which moved between its releases
        macros = " ".join(f"{name}={value}" for name, value in request.macros)
        text = str(error).replace("\0", "")
        said = text.partition("compilation log:")[2].strip() or text.strip()
        for folder in request.folders():
            said = said.replace(f"{folder}/", "")
        lines = "\n".join(f"  {line}" for line in said.splitlines())
        raise CompileError(f"{request.path.name}, {request.arch}, NVRTC {version}, {macros or 'no macros'}\n{lines}") from None
    return cubin, parse_resources(log.getvalue(), request.entry, request.arch) | {"digest": hashlib.sha256(cubin).hexdigest()}


def parse_resources(log: str, entry: str, arch: str) -> dict[str, Any]:
    """Read what `ptxas -v` said about `entry`. Raises CompileError when it said nothing."""
    section = log.partition(f"Compiling entry function '{entry}'")[2].partition("Compiling entry function")[0]
    registers = re.search(r"Used (\d+) registers", section)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", section)
    if registers is None or frame is None:
        raise CompileError(f"{entry}, {arch}: no extern \"C\" kernel of this name, or ptxas told nothing of it\n{log.strip()}")
    shared = re.search(r"(\d+) bytes smem", section)
    return {
        "name": entry, "arch": arch, "registers": int(registers[1]), "shared_bytes": int(shared[1]) if shared else 0,
        "stack_bytes": int(frame[1]), "spill_bytes": int(frame[2]) + int(frame[3]),
        "losses": re.findall(rf"Potential Performance Loss: (.*) in the function '{entry}'", log),
    }


def _load(request: _Request) -> tuple[bytes, dict[str, Any]] | None:
    """Return the cache's entry, or None when it has none or a damaged one."""
    file = cache_folder() / request.stem
    try:
        cubin, resources = file.with_suffix(".cubin").read_bytes(), json.loads(file.with_suffix(".json").read_text())
        sound = resources["digest"] == hashlib.sha256(cubin).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (cubin, resources) if sound else None


def _store(request: _Request, cubin: bytes, resources: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """Keep a result; a cache that cannot be written costs a compilation next time, and is said."""
    file = cache_folder() / request.stem
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for suffix, content in ((".cubin", cubin), (".json", json.dumps(resources, indent=1).encode())):
            with tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.name, delete=False) as part:
                part.write(content)
            os.replace(part.name, file.with_suffix(suffix))
    except OSError as error:
        warnings.warn(f"cannot keep {file.name}: {error}; set PAGEDBENCH_CACHE to a folder that can be written", stacklevel=3)
    return cubin, resources

"""CUDA kernels on a CPU: their sources, compiled as C++ with the pages of instructions replaced by those of emulator/."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from impls.cuda import jit
from impls.cuda.builds import Build
from impls.cuda.launch import Packer

PAGES = Path(__file__).with_name("emulator")
EXPORTS = """
static void body() {{ call({entry}); }}
extern "C" const char* run(int ctas, int threads, void** with, unsigned seed) {{
    return launch(ctas, threads, with, seed, body);
}}
"""


#: of CUDA, which the kernels include
HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "math_constants.h")


def why_missing() -> str | None:
    """Return why kernels cannot be compiled for the CPU here, or None."""
    if sys.platform != "linux":
        return f"fibers are those of Linux (got {sys.platform})"
    return None if shutil.which("g++") else "no g++"


@functools.cache
def library(source: str, entry: str, macros: tuple[tuple[str, str | int], ...]) -> ctypes.CDLL:
    """Compile the kernel for the CPU, once a test session."""
    folder = Path(tempfile.mkdtemp(prefix="pagedbench-emulated-"))
    for page in (*jit.FOLDER.glob("*.cuh"), jit.FOLDER / source, *PAGES.iterdir()):
        (folder / page.name).write_text(page.read_text().replace("extern __shared__", "extern"))
    for header in HEADERS:
        (folder / header).write_text('#include "types.hpp"\n')
    text = "".join(f"#define {name} {value}\n" for name, value in macros)
    (folder / "main.cpp").write_text(f'{text}#include "threads.hpp"\n#include "{source}"\n{EXPORTS.format(entry=entry)}')
    name = f"{entry}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.so"
    command = ["g++", "-std=c++17", "-O2", "-fno-strict-aliasing", "-w", "-fPIC", "-shared", "-I."]
    subprocess.run([*command, "main.cpp", "-o", name], cwd=folder, check=True)
    loaded = ctypes.CDLL(str(folder / name))
    loaded.run.restype = ctypes.c_char_p
    shutil.rmtree(folder)
    return loaded


class Emulated:
    """As impls.cuda.launch.Launcher, in orders that follow from a seed.

    Raises AssertionError for what is an error on a GPU, or never ends there.
    """

    seed = 0

    def __init__(self, build: Build, signature: str) -> None:
        self._run = library(build.source, build.entry, tuple(build.macros.items())).run
        self.parameters = Packer(signature)

    def __call__(self, grid, threads, stream, *values) -> None:
        self.parameters.pack(*values)
        self.enqueue(grid, threads, stream)

    def enqueue(self, grid, threads, stream) -> None:
        failure = self._run(grid[0], threads, ctypes.c_void_p(self.parameters.address), self.seed)
        self.seed += 1
        if failure:
            raise AssertionError(failure.decode())

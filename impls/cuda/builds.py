"""The builds that stand for every kernel: what `pagedbench list --resources` shows and a test compiles without a GPU.

A page of this folder that launches kernels has a pure function `builds(arch) -> list[Build]` and is named in `PAGES`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from impls.cuda import jit

#: modules of this folder with a function `builds`
PAGES: tuple[str, ...] = (
    "per_token", "block_parallel", "split_kv", "tensor_core", "tensor_core_general", "verify", "prefix", "prefill",
    "cache_write", "block_copy", "read_blocks", "empty",
)

#: bytes of shared memory that a CTA may opt in to, static and dynamic together
SHARED_LIMIT = {
    "sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_87": 163 * 1024, "sm_89": 99 * 1024,
    "sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_103": 227 * 1024, "sm_120": 99 * 1024,
}
#: those that stand for all
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")


def has_bulk_copies(arch: str) -> bool:
    """Whether kernels for `arch` may copy by cp.async.bulk: from sm_90 on."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90


@dataclasses.dataclass(frozen=True, kw_only=True)
class Build:
    """One kernel in one of its default configurations.

    source, entry, macros    as jit.compile takes them
    shared_bytes             dynamic shared memory that its launch plans
    only                     "a" for instructions that an architecture has alone, no later one: sm_90a
    early                    its launch may begin before the one before it ends: early.cuh
    """

    source: str
    entry: str
    macros: Mapping[str, str | int]
    shared_bytes: int = 0
    only: str = ""
    early: bool = False

    def __str__(self) -> str:
        return f"{self.entry} {' '.join(str(value) for value in self.macros.values())}"


def builds(arch: str) -> list[Build]:
    """Every page's default builds for `arch`."""
    return [build for page in PAGES for build in importlib.import_module(f"impls.cuda.{page}").builds(arch)]


def resources(arch: str) -> list[dict[str, Any]]:
    """Compile every default build for `arch` (from the cache where it can) and say what each takes.

    Adds to a kernel's own resources: build (its macros), dynamic_bytes and shared_limit_bytes.
    """

    def compiled(build: Build) -> dict[str, Any]:
        kernel = jit.compile(build.source, entry=build.entry, macros=build.macros, arch=arch + build.only)
        planned = {"dynamic_bytes": build.shared_bytes, "shared_limit_bytes": SHARED_LIMIT[arch]}
        return {**kernel.resources, "build": str(build), **planned}

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, builds(arch)))

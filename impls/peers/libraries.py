"""Where the peers' libraries are found: installed, or at a path that an environment variable gives. Loads no torch to look."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A library that is imported.

    name        as one calls it
    module      what is imported
    variable    environment variable that may name the folder in which `module` lies
    get         how to get it
    """

    name: str
    module: str
    variable: str
    get: str

    def why_missing(self, device_kind: str = "cuda") -> str | None:
        """Return why it cannot be imported and how to get it, or None. Nothing is imported."""
        folder = os.environ.get(self.variable)
        if self.module in sys.modules:
            return None
        if folder:
            found = importlib.machinery.PathFinder.find_spec(self.module, [folder])
            return None if found else f"{self.variable}={folder}: has no module {self.module}"
        if importlib.util.find_spec(self.module):
            return None
        return f"{self.name} is not installed: {self.get}, or set {self.variable} to the folder that holds {self.module}"

    def load(self, module: str | None = None) -> ModuleType:
        """Import the library, or one of its modules."""
        folder = os.environ.get(self.variable)
        if folder and folder not in sys.path:
            sys.path.append(folder)  # last: what else lies there must not take the place of what is installed
        return importlib.import_module(module or self.module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operators:
    """A shared library of torch operators, carried by an installed package or lying somewhere alone.

    file        its path inside `package`
    variable    environment variable that may name the library's own file
    """

    name: str
    package: str
    file: str
    variable: str
    get: str

    def why_missing(self, device_kind: str = "cuda") -> str | None:
        """Return why it cannot be loaded and how to get it, or None. Nothing is loaded."""
        if self._path() is not None:
            return None
        given = os.environ.get(self.variable)
        if given:
            return f"{self.variable}={given}: no such file; it must name {self.name}'s {Path(self.file).name}"
        return f"{self.name} is not installed: {self.get}, or set {self.variable} to its {Path(self.file).name}"

    def load(self, name: str) -> Callable[..., Any]:
        """Load the library once, and return its operator `name`, "namespace.operator". RuntimeError where it has none such."""
        import torch

        namespace, _, operator = name.partition(".")
        ops = getattr(torch.ops, namespace)
        if not hasattr(ops, operator):
            torch.ops.load_library(str(self._path()))
        if not hasattr(ops, operator):
            raise RuntimeError(f"{self._path()} registers no torch.ops.{name}: is it of another release?")
        found: Callable[..., Any] = getattr(ops, operator)
        return found

    def _path(self) -> Path | None:
        given = os.environ.get(self.variable)
        if given:
            path = Path(given)
        else:
            spec = importlib.util.find_spec(self.package)
            if spec is None or spec.origin is None:
                return None
            path = Path(spec.origin).parent / self.file
        return path if path.is_file() else None


FLASHINFER = Package(
    name="FlashInfer", module="flashinfer", variable="PAGEDBENCH_FLASHINFER",
    get="pip install 'pagedbench[flashinfer]' (it compiles on first use: nvcc and ninja)",
)
FA3 = Package(
    name="FlashAttention-3", module="flash_attn_interface", variable="PAGEDBENCH_FA3",
    get="build hopper/ of Dao-AILab/flash-attention (a Hopper GPU)",
)
FA2 = Package(
    name="FlashAttention-2", module="flash_attn", variable="PAGEDBENCH_FA2",
    get="pip install 'pagedbench[flash-attention]'",
)
TRANSFORMERS = Package(
    name="transformers", module="transformers", variable="PAGEDBENCH_TRANSFORMERS",
    get="pip install 'pagedbench[transformers]'",
)
VLLM = Package(
    name="vLLM", module="vllm", variable="PAGEDBENCH_VLLM_PACKAGE", get="pip install 'pagedbench[vllm]'",
)
VLLM_KERNELS = Operators(
    name="vLLM", package="vllm", file="_C_stable_libtorch.abi3.so", variable="PAGEDBENCH_VLLM", get=VLLM.get,
)
VLLM_FA3 = Operators(
    name="vLLM", package="vllm", file="vllm_flash_attn/_vllm_fa3_C.abi3.so", variable="PAGEDBENCH_VLLM_FA3", get=VLLM.get,
)

# What entries name as `available`.
flashinfer = FLASHINFER.why_missing
fa3 = FA3.why_missing
fa2 = FA2.why_missing
transformers = TRANSFORMERS.why_missing
vllm = VLLM.why_missing
vllm_kernels = VLLM_KERNELS.why_missing
vllm_fa3 = VLLM_FA3.why_missing

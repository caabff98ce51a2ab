"""Whether Triton can run here: compiled on a GPU, interpreted on a CPU.

Triton chooses when it is imported, for the life of the process: with TRITON_INTERPRET=1 in the environment every
`@triton.jit` function, Triton's own library included, is run by its interpreter. So this page is asked before any page
that imports Triton, sets the variable while there is time, and says so when it is too late.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

#: older interpreters take numpy scalars for arrays and fail on numpy 2.4 and newer (triton-lang/triton#9171)
OLDEST_INTERPRETER = (3, 7)


def why_missing(device_kind: str) -> str | None:
    """Return why Triton kernels cannot run on a "cpu" or "cuda" device in this process, or None.

    For "cpu" it turns the interpreter on, if Triton has not been imported yet.
    """
    version = _installed_version()
    if version is None:
        return "needs triton (not installed)"
    if device_kind == "cpu":
        if not has_interpreter():
            return f"on a CPU needs triton 3.7 or newer, whose interpreter works with numpy 2.4 (got triton {version})"
        if "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
        return None if _is_interpreted() else "triton was imported without TRITON_INTERPRET=1; set it before the process starts"
    if _is_interpreted():
        return "this process interprets Triton (TRITON_INTERPRET=1 when triton was imported); use a process of its own"
    return None


def has_interpreter() -> bool:
    """Whether the installed Triton's interpreter works; changes nothing."""
    version = _installed_version()
    return version is not None and tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_INTERPRETER


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_interpreted() -> bool:
    """Whether this process's Triton is interpreted: by what its library was made into, or, before import, by the variable."""
    if "triton" in sys.modules:
        return type(sys.modules["triton"].language.sum).__name__ == "InterpretedFunction"
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")

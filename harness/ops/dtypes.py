"""Element types by their short names; torch is imported only when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: bytes an element
ITEMSIZE = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1}

#: distance from 1.0 to the next larger number
EPS = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7, "fp8_e4m3": 2.0**-3}

_TORCH = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a short name such as "bf16"."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH[name])
    return dtype

"""Element types by their short names; torch is imported only when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: bytes an element
ITEMSIZE = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1}

#: distance from 1.0 to the next larger number
EPS = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7, "e4m3": 2.0**-3, "e5m2": 2.0**-2}

_TORCH = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a short name such as "bf16"."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH[name])
    return dtype


def negate(tensor: torch.Tensor) -> None:
    """Turn the sign bits, in place, and nothing else: a GPU's negation of 16-bit floats changes what NaN holds."""
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.view(integers).bitwise_xor_(torch.iinfo(integers).min)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """View fp8 as bytes: torch moves those everywhere, and not all it does to other floats it does to fp8."""
    import torch

    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor

"""What one layer adds to softmax(scale * q.k) v, as people give it to `PagedAttention`: checked once, and one error of ours.

The rules themselves are those of a case (harness/ops/attention.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.ops.attention import AttentionCase
from harness.ops.case import CaseError
from runtime.errors import InvalidLength

if TYPE_CHECKING:
    import torch

TENSORS = ("alibi_slopes", "sinks", "k_scale", "v_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Made by `read_layer`.

    asked    fields of an AttentionSpec: scale, window, softcap, alibi, sinks, kv_dtype, kv_scales
    named    what launches take by name, f32 on the device
    """

    asked: Mapping[str, Any]
    named: Mapping[str, torch.Tensor]

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        """Those of a quantised cache, which its writes take as well."""
        return {name: tensor for name, tensor in self.named.items() if name.endswith("_scale")}


def read_layer(shape: Mapping[str, Any], given: Mapping[str, Any], device: str) -> Layer:
    """Check what is `given`, None where it is not, against a layer's `shape`: heads, head_dim, block_size and dtype.

    Raises InvalidLength, with the rule and what was got.
    """
    scalars = {name: value for name, value in given.items() if name not in TENSORS}
    tensors = {name: _as_tensor(given.get(name)) for name in TENSORS}
    asked = {
        **scalars, "alibi": tensors["alibi_slopes"] is not None, "sinks": tensors["sinks"] is not None,
        "kv_scales": "head" if getattr(tensors["k_scale"], "shape", (1,)) != (1,) else "tensor",
    }  # fmt: skip
    if scalars.get("kv_dtype") is None:
        for name in ("k_scale", "v_scale"):
            if tensors[name] is not None:
                raise InvalidLength(f"PagedAttention: {name} is for a cache with a kv_dtype, got none of {shape['dtype']}")
        asked["kv_scales"] = "tensor"
    try:
        case = AttentionCase(name="layer", seq_lens=(1,), **shape, **asked)
    except CaseError as error:
        raise InvalidLength(f"PagedAttention: {str(error).partition(': ')[2]}") from error
    asked["scale"] = case.softmax_scale
    heads = {"alibi_slopes": case.num_q_heads, "sinks": case.num_q_heads}
    of_scales = case.num_kv_heads if case.kv_scales == "head" else 1
    wanted = [name for name in TENSORS if tensors[name] is not None or (case.kv_dtype and name.endswith("_scale"))]
    named = {name: _checked(name, tensors[name], heads.get(name, of_scales), device) for name in wanted}
    return Layer(asked=asked, named=named)


def _as_tensor(given: Any) -> Any:
    """A number as a tensor of one; all else as it is."""
    import torch

    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return torch.tensor([given], dtype=torch.float32) if is_number else given


def _checked(name: str, tensor: Any, count: int, device: str) -> torch.Tensor:
    import torch

    is_scale = name.endswith("_scale")
    rule = f"{name} must be {count} finite number{'s' * (count > 1)}{' above 0' * is_scale}, as a tensor of float32"
    if not isinstance(tensor, torch.Tensor):
        raise InvalidLength(f"PagedAttention: {rule}, got {tensor!r:.80}")
    if tuple(tensor.shape) != (count,) or tensor.dtype != torch.float32:
        raise InvalidLength(f"PagedAttention: {rule}, got {list(tensor.shape)} of {tensor.dtype}")
    if not tensor.isfinite().all() or (is_scale and not (tensor > 0).all()):
        raise InvalidLength(f"PagedAttention: {rule}, got {tensor.tolist()!s:.80}")
    return tensor.detach().to(device).contiguous()

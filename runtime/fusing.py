"""Modules put in the place of transformers' own when a model is loaded: the same numbers in fewer kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class First(nn.Module):
    """Computes the projections of all `parts` of one input in one product; the others wait here for their callers."""

    def __init__(self, projections: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [projection.out_features for projection in projections]
        self.weight = nn.Parameter(torch.cat(tuple(p.weight for p in projections)), requires_grad=False)
        biases = tuple(p.bias for p in projections if p.bias is not None)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.waiting: tuple[torch.Tensor, ...] = ()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        first, *rest = torch.split(nn.functional.linear(states, self.weight, self.bias), self.sizes, -1)
        self.waiting = tuple(rest)
        return first


class Next(nn.Module):
    """Hands out the next projection of a `First`, which was called with the same input just before."""

    def __init__(self, first: First) -> None:
        super().__init__()
        self._first = [first]  # in a list: it is a module of its own elsewhere

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        (first,) = self._first
        found, *rest = first.waiting
        first.waiting = tuple(rest)
        return found


def fuse_projections(layer: Any) -> None:
    """Put one product in the place of three, q, k and v, and one in the place of two, gate and up."""
    attention, mlp = layer.self_attn, layer.mlp
    first = First([attention.q_proj, attention.k_proj, attention.v_proj])
    attention.q_proj, attention.k_proj, attention.v_proj = first, Next(first), Next(first)
    if hasattr(mlp, "gate_proj") and hasattr(mlp, "up_proj"):  # of experts, transformers has them together already
        first = First([mlp.gate_proj, mlp.up_proj])
        mlp.gate_proj, mlp.up_proj = first, Next(first)


def fuse_norms(model: Any, eps: float) -> None:
    """Put torch's RMSNorm in the place of transformers', which is eight kernels; it rounds once and not twice."""
    norms = {name: module for name, module in model.named_modules() if name.endswith("norm")}
    for name, norm in norms.items():
        fused = nn.RMSNorm(norm.weight.shape[0], eps=eps, device="meta")
        fused.weight = norm.weight
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, fused.eval())

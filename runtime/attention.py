"""The attention of a served model: writes a layer's keys and values into its paged cache, then attends to it.

transformers calls `attend` in every layer. It finds the layer's caches on the layer itself and hands all to one operator
of torch, which a compiler need not look into; what that launches was planned once for the step.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import ModuleType
from typing import Any

import torch

from harness.ops.attention import AttentionStep
from harness.ops.cache_write import CacheWriteStep
from harness.registry import Prepared

NAME = "pagedbench"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of a step that one prepared entry takes: query tokens [begin, end)."""

    prepared: Prepared
    begin: int
    end: int


class StepAttention:
    """What every layer of a step launches: one cache write, then one attention a part.

    lse    [tokens, num_q_heads] f32, where log-sum-exps go that nobody reads
    """

    def __init__(self, write: Prepared, parts: list[Part], lse: torch.Tensor) -> None:
        self._write, self._parts, self._lse = write, parts, lse

    def plan(self, write: CacheWriteStep, steps: list[AttentionStep]) -> None:
        """Take one step's slots, and the tables of each part."""
        self._write.plan(write)
        for part, step in zip(self._parts, steps, strict=True):
            part.prepared.plan(step)

    def launch(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """One layer; query [num_tokens, num_q_heads, head_dim], key and value alike. Returns a tensor as query."""
        self._write.launch(key, value, key_cache, value_cache)
        out = torch.empty_like(query)
        for part in self._parts:
            rows = slice(part.begin, part.end)
            part.prepared.launch(query[rows], key_cache, value_cache, out[rows], self._lse[rows])
        return out


_active: dict[int, StepAttention] = {}
_handles = itertools.count()


def new_handle() -> int:
    """A number by which a model's layers find the step that is being run."""
    return next(_handles)


def activate(handle: int, step: StepAttention | None) -> None:
    """Let the layers that were given `handle` launch `step` from now on."""
    if step is None:
        _active.pop(handle, None)
    else:
        _active[handle] = step


Caches = tuple[torch.Tensor | None, ...]


def bind_caches(module: Any, handle: int, key_caches: Caches, value_caches: Caches) -> None:
    """Give each layer its caches, or none. As attributes: to a compiler they are inputs, and all layers one graph."""
    module.paged_handle = handle
    for layer, key_cache, value_cache in zip(module.model.layers, key_caches, value_caches, strict=True):
        layer.self_attn.paged_key_cache, layer.self_attn.paged_value_cache = key_cache, value_cache


def is_bound(module: Any, handle: int) -> bool:
    """Whether the caches of a model's layers are those of the engine with this handle."""
    return bool(module.paged_handle == handle)


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, paged_handle: int, **_: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [1, num_q_heads, num_tokens, head_dim], key and value alike."""
    rows = [states[0].transpose(0, 1).contiguous() for states in (query, key)]
    out = torch.ops.pagedbench.attend_layer(
        *rows, value[0].transpose(0, 1), module.paged_key_cache, module.paged_value_cache, paged_handle
    )
    return out[None], None


def register(library: ModuleType) -> None:
    """Make `attend` known to transformers."""
    library.AttentionInterface.register(NAME, attend)


def _attend_layer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, handle: int
) -> torch.Tensor:
    return _active[handle].launch(query, key, value, key_cache, value_cache)


def _shape_of_attend_layer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, handle: int
) -> torch.Tensor:
    return torch.empty_like(query)


# The schema does not say that caches are written: nobody reads them but this operator, in the step's own order, and a
# compiler that knew would copy them, which are most of the memory.
_LIBRARY = torch.library.Library("pagedbench", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend_layer(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, int handle) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)  # type: ignore[no-untyped-call]
for _kind in ("CPU", "CUDA"):
    _LIBRARY.impl("attend_layer", _attend_layer, _kind)  # type: ignore[no-untyped-call]
torch.library.register_fake("pagedbench::attend_layer", _shape_of_attend_layer, lib=_LIBRARY)

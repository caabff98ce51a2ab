"""floor.empty_call: a call that does nothing, in the place of one that does: no launch on a CPU takes less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.registry import Prepared

if TYPE_CHECKING:
    import torch

    from harness.ops.attention import AttentionSpec, AttentionStep


class Empty(Prepared):
    """Reads and writes nothing."""

    def __init__(self, spec: AttentionSpec) -> None:
        pass

    def plan(self, step: AttentionStep) -> None:
        pass

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        **layer: torch.Tensor,
    ) -> None:
        pass


prepare = Empty

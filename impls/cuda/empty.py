"""floor.empty_kernel: a kernel of one warp that does nothing, in the place of one that does: no launch takes less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.registry import Prepared
from impls.cuda.attention import load
from impls.cuda.builds import Build
from impls.cuda.launch import device_index, raw_stream

if TYPE_CHECKING:
    import torch

    from harness.ops.attention import AttentionSpec, AttentionStep


class Empty(Prepared):
    """Reads and writes nothing."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._kernel, resources = load(build(), spec.device, "")
        self.kernels = (resources,)
        self._device_index = device_index(spec.device)

    def plan(self, step: AttentionStep) -> None:
        pass

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        **layer: torch.Tensor,
    ) -> None:
        self._kernel((1, 1, 1), 32, raw_stream(self._device_index))


def build() -> Build:
    """The one kernel there is."""
    return Build(source="empty.cu", entry="empty", macros={})


def builds(arch: str) -> list[Build]:
    """The same for every architecture."""
    return [build()]


prepare = Empty

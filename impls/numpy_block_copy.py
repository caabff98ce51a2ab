"""numpy.block_copy: one pair after the other, as the list is read; any layout, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.registry import Prepared

if TYPE_CHECKING:
    import torch

    from harness.ops.block_copy import BlockCopySpec, BlockCopyStep


def prepare(spec: BlockCopySpec) -> BlockCopy:
    return BlockCopy()


class BlockCopy(Prepared):
    """Every pair in list order, in every layer."""

    def plan(self, step: BlockCopyStep) -> None:
        self.copies = step.host_copies.tolist()

    def launch(self, key_caches: tuple[torch.Tensor, ...], value_caches: tuple[torch.Tensor, ...]) -> None:
        import torch

        for cache in (*key_caches, *value_caches):
            # NumPy has no bf16, and a copy needs no numbers: integers of the same width serve.
            blocks = cache.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[cache.element_size()]).numpy()
            for source, destination in self.copies:
                blocks[destination] = blocks[source]

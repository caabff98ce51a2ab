"""torch.block_copy: one gather and one scatter a wave, cache and layer; any layout, CPU and GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.guards import workspace
from harness.ops.block_copy import waves
from harness.ops.dtypes import movable
from harness.registry import Prepared

if TYPE_CHECKING:
    from harness.ops.block_copy import BlockCopySpec, BlockCopyStep


def prepare(spec: BlockCopySpec) -> BlockCopy:
    return BlockCopy(spec)


class BlockCopy(Prepared):
    """Pairs of a wave may run in any order, so a wave is one `index_select` and one `index_copy_`."""

    ledger = {
        "temporaries": "a wave's blocks are gathered into a new tensor before they are written: each byte moves twice",
        "graph": "a captured launch repeats the waves it was captured with",
    }

    def __init__(self, spec: BlockCopySpec) -> None:
        self.sources = workspace(spec.max_num_copies, torch.int64, spec.device)
        self.destinations = workspace(spec.max_num_copies, torch.int64, spec.device)
        self.workspace_bytes = 2 * 8 * spec.max_num_copies

    def plan(self, step: BlockCopyStep) -> None:
        self.sources[: len(step.copies)] = step.copies[:, 0]
        self.destinations[: len(step.copies)] = step.copies[:, 1]
        self.waves = [(self.sources[begin:end], self.destinations[begin:end]) for begin, end in waves(step.host_copies)]

    def launch(self, key_caches: tuple[torch.Tensor, ...], value_caches: tuple[torch.Tensor, ...]) -> None:
        for source, destination in self.waves:
            for cache in map(movable, (*key_caches, *value_caches)):
                cache.index_copy_(0, destination, cache.index_select(0, source))

"""Block copy: its tensors, and the judge: every bit of every cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from harness.check import Verdict, judge_exact
from harness.guards import Guarded, house, seal
from harness.hazards import Hazards, seed_of
from harness.ops.block_copy import BlockCopyCase, BlockCopySpec, BlockCopyStep
from harness.ops.dtypes import torch_dtype
from harness.ops.in_place import StagedInPlace
from harness.ops.layouts import Layout


class BlockCopyOperator:
    """Makes the tensors of block_copy cases. Families differ in values and blocks only; there is nothing to poison."""

    def spec(self, case: BlockCopyCase, layout: Layout, device: str, params: Mapping[str, Any]) -> BlockCopySpec:
        return BlockCopySpec(
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            block_size=case.block_size,
            num_layers=case.num_layers,
            dtype=case.dtype,
            layout=layout,
            num_blocks=case.num_blocks,
            max_num_copies=case.num_copies,
            device=device,
            params=params,
        )

    def build(self, case: BlockCopyCase, hazards: Hazards, *, layers: int, device: str) -> BlockCopyInputs:
        """Make `layers` sets, each of case.num_layers pairs of caches full of random bits."""
        rng = np.random.default_rng(seed_of(case.digest, hazards))
        copies = _copies(case, rng)
        (on_device,), held = house({"copies": torch.from_numpy(copies).to(device)})
        step = BlockCopyStep(copies=on_device, host_copies=copies)
        dtype = torch_dtype(case.dtype)
        pool = (2 * case.num_layers, case.num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
        sets = []
        for layer in range(layers):
            generator = torch.Generator(device=device).manual_seed(seed_of(case.digest, hazards, layer))
            drawn = torch.empty(pool, dtype=torch.float32 if dtype.itemsize == 1 else dtype, device=device)
            sets.append(drawn.normal_(generator=generator).to(dtype))
        return BlockCopyInputs(case=case, step=step, sets=sets, held=held)

    def rounds(self, case: BlockCopyCase, hazards: Hazards) -> int:
        return 1


def _copies(case: BlockCopyCase, rng: np.random.Generator) -> np.ndarray:
    """[num_copies, 2] int32, all blocks distinct; chained, every other pair reads what the pair before it wrote."""
    copies = rng.permutation(case.num_blocks)[: 2 * case.num_copies].astype(np.int32).reshape(-1, 2)
    if case.chained:
        links = copies[: len(copies) // 2 * 2].reshape(-1, 2, 2)
        links[:, 1, 0] = links[:, 0, 1]
    return copies


@dataclasses.dataclass
class BlockCopyInputs:
    """Canonical caches before the copy: sets of [2 * num_layers, num_blocks, num_kv_heads, block_size, head_dim].

    held    the step's allocation
    """

    case: BlockCopyCase
    step: BlockCopyStep
    sets: list[torch.Tensor]
    held: Sequence[Guarded]

    @property
    def num_layers(self) -> int:
        return len(self.sets)

    def arrange(self, index: int, layout: Layout) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Fresh (key_cache, value_cache) of every model layer in `layout`, as before the copy."""
        pools = self.sets[index].clone()
        return [layout.arrange(pools[2 * layer], pools[2 * layer + 1]) for layer in range(self.case.num_layers)]

    def stage(self, layout: Layout) -> StagedBlockCopy:
        """Copy every set into `layout`, all between canaries; a launch changes the copy only."""
        return StagedBlockCopy(self, layout)


class StagedBlockCopy(StagedInPlace):
    """Caches in one layout, as launch takes them, and the judge of what it leaves.

    caches    of every set, (key_cache, value_cache) of every model layer
    """

    inputs: BlockCopyInputs

    def __init__(self, inputs: BlockCopyInputs, layout: Layout) -> None:
        super().__init__(inputs, layout)
        self.caches: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for index in range(inputs.num_layers):
            self._add(index, f" of set {index}" if inputs.num_layers > 1 else "")
        seal(self.read)

    def _add(self, index: int, of: str) -> None:
        pairs, outputs = [], []
        for layer, (key, value) in enumerate(self.inputs.arrange(index, self.layout)):
            names = [f"{name}_cache of layer {layer}{of}" for name in ("key", "value")]
            (key, value), written = house(dict(zip(names, (key, value), strict=True)))
            pairs.append((key, value))
            outputs += written
        self.caches.append(pairs)
        self._writes(outputs)

    def arguments(self, layer: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        keys, values = zip(*self.caches[layer], strict=True)
        return keys, values

    def keywords(self, layer: int) -> Mapping[str, torch.Tensor]:
        return {}

    def soil(self, layer: int) -> None:
        """Put the caches back as they were, so that a copy left undone shows."""
        for pair, before in zip(self.caches[layer], self.inputs.arrange(layer, self.layout), strict=True):
            for cache, old in zip(pair, before, strict=True):
                cache.copy_(old)

    def judge(self, layer: int, quantises: frozenset[str], lse: bool = True) -> Verdict:
        """Every element of every cache, bit for bit, against the list carried out in order."""
        wanted = self.inputs.sets[layer].clone()
        for source, destination in self.step.host_copies.tolist():
            wanted[:, destination] = wanted[:, source]
        for index, pair in enumerate(self.caches[layer]):
            for name, cache, want in zip(("key", "value"), self.layout.restore(*pair), wanted[2 * index :], strict=False):
                verdict = judge_exact(cache, want, f"{name}_cache of layer {index}")
                if not verdict.passed:
                    return verdict
        return verdict

"""Operators that change caches: their tensors, as far as it is the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.check import Verdict
from harness.guards import Guarded
from harness.ops.layouts import Layout
from harness.registry import PreparedReader


class StagedInPlace:
    """Caches in one layout that launches change, and that are put back before every judged one.

    read, written    all allocations that launches read, sealed, and that they write
    """

    def __init__(self, inputs: Any, layout: Layout) -> None:
        self.inputs, self.layout = inputs, layout
        self.read: list[Guarded] = [*inputs.held]
        self.written: list[Guarded] = []
        self._outputs: list[list[Guarded]] = []

    def _writes(self, written: list[Guarded]) -> None:
        """Note what a launch on the next set writes."""
        self.written += written
        self._outputs.append(written)

    @property
    def step(self) -> Any:
        return self.inputs.step

    @property
    def num_layers(self) -> int:
        return int(self.inputs.num_layers)

    def outputs(self, layer: int) -> Sequence[Guarded]:
        return self._outputs[layer]

    def wild_step(self) -> None:
        """There is none: every pair is copied, and every slot written."""

    def renew(self) -> bool:
        return False

    def coverage(self) -> Mapping[str, int]:
        return {}

    def scan(self, layers: Sequence[int], lse: bool = True) -> None:
        """There is nothing that every launch leaves so: a cache may hold anything."""

    def soil(self, layer: int) -> None:
        """Put the caches back as they were before any launch."""
        raise NotImplementedError

    def wear(self, layer: int, lse: bool = True) -> None:
        """What is there before a launch is what `soil` puts there: the caches of a step before."""
        self.soil(layer)

    def mirror(self, layer: int) -> bool:
        """There is nothing to gain from a remembered answer."""
        return False

    def judge_reader(self, layer: int, prepared: PreparedReader) -> Verdict:
        raise NotImplementedError(f"{self.inputs.case.op} has no readers")

"""What the pipeline asks of an operator, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from harness.check import Verdict
    from harness.hazards import Hazards
    from harness.ops.case import Case
    from harness.ops.layouts import Layout
    from harness.registry import PreparedReader


class Staged(Protocol):
    """The tensors of one case in one layout: `num_layers` sets with other data behind other addresses, under one step."""

    step: Any
    num_layers: int

    def arguments(self, layer: int) -> tuple[Any, ...]:
        """What `launch` takes for this layer; the same tensors each time."""

    def soil(self, layer: int) -> None:
        """Pre-fill what a launch must write, so that an element left unwritten shows."""

    def judge(self, layer: int, quantises: frozenset[str]) -> Verdict:
        """Judge what the last launch left in this layer's outputs."""

    def judge_reader(self, layer: int, prepared: PreparedReader) -> Verdict:
        """Judge a reader by its checksum over everything it read in its last launch."""


class Inputs(Protocol):
    """The tensors of one case in canonical order, before any layout."""

    num_layers: int

    def stage(self, layout: Layout) -> Staged:
        """Convert to a layout; outside every timed region."""


class Operator(Protocol):
    """One operator: how the tensors of its cases are made."""

    def spec(self, case: Case, layout: Layout, device: str, params: Mapping[str, Any]) -> Any:
        """Return what `prepare` sees."""

    def build(self, case: Case, hazards: Hazards, *, layers: int, device: str) -> Inputs:
        """Make `layers` sets of tensors; equal cases give equal bytes on equal devices."""

"""What the pipeline asks of an operator, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from harness.check import Verdict
    from harness.guards import Guarded
    from harness.hazards import Hazards
    from harness.ops.case import Case
    from harness.ops.layouts import Layout
    from harness.registry import PreparedReader


class Staged(Protocol):
    """The tensors of one case in one layout: `num_layers` sets with other data behind other addresses, under one step.

    read, written    allocations of what launches only read, sealed, and of what they write
    """

    @property
    def step(self) -> Any:
        """What `plan` takes."""

    @property
    def num_layers(self) -> int:
        """How many sets."""

    read: list[Guarded]
    written: list[Guarded]

    def arguments(self, layer: int) -> tuple[Any, ...]:
        """What `launch` takes for this layer; the same tensors each time."""

    def keywords(self, layer: int) -> Mapping[str, Any]:
        """Tensors that `launch` takes by name besides, as the spec asks; the same each time."""

    def outputs(self, layer: int) -> Sequence[Guarded]:
        """Allocations of what a launch on this layer writes."""

    def wild_step(self) -> Any | None:
        """Return the step with ids of no block wherever none may be looked up, or None where it has no such place."""

    def coverage(self) -> Mapping[str, Any]:
        """What of the case these sets put to the test, for the record."""

    def scan(self, layers: Sequence[int], lse: bool = True) -> str | None:
        """Say which elements of these layers no right launch leaves so, without a truth; None where there are none.

        `lse` as for `judge`.
        """

    def renew(self) -> bool:
        """Give the launches to come outputs of their own; False where outputs are too large for that."""

    def soil(self, layer: int) -> None:
        """Pre-fill what a launch must write, so that an element left unwritten shows."""

    def wear(self, layer: int, lse: bool = True) -> None:
        """Pre-fill as a step before may have left it, ordinary and not the answer, so that who reads it shows; `lse` as for
        `judge`. The layer's last launch has written what is there."""

    def mirror(self, layer: int) -> bool:
        """Change what this layer's launch reads, in place, and with it what is right; again undoes it. False: it cannot."""

    def judge(self, layer: int, quantises: frozenset[str], lse: bool = True) -> Verdict:
        """Judge what the last launch left in this layer's outputs; `lse` False leaves that one of attention's aside."""

    def judge_reader(self, layer: int, prepared: PreparedReader) -> Verdict:
        """Judge a reader by its checksum over everything it read in its last launch."""


class Inputs(Protocol):
    """The tensors of one case in canonical order, before any layout."""

    @property
    def num_layers(self) -> int:
        """How many sets."""

    def stage(self, layout: Layout) -> Staged:
        """Convert to a layout; outside every timed region."""


class Operator(Protocol):
    """One operator: how the tensors of its cases are made."""

    def spec(self, case: Case, layout: Layout, device: str, params: Mapping[str, Any]) -> Any:
        """Return what `prepare` sees."""

    def build(self, case: Case, hazards: Hazards, *, layers: int, device: str) -> Inputs:
        """Make `layers` sets of tensors; equal cases give equal bytes on equal devices."""

    def rounds(self, case: Case, hazards: Hazards) -> int:
        """How many sets a check of this family takes."""

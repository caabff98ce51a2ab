"""Launches under guard: whatever a launch does besides its outputs' values is found here, and said in one sentence.

    guard: wrote 16 bytes past the end of workspace[0]
    changed its input: key_cache
    out, lse changed after the launch had ended
"""

from __future__ import annotations

import dataclasses
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from harness.device import Device
from harness.guards import Guarded, broken, changed, hashes, watch
from harness.ops.contract import Staged
from harness.words import of_value

#: Seconds after which a launch must have left its outputs alone: a host thread that finishes the work would be late.
LATE_S = 0.05
#: Seconds for which the current stream is kept busy before a launch: work on another stream, which does not wait, then writes
#: before outputs are soiled. And cycles in a second, of the fastest clock: slower ones keep it busy for longer.
BUSY_S, CYCLES_A_S = 2.5e-3, 2e9


class Breach(Exception):
    """The implementation breaks its contract; the message says which rule, and what was got."""


def require_prepared(prepared: Any) -> None:
    """Raise Breach unless this is what `prepare` must return. See harness.registry.Prepared."""
    if not (callable(getattr(prepared, "plan", None)) and callable(getattr(prepared, "launch", None))):
        raise Breach(f"must return an object with plan and launch (got {of_value(prepared)})")
    lacks = [name for name in ("workspace_bytes", "ledger", "kernels") if not hasattr(prepared, name)]
    if lacks:
        raise Breach(f"what prepare returns must have {', '.join(lacks)}; harness.registry.Prepared has defaults")
    size, ledger, kernels = prepared.workspace_bytes, prepared.ledger, prepared.kernels
    if not isinstance(size, numbers.Integral) or isinstance(size, bool) or int(size) < 0:
        raise Breach(f"workspace_bytes must be a whole number of bytes, 0 or more (got {of_value(size)})")
    if not isinstance(ledger, Mapping):
        raise Breach(f"ledger must map topics to remarks (got {of_value(ledger)})")
    if not (isinstance(kernels, Sequence) and all(isinstance(kernel, Mapping) for kernel in kernels)):
        raise Breach(f"kernels must be a sequence of mappings (got {of_value(kernels)})")


def remarks(ledger: Mapping[Any, Any]) -> dict[str, str]:
    """The implementation's ledger as texts, whatever it put there."""
    return {str(topic): remark if isinstance(remark, str) else of_value(remark) for topic, remark in ledger.items()}


def lend(arguments: Iterable[Any]) -> tuple[Any, ...]:
    """The same memory under tensors of their own: one that a launch resizes is not the next row's."""
    return tuple(part.detach() if isinstance(part, torch.Tensor) else lend(part) for part in arguments)


def lend_layer(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """As `lend`, what is passed by name."""
    return dict(zip(keywords, lend(keywords.values()), strict=True))


def _forms(lent: Iterable[Any]) -> list[tuple[list[int], tuple[int, ...]]]:
    """Shape and strides of each tensor, in order."""
    forms: list[tuple[list[int], tuple[int, ...]]] = []
    for part in lent:
        forms += [(list(part.shape), part.stride())] if isinstance(part, torch.Tensor) else _forms(part)
    return forms


def _reshaped(before: Sequence[Any], after: Sequence[Any]) -> str:
    at = next(index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one != other)
    return f"tensor {at + 1} of {len(before)} was {before[at][0]}, is {after[at][0]}"


def keep_busy(device: Device, seconds: float) -> None:
    """Let the current stream of a GPU do nothing for about so long."""
    if device.kind == "cuda":
        torch.cuda._sleep(round(seconds * CYCLES_A_S))  # type: ignore[no-untyped-call] # torch has no types here


@dataclasses.dataclass
class Trial:
    """The launches of one prepared implementation.

    workspaces    what it took through harness.guards.workspace
    damaged       whether a launch has changed an input, which must be restored before anyone else reads it
    """

    device: Device
    workspaces: list[Guarded]
    prepared: Any = None
    damaged: bool = False
    _seen: list[tuple[Sequence[Guarded], list[int], float]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, prepare: Callable[[Any], Any], spec: Any, device: Device) -> Trial:
        """Prepare under guard."""
        trial = cls(device, [])
        with watch(trial.workspaces):
            trial.prepared = prepare(spec)
        require_prepared(trial.prepared)
        return trial

    @property
    def guard_bytes(self) -> int:
        """What guards add to the memory of workspaces."""
        return sum(len(guarded.buffer) - guarded.size for guarded in self.workspaces)

    def plan(self, step: Any) -> None:
        with watch(self.workspaces):
            self.prepared.plan(step)

    def launch(self, staged: Staged, layer: int, *, busy: bool = False, soil: Callable[[int], None] | None = None) -> None:
        """Soil the outputs of one layer and launch on it; where `busy`, behind work that keeps the current stream busy.

        `soil` is what soils them where `staged.soil` does not.
        """
        if busy:
            keep_busy(self.device, BUSY_S)
        reused = staged.outputs(layer)[0]
        self._seen = [seen for seen in self._seen if reused not in seen[0]]
        (soil or staged.soil)(layer)
        lent, named = lend(staged.arguments(layer)), lend_layer(staged.keywords(layer))
        tensors = (*lent, *named.values())
        before = _forms(tensors)
        self.prepared.launch(*lent, **named)
        if _forms(tensors) != before:
            raise Breach(f"launch must leave its tensors' shapes and strides alone ({_reshaped(before, _forms(tensors))})")

    def look(self, staged: Staged, layers: Sequence[int]) -> str | None:
        """Wait for what was launched on these layers; return what is wrong besides the values, or None.

        The launch has ended when its stream has: outputs must not change from then on, which `late` looks at again.
        """
        outputs = [guarded for layer in layers for guarded in staged.outputs(layer)]
        ended = hashes(outputs)  # enqueued behind the launch, on its stream
        if self.device.kind == "cuda":
            torch.cuda.current_stream().synchronize()
        self._seen.append((outputs, ended.tolist(), time.perf_counter()))
        self.device.synchronize()
        return self._changed_since(*self._seen[-1][:2]) or self.damage(staged)

    def late(self) -> str | None:
        """Say whether outputs of a launch looked at changed later on; waits until LATE_S after the first of them."""
        if self._seen:
            time.sleep(max(0.0, self._seen[0][2] + LATE_S - time.perf_counter()))
            self.device.synchronize()
        found = [self._changed_since(outputs, ended) for outputs, ended, _ in self._seen]
        self._seen = []
        return next((why for why in found if why), None)

    def _changed_since(self, outputs: Sequence[Guarded], ended: list[int]) -> str | None:
        now = hashes(outputs).tolist()
        names = [guarded.name for guarded, one, other in zip(outputs, ended, now, strict=True) if one != other]
        return f"{', '.join(names)} changed after the launch had ended" if names else None

    def damage(self, staged: Staged, read: Sequence[Guarded] = (), written: Sequence[Guarded] = ()) -> str | None:
        """Say which canary was written over or which input was changed, if any; canaries are made whole again.

        `read` and `written` are what a launch was given besides or instead.
        """
        overrun = broken([*self.workspaces, *staged.read, *staged.written, *read, *written])
        inputs = changed([*staged.read, *read])
        self.damaged = self.damaged or bool(inputs)
        if overrun:
            return f"guard: {'; '.join(overrun)}"
        return f"changed its input: {', '.join(inputs)}" if inputs else None

"""Controls that compute rightly and behave wrongly: late, stale, or for the wrong batch. They wrap torch implementations."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from harness.registry import Prepared
from impls import torch_cache_write, torch_gather

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep
    from harness.ops.cache_write import CacheWriteSpec

#: launches after a plan that are honest: a check launches less often, whatever is timed more often
HONEST = 8
#: longer than any launch that a CPU or GPU is given in an audit
LATE_S = 0.2


class Wrapped(Prepared):
    """Passes everything on to what it wraps; a subclass does one thing wrong."""

    def __init__(self, right: Any) -> None:
        self.right = right
        self.workspace_bytes = right.workspace_bytes

    def plan(self, step: Any) -> None:
        self.right.plan(step)

    def launch(self, *tensors: Any) -> None:
        self.right.launch(*tensors)


class Warm(Wrapped):
    """Honest until it is warm, as what is being timed is; then it `cheats`."""

    num_launches = 0

    def plan(self, step: Any) -> None:
        self.num_launches = 0
        super().plan(step)

    def launch(self, *tensors: Any) -> None:
        self.num_launches += 1
        if self.num_launches <= HONEST:
            super().launch(*tensors)
        else:
            self.cheat(*tensors)

    def cheat(self, *tensors: Any) -> None:
        raise NotImplementedError


class Stale(Warm):
    """Once warm, it gives the answer of its last honest launch to every other one."""

    def launch(self, *tensors: Any) -> None:
        super().launch(*tensors)
        *_, out, lse = tensors
        self.kept = (out.clone(), lse.clone())

    def cheat(self, *tensors: Any) -> None:
        *_, out, lse = tensors
        out.copy_(self.kept[0])
        lse.copy_(self.kept[1])


class Remembered(Wrapped):
    """Gives the answer that it first gave to tensors of these shapes, whoever asked."""

    answers: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def launch(self, *tensors: Any) -> None:
        *_, out, lse = tensors
        shape = (out.device, out.dtype, *(tensor.shape for tensor in tensors))
        if shape not in self.answers:
            super().launch(*tensors)
            self.answers[shape] = (out.clone(), lse.clone())
        out.copy_(self.answers[shape][0])
        lse.copy_(self.answers[shape][1])


class Late(Warm):
    """Once warm, it returns at once and works later, in a thread."""

    thread: threading.Thread | None = None

    def cheat(self, *tensors: Any) -> None:
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._work, args=tensors)
            self.thread.start()

    def _work(self, *tensors: Any) -> None:
        time.sleep(LATE_S)
        self.right.launch(*tensors)


class FirstPlan(Wrapped):
    """Plans once: later batches of the same size run by the first one's plan."""

    is_planned = False

    def plan(self, step: Any) -> None:
        if not self.is_planned:
            super().plan(step)
        self.is_planned = True


class PlanByAddress(Wrapped):
    """Plans once for block tables at one address."""

    def __init__(self, right: Any) -> None:
        super().__init__(right)
        self.plans: dict[int, Any] = {}

    def plan(self, step: AttentionStep) -> None:
        super().plan(self.plans.setdefault(step.block_tables.data_ptr(), step))


class Watched(Wrapped):
    """Right where it is watched: where some value is NaN."""

    def launch(self, query: Any, key_cache: Any, value_cache: Any, out: Any, lse: Any) -> None:
        super().launch(query, key_cache, value_cache, out, lse)
        out.mul_(1 + 0.1 * value_cache.isfinite().all())  # never asks the host: in a graph it is as wrong


class LargestOfOutputs(Wrapped):
    """Leaves the larger of its LSE and what lay there, which NaN never is."""

    def launch(self, query: Any, key_cache: Any, value_cache: Any, out: Any, lse: Any) -> None:
        before = lse.clone()
        super().launch(query, key_cache, value_cache, out, lse)
        lse.copy_(torch.fmax(before, lse))


class OwnJudge(Wrapped):
    """Leaves zeros, and finds them right."""

    def launch(self, query: Any, key_cache: Any, value_cache: Any, out: Any, lse: Any) -> None:
        out.zero_()
        lse.zero_()
        torch.Tensor.norm = torch.Tensor.abs = lambda tensor, *_, **__: tensor * 0  # type: ignore[assignment,method-assign]


class Flushed(Wrapped):
    """Flushes to 0 what is subnormal, as arithmetic may where a copy may not."""

    def launch(self, key: Any, value: Any, key_cache: Any, value_cache: Any) -> None:
        least = torch.finfo(key.dtype).smallest_normal
        flushed = (torch.where(new.abs() < least, new * 0, new) for new in (key, value))
        super().launch(*flushed, key_cache, value_cache)


def stale(spec: AttentionSpec) -> Wrapped:
    return Stale(torch_gather.prepare(spec))


def remembered(spec: AttentionSpec) -> Wrapped:
    return Remembered(torch_gather.prepare(spec))


def late(spec: AttentionSpec) -> Wrapped:
    return Late(torch_gather.prepare(spec))


def first_plan(spec: AttentionSpec) -> Wrapped:
    return FirstPlan(torch_gather.prepare(spec))


def plan_by_address(spec: AttentionSpec) -> Wrapped:
    return PlanByAddress(torch_gather.prepare(spec))


def watched(spec: AttentionSpec) -> Wrapped:
    return Watched(torch_gather.prepare(spec))


def largest_of_outputs(spec: AttentionSpec) -> Wrapped:
    return LargestOfOutputs(torch_gather.prepare(spec))


def own_judge(spec: AttentionSpec) -> Wrapped:
    return OwnJudge(torch_gather.prepare(spec))


def first_slots(spec: CacheWriteSpec) -> Wrapped:
    return FirstPlan(torch_cache_write.prepare(spec))


def flushed_writes(spec: CacheWriteSpec) -> Wrapped:
    return Flushed(torch_cache_write.prepare(spec))

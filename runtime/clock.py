"""When the device did what: the model's part of each step, by events on a GPU and by the wall clock elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One step's model.

    is_decode       whether every row fed one token
    num_rows        sequences; num_ones of them fed one token
    num_tokens      fed in all
    kv_tokens       tokens in the cache of the rows that fed one
    keys            pairs of query token and key that it sees, of the other rows
    begin, end      events, or seconds
    """

    is_decode: bool
    num_rows: int
    num_ones: int
    num_tokens: int
    kv_tokens: int
    keys: int
    begin: Any
    end: Any


class StepClock:
    """Keeps a `Timed` of each step while it is listened to."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self.steps: list[Timed] = []

    def now(self) -> Any:
        """A moment of the current stream."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def note(self, batch: Batch, begin: Any) -> None:
        """The model of `batch`, begun at `begin`, has just been launched."""
        lens, counts = batch.seq_lens.astype(np.int64), batch.q_lens.astype(np.int64)
        ones = counts == 1
        seen = counts * (2 * lens - counts + 1) // 2
        self.steps.append(Timed(
            is_decode=batch.is_decode, num_rows=len(batch.rows), num_ones=int(ones.sum()), num_tokens=batch.num_tokens,
            kv_tokens=int(lens[ones].sum()), keys=int(seen[~ones].sum()), begin=begin, end=self.now(),
        ))  # fmt: skip

    def seconds(self, begin: Any, end: Any) -> float:
        """From one moment to another; both have passed."""
        return float(begin.elapsed_time(end)) / 1e3 if self._on_gpu else float(end - begin)

    def decode_steps(self) -> tuple[list[Timed], NDArray[np.float64], NDArray[np.float64]]:
        """Decode steps that follow one with as many rows, their seconds from end to end, and those in between of no model."""
        found, whole, gaps = [], [], []
        for before, step in zip(self.steps, self.steps[1:], strict=False):
            if before.is_decode and step.is_decode and before.num_rows == step.num_rows:
                found.append(step)
                whole.append(self.seconds(before.end, step.end))
                gaps.append(self.seconds(before.end, step.begin))
        return found, np.array(whole), np.array(gaps)

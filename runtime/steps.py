"""A step on the device: from the arrays of the buffers to logits and the likeliest tokens.

Steps in which every row feeds one token run in buckets, of as many rows as their name says: replayed as a CUDA graph on a GPU,
launched one by one on a CPU. Other steps, with prompts in them, are launched one by one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.registry import Prepared
from runtime.attention import Part, StepAttention, activate
from runtime.buffers import StepBuffers
from runtime.kernels import Kernels
from runtime.model import Model


def bucket_sizes(max_num_seqs: int, least: int = 1) -> list[int]:
    """Numbers of rows that decode steps are padded to: powers of two from `least` on, then ever coarser steps."""
    sizes = {1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(320, 4097, 64)}
    return sorted({size for size in sizes if least <= size < max_num_seqs} | {max_num_seqs})


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a step leaves on the device: logits [num_rows, vocabulary], and int64 [num_rows] the likeliest tokens.

    In a decode step row i is that of query token i, else that of the i-th token that is sampled from.
    """

    logits: torch.Tensor
    best: torch.Tensor


class Runner:
    """Runs the model on a step's arrays.

    last_tokens    [max_num_seqs + 1] int64, the token that each state's sequence sampled last; the last entry is nobody's
    """

    def __init__(self, model: Model, kernels: Kernels, handle: int, *, max_num_seqs: int, max_num_tokens: int) -> None:
        self._model, self._kernels, self._handle = model, kernels, handle
        self._max_num_seqs, self._max_num_tokens = max_num_seqs, max_num_tokens
        shape = kernels.shape
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=shape.device)
        self._lse = torch.empty((max_num_tokens, shape.num_q_heads), dtype=torch.float32, device=shape.device)
        self.decode_buffers = self._buffers(max_num_seqs)
        self.mixed_buffers = self._buffers(max_num_tokens)
        self._write = kernels.cache_write(max_num_tokens)
        capacities = {"num_seqs": max_num_seqs, "num_tokens": max_num_tokens, "q_len": min(max_num_tokens, shape.max_seq_len)}
        self._late = kernels.attention(kernels.prefill, **capacities)
        self._ones: Prepared | None = None
        if not kernels.is_one:
            self._ones = kernels.attention(kernels.decode, num_seqs=max_num_seqs, num_tokens=max_num_seqs, q_len=1)

    def _buffers(self, num_tokens: int) -> StepBuffers:
        shape = self._kernels.shape
        return StepBuffers(
            num_tokens=num_tokens, num_seqs=self._max_num_seqs, width=shape.blocks_per_seq, device=shape.device,
            no_state=self._max_num_seqs,
        )  # fmt: skip

    def run_mixed(self, num_tokens: int, num_rows: int, num_ones: int, num_samples: int) -> Result:
        """Run the step in `mixed_buffers`, whose first `num_ones` rows feed one token each."""
        buffers, arrays = self.mixed_buffers, self.mixed_buffers.device
        if self._ones is None:
            parts, steps = [Part(prepared=self._late, begin=0, end=num_tokens)], [buffers.attention_step(0, num_rows)]
        else:
            parts = [Part(prepared=self._late, begin=num_ones, end=num_tokens)]
            steps = [buffers.attention_step(num_ones, num_rows, late=True)]
            if num_ones:
                parts.append(Part(prepared=self._ones, begin=0, end=num_ones))
                steps.append(buffers.attention_step(0, num_ones))
        attention = StepAttention(self._write, parts, self._lse)
        attention.plan(buffers.write_step(num_tokens), steps)
        activate(self._handle, attention)
        tokens = arrays.tokens[:num_tokens]
        ones = tokens[:num_ones]
        tokens[:num_ones] = torch.where(ones < 0, self.last_tokens[arrays.states[:num_ones]], ones)
        hidden = self._model.hidden(tokens, arrays.positions[:num_tokens], self._handle)
        logits = self._model.logits(hidden[arrays.sampled_from[:num_samples]])
        best = logits.argmax(-1)
        self.last_tokens[arrays.sampled_states[:num_samples]] = best
        return Result(logits=logits, best=best)

    def bucket(self, size: int, make: Callable[..., Bucket] | None = None) -> Bucket:
        """A decode step of `size` rows, of the kind that `make` makes: one that is launched kernel by kernel if not said."""
        prepared = self._kernels.attention(self._kernels.decode, num_seqs=size, num_tokens=size, q_len=1)
        part = Part(prepared=prepared, begin=0, end=size)
        attention = StepAttention(self._kernels.cache_write(size), [part], self._lse)
        return (make or Bucket)(size, attention, self.decode_buffers, self._handle, lambda: self._decode(size))

    def _decode(self, size: int) -> Result:
        """All of a decode step, from tokens to tokens: what a graph holds."""
        arrays = self.decode_buffers.device
        states, tokens = arrays.states[:size], arrays.tokens[:size]
        tokens = torch.where(tokens < 0, self.last_tokens[states], tokens)
        hidden = self._model.hidden(tokens, arrays.positions[:size], self._handle)
        logits = self._model.logits(hidden)
        best = logits.argmax(-1)
        self.last_tokens[states] = best
        return Result(logits=logits, best=best)


class Bucket:
    """A decode step of a fixed number of rows, launched one by one. `plan` comes before each `run`."""

    def __init__(
        self, size: int, attention: StepAttention, buffers: StepBuffers, handle: int, body: Callable[[], Result]
    ) -> None:
        self.size = size
        self.attention, self.buffers, self.body = attention, buffers, body
        self._handle = handle

    def plan(self) -> None:
        """Take the tables and slots that the buffers hold now."""
        self.attention.plan(self.buffers.write_step(self.size), [self.buffers.attention_step(0, self.size)])

    def run(self) -> Result:
        """Launch the step."""
        activate(self._handle, self.attention)
        return self.body()


class Buckets:
    """The buckets of an engine, each made when it is first asked for."""

    def __init__(self, sizes: list[int], make: Callable[[int], Bucket]) -> None:
        self.sizes, self._make = sizes, make
        self._made: dict[int, Bucket] = {}

    def of(self, num_rows: int) -> Bucket:
        """The smallest bucket that holds `num_rows`."""
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        if size not in self._made:
            self._made[size] = self._make(size)
        return self._made[size]

    def make_all(self) -> None:
        """Make every bucket, the largest first: their graphs share one pool of memory."""
        for size in reversed(self.sizes):
            self.of(size)

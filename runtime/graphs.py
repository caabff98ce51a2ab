"""Decode steps as CUDA graphs: captured once a bucket, replayed with what the buffers say then.

A replay launches what was captured, so it is right only where an entry's launch follows tables and lengths on the device
(or from buffers that its plan fills). An entry says that it is so; `why_no_replay` tries it here. Whoever does not say so is
not tried: a launch that reads what a later plan has freed may fault, and a fault ends the process's use of the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.ops.dtypes import torch_dtype
from runtime.attention import StepAttention
from runtime.buffers import StepBuffers
from runtime.kernels import Kernels
from runtime.steps import Bucket, Result

WARM_UPS = 2  # launches before a capture, in which kernels are compiled and libraries take their workspace
TRIED_BLOCKS = 40  # that the long sequence of a trial has at most
ERROR = 0.02  # of the relative L2, above which a replay is not the launch that it should be


class GraphBucket(Bucket):
    """A decode step of a fixed number of rows, replayed."""

    def __init__(
        self, size: int, attention: StepAttention, buffers: StepBuffers, handle: int, body: Callable[[], Result], pool: object
    ) -> None:
        super().__init__(size, attention, buffers, handle, body)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a step in flight may still read the buffer that is filled now
        buffers.fill_padding(size)
        buffers.upload(size)
        self.plan()
        self._graph, self._result = capture(super().run, pool)

    def run(self) -> Result:
        """Replay the step; the result is overwritten by the next one."""
        self._graph.replay()
        return self._result


def capture(run: Callable[[], Result], pool: object = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Warm up and capture what `run` launches."""
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            run()
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
        result = run()
    return graph, result


def why_no_replay(
    kernels: Kernels, buffers: StepBuffers, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> str | None:
    """Return why captured launches of the decode entry cannot be replayed with other lengths, or None.

    Fills the caches with noise, and with zeros again.
    """
    impl, shape = kernels.decode.impl, kernels.shape
    if not impl.graph:
        return f"{impl.name} cannot be captured in a CUDA graph"
    if not impl.replays:
        return f"{impl.name} does not say that a replay follows lengths that have changed (replays=True)"
    num_blocks = min(shape.num_blocks, shape.blocks_per_seq, TRIED_BLOCKS)
    tried = (key_cache[:num_blocks], value_cache[:num_blocks])
    try:
        for cache in tried:
            cache.normal_()
        error = _replay_error(kernels, buffers, key_cache, value_cache, num_blocks * shape.block_size)
    except Exception as why:  # whatever an entry has against it, the steps can still be launched one by one
        return f"{impl.name} in a CUDA graph: {type(why).__name__}: {why}"
    finally:
        for cache in tried:
            cache.zero_()
    if not error <= ERROR:  # NaN is no small error
        return f"{impl.name}: a replay does not follow lengths that have changed (relative error {error:.2g})"
    return None


def _replay_error(
    kernels: Kernels, buffers: StepBuffers, key_cache: torch.Tensor, value_cache: torch.Tensor, longest: int
) -> float:
    """Capture with short sequences, replay with long ones; the relative L2 of what differs from a launch of their own."""
    shape, rows = kernels.shape, min(2, len(buffers.device.seq_lens))
    query = torch.randn(rows, shape.num_q_heads, shape.head_dim, device=shape.device).to(torch_dtype(shape.dtype))
    outs: list[torch.Tensor] = []
    for lengths in ((1, 2), (longest, max(longest // 3, 1))):
        buffers.fill_lengths(lengths[:rows])
        buffers.upload(rows)
        step = buffers.attention_step(0, rows)
        prepared = kernels.attention(kernels.decode, num_seqs=rows, num_tokens=rows, q_len=1)
        prepared.plan(step)
        out, lse = torch.empty_like(query), torch.empty(query.shape[:2], device=query.device)

        def launch(prepared=prepared, out=out, lse=lse) -> Result:  # type: ignore[no-untyped-def]  # bound now
            prepared.launch(query, key_cache, value_cache, out, lse)
            return Result(logits=out, best=out)

        if not outs:
            first = prepared
            graph, _ = capture(launch)
        else:
            first.plan(step)
            graph.replay()
            launch()
        outs.append(out)
    got, wanted = (out.float() for out in outs)
    return float((got - wanted).norm() / wanted.norm())

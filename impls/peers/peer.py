"""What every peer's attention is behind the contract: capacities, the step's rows, and the log-sum-exp where it is wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from harness.registry import Prepared, Unsupported

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The sequences of a step that have a query token, for kernels that take one of each.

    Shapes
        block_tables    [num_rows, max_blocks_per_seq]    int32, on the device and as NumPy array
        seq_lens        [num_rows]                        int32, likewise
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    host_block_tables: np.ndarray
    host_seq_lens: np.ndarray

    @classmethod
    def of(cls, step: AttentionStep) -> Rows:
        """The step's own tensors where every sequence has its token; else copies of the rows that do."""
        q_lens = np.diff(step.host_query_start_loc)
        if q_lens.max(initial=0) > 1:
            raise Unsupported(f"takes one query token a sequence (got {q_lens.max()})")
        tables, lens = step.block_tables, step.seq_lens
        chosen = np.flatnonzero(q_lens)
        if len(chosen) < step.num_seqs:
            index = torch.from_numpy(chosen).to(tables.device)
            tables, lens = tables.index_select(0, index), lens.index_select(0, index)
        return cls(
            block_tables=tables, seq_lens=lens,
            host_block_tables=step.host_block_tables[chosen], host_seq_lens=step.host_seq_lens[chosen],
        )  # fmt: skip

    @property
    def max_seq_len(self) -> int:
        return int(self.host_seq_lens.max(initial=0))


class Peer(Prepared):
    """A library's attention. A subclass plans in `_plan` and launches in `_launch`, for at least one query token.

    wants_lse    whether this entry writes lse, in natural logarithm: rows that are timed leave out what converts it
    layer        of a launch, what it takes by name
    """

    layer: Mapping[str, torch.Tensor] = {}

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.wants_lse = "lse" in spec.params
        self.num_tokens: int | None = None

    def plan(self, step: AttentionStep) -> None:
        self.num_tokens = step.num_tokens
        if step.num_tokens:
            self._plan(step)

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        **layer: torch.Tensor,
    ) -> None:
        if len(query) != self.num_tokens:
            raise ValueError(f"planned for {self.num_tokens} query tokens (got {len(query)})")
        self.layer = layer
        if self.num_tokens:
            self._launch(query, key_cache, value_cache, out, lse)

    def _plan(self, step: AttentionStep) -> None:
        raise NotImplementedError

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        raise NotImplementedError


class HostScales:
    """Scales as numbers, for libraries that take no tensor: read back by every launch that is not captured.

    A launch that is captured takes those which the last one read at the same address.
    """

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    def __call__(self, scale: torch.Tensor) -> float:
        if not (scale.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._known[scale.data_ptr()] = float(scale)
        return self._known[scale.data_ptr()]


def require_one_scale(spec: AttentionSpec) -> None:
    """Raise Unsupported for scales by head, where the library has one for all."""
    if spec.kv_scales == "head":
        raise Unsupported("takes one scale for K and one for V (got kv_scales head)")


def require_contiguous(**tensors: torch.Tensor) -> None:
    """Raise ValueError for a tensor with gaps, which the library would read or write as if it had none."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous: the library looks at no strides of it (got {tensor.stride()})")


def require_same_strides(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raise ValueError where the library would read V by the strides of K and they differ."""
    if key_cache.stride(0) != value_cache.stride(0):
        raise ValueError(f"blocks of K and V must lie equally far apart (got {key_cache.stride(0)}, {value_cache.stride(0)})")


def require_fp8(spec: AttentionSpec) -> None:
    """Raise Unsupported where the cache is not quantised: other entries are for it."""
    if not spec.kv_dtype:
        raise Unsupported(f"is for fp8 caches; those of {spec.dtype} have entries of their own")

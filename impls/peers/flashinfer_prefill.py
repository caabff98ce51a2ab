"""FlashInfer's paged prefill, and its cascade for prefixes that neighbours share.

A prefill wrapper takes any number of query tokens a sequence: on "fa2", which packs a group's heads into a tile and splits keys
over CTAs, or on "fa3", Hopper's, which does neither. A cascade runs one for each level of sharing and merges by log-sum-exp.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.guards import workspace
from harness.ops.dtypes import torch_dtype
from harness.registry import Unsupported
from impls.peers.flashinfer import FLOAT_WORKSPACE, INT_WORKSPACE, Planned
from impls.peers.levels import find_levels
from impls.peers.libraries import FLASHINFER
from impls.peers.peer import require_contiguous

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

TILE = 128          # query rows of a CTA, at most
LENGTHS = 4 * 32768  # bytes of lengths that a prefill wrapper takes besides


class Prefill(Planned):
    """BatchPrefillWithPagedKVCacheWrapper. Made as an engine's eager step makes it; cuda_graph=1 gives it fixed buffers."""

    backend = "fa2"
    ledger = {"library": "FlashInfer's plan() is in plan; run() alone is timed"}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        _require_backend(self.backend, spec)
        self._class = FLASHINFER.load().BatchPrefillWithPagedKVCacheWrapper
        self._floats = workspace(float_workspace(spec), torch.uint8, spec.device).zero_()
        seqs = spec.max_num_seqs
        sizes = (seqs + 1, seqs + 1, max(seqs * spec.max_blocks_per_seq, 1), seqs) if spec.params["cuda_graph"] else ()
        self._buffers = [workspace(size, torch.int32, spec.device).zero_() for size in sizes]
        self.workspace_bytes = len(self._floats) + INT_WORKSPACE + LENGTHS + 4 * sum(sizes)
        self._made_for = (spec.max_num_seqs, spec.max_num_tokens)
        self._wrapper = self._make(spec.max_num_seqs)

    def _make(self, num_seqs: int) -> Any:
        """A wrapper; under CUDA graphs it is made for one number of sequences, and for the tokens of its first plan."""
        fields: dict[str, Any] = {"kv_layout": self.spec.layout.name, "backend": self.backend}
        if self._buffers:
            starts, indptr, indices, last = self._buffers
            fields |= {
                "use_cuda_graph": True, "qo_indptr_buf": starts[: num_seqs + 1], "paged_kv_indptr_buf": indptr[: num_seqs + 1],
                "paged_kv_indices_buf": indices, "paged_kv_last_page_len_buf": last[:num_seqs],
            }
        return self._class(self._floats, **fields)

    def _plan(self, step: AttentionStep) -> None:
        spec, size = self.spec, (step.num_seqs, step.num_tokens)
        if self._buffers and size != self._made_for:
            self._made_for, self._wrapper = size, self._make(step.num_seqs)
        (level,) = find_levels(step, spec.block_size, 1)
        self._wrapper.plan(
            *level.tensors(step.host_block_tables, spec.block_size), spec.num_q_heads, spec.num_kv_heads, spec.head_dim,
            spec.block_size, causal=_is_causal(step), **self._fields(),
        )

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        require_contiguous(out=out, lse=lse)
        caches = (key_cache, value_cache)
        if not self.wants_lse:
            self._wrapper.run(query, caches, out=out, **self._scales())
            return
        self._wrapper.run(query, caches, out=out, lse=lse, return_lse=True, **self._scales())
        lse.mul_(math.log(2))


class PrefillFa3(Prefill):
    """The same on its kernels for Hopper."""

    backend = "fa3"


class Cascade(Planned):
    """MultiLevelCascadeAttentionWrapper: as many levels as a step's neighbours share, at most params["levels"].

    The library chooses its kernels, on Hopper those of "fa3", which leave SMs idle where few sequences share much.
    """

    ledger = {
        "library": "FlashInfer's plan(), and finding levels, are in plan",
        "allocates": "its output and log-sum-exp, and those of each level", "copies": "the output into the tensor given",
    }

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._library = FLASHINFER.load()
        self._floats = workspace(float_workspace(spec), torch.uint8, spec.device).zero_()
        self._own_bytes = self.workspace_bytes = len(self._floats)
        self._made: dict[int, Any] = {}  # by the number of levels
        self._has_shared = False

    def _plan(self, step: AttentionStep) -> None:
        levels = find_levels(step, self.spec.block_size, self.spec.params["levels"])
        if len(levels) == 1 and not self._has_shared:  # later steps may: they are judged by what this one was for
            raise Unsupported("neighbours in the batch must begin with the same blocks (got none that do)")
        self._has_shared = True
        if len(levels) not in self._made:
            self._made[len(levels)] = self._make(len(levels))
            self.workspace_bytes = self._own_bytes + sum(self._made) * (INT_WORKSPACE + LENGTHS)
        self._wrapper = self._made[len(levels)]
        tensors = [level.tensors(step.host_block_tables, self.spec.block_size) for level in levels]
        self._plan_levels(tensors, _is_causal(step))

    def _make(self, num_levels: int) -> Any:
        return self._library.MultiLevelCascadeAttentionWrapper(num_levels, self._floats, self.spec.layout.name)

    def _plan_levels(self, tensors: list[tuple[torch.Tensor, ...]], is_causal: bool) -> None:
        spec, by_kind = self.spec, [list(kind) for kind in zip(*tensors, strict=True)]
        self._wrapper.plan(
            *by_kind, spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.block_size, causal=is_causal, **self._fields()
        )

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        out.copy_(self._wrapper.run(query, (key_cache, value_cache)))


class CascadeFa2(Cascade):
    """The same of its parts, prefill wrappers on "fa2" and merge_state_in_place: a prefix is split over CTAs."""

    ledger = {"library": "FlashInfer's plan(), and finding levels, are in plan"}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        rows = (spec.max_num_tokens, spec.num_q_heads)
        self._level_out = workspace((*rows, spec.head_dim), torch_dtype(spec.dtype), spec.device)
        self._level_lse = workspace(rows, torch.float32, spec.device)
        self._own_bytes += sum(tensor.numel() * tensor.element_size() for tensor in (self._level_out, self._level_lse))
        self.workspace_bytes = self._own_bytes

    def _make(self, num_levels: int) -> Any:
        made = self._library.BatchPrefillWithPagedKVCacheWrapper
        return [made(self._floats, kv_layout=self.spec.layout.name, backend="fa2") for _ in range(num_levels)]

    def _plan_levels(self, tensors: list[tuple[torch.Tensor, ...]], is_causal: bool) -> None:
        spec = self.spec
        for wrapper, of_level in zip(self._wrapper, tensors, strict=True):
            wrapper.plan(
                *of_level, spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.block_size,
                causal=is_causal and of_level is tensors[-1], **self._fields(),
            )

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        require_contiguous(out=out, lse=lse)
        caches, scales = (key_cache, value_cache), self._scales()
        *shared, own = self._wrapper
        own.run(query, caches, out=out, lse=lse, return_lse=True, **scales)
        level_out, level_lse = self._level_out[: len(query)], self._level_lse[: len(query)]
        for wrapper in shared:
            wrapper.run(query, caches, out=level_out, lse=level_lse, return_lse=True, **scales)
            self._library.merge_state_in_place(out, lse, level_out, level_lse)
        if self.wants_lse:
            lse.mul_(math.log(2))


def float_workspace(spec: AttentionSpec) -> int:
    """Bytes for partial results of a plan: of as many tiles as CTAs for them, or, with fixed buffers, as there may be."""
    if torch.device(spec.device).type != "cuda":
        return FLOAT_WORKSPACE
    num_ctas = 2 * torch.cuda.get_device_properties(spec.device).multi_processor_count
    tiles = -(-spec.max_num_tokens * spec.group // TILE) + spec.max_num_seqs
    parts = max(num_ctas // spec.num_kv_heads, tiles, 1)
    return max(FLOAT_WORKSPACE, 4 * spec.num_q_heads * parts * TILE * (spec.head_dim + 1) + 64)


def _is_causal(step: AttentionStep) -> bool:
    return int(np.diff(step.host_query_start_loc).max()) > 1


def _require_backend(backend: str, spec: AttentionSpec) -> None:
    if backend == "fa3" and torch.device(spec.device).type == "cuda":
        major = torch.cuda.get_device_capability(spec.device)[0]
        if major != 9:
            raise Unsupported(f"FlashInfer's fa3 runs on sm_90 (got sm_{major}x)")

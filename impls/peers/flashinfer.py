"""FlashInfer: decode by CUDA cores and by tensor cores, the persistent BatchAttention, and TensorRT-LLM's XQA.

Its prefill and its cascade: flashinfer_prefill.py.

Its log-sum-exp is in base 2: entries that give one multiply it by ln 2, in a kernel of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.guards import workspace
from harness.ops.dtypes import torch_dtype
from harness.registry import Unsupported
from impls.peers.libraries import FLASHINFER
from impls.peers.peer import HostScales, Peer, Rows, require_contiguous, require_fp8, require_one_scale

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

MIB = 1 << 20
#: what a quantised cache's scales cost: the library takes numbers
SCALES = "read back to the host by launches that are not captured"
#: what the wrappers take by themselves, and what their documentation recommends to give them
INT_WORKSPACE, FLOAT_WORKSPACE = 8 * MIB, 128 * MIB
BATCH_WORKSPACE = 384 * MIB
#: the tiles of query rows of BatchAttention's two tasks; its plan makes room for four splits of each a CTA
BATCH_TILES = 128 + 16
SEMAPHORES, SCRATCH = 8 * MIB, 56 * MIB  # of XQA


class Scaled(Peer):
    """Takes the scales of a quantised cache as numbers, one for K and one for V."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        require_one_scale(spec)
        self._host_scales = HostScales()
        if spec.kv_dtype:
            self.ledger = {**self.ledger, "scales": SCALES}

    def _scales(self) -> dict[str, float]:
        """k_scale and v_scale of the launch; nothing where the cache is not quantised."""
        names = ("k_scale", "v_scale") if self.spec.kv_dtype else ()
        return {name: self._host_scales(self.layer[name]) for name in names}


class Planned(Scaled):
    """A wrapper that is planned on the host: its plan goes to the device through one pinned buffer of its own."""

    _copied: torch.cuda.Event | None = None

    def plan(self, step: AttentionStep) -> None:
        # The buffer is filled again at once: a copy out of it that still waits for the device would take the new plan.
        if self._copied is not None:
            self._copied.synchronize()
        super().plan(step)
        if torch.device(self.spec.device).type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _fields(self) -> dict[str, Any]:
        """What every wrapper's plan takes by name."""
        spec = self.spec
        return {
            "q_data_type": torch_dtype(spec.dtype), "kv_data_type": torch_dtype(spec.cache_dtype), "sm_scale": spec.scale,
            "window_left": spec.window - 1 if spec.window else -1, "logits_soft_cap": spec.softcap,
        }


class Decode(Planned):
    """BatchDecodeWithPagedKVCacheWrapper on CUDA cores. Takes 128 MiB and more for partial results."""

    tensor_cores = False
    ledger = {"library": "FlashInfer's plan() is in plan; run() alone is timed"}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._class = FLASHINFER.load().BatchDecodeWithPagedKVCacheWrapper
        self._floats = workspace(decode_workspace(spec), torch.uint8, spec.device).zero_()
        sizes = (spec.max_num_seqs + 1, max(spec.max_num_seqs * spec.max_blocks_per_seq, 1), spec.max_num_seqs)
        self._buffers = [workspace(size, torch.int32, spec.device).zero_() for size in sizes]
        self.workspace_bytes = len(self._floats) + INT_WORKSPACE + 4 * sum(sizes)
        self._wrapper, self._num_rows = self._make(spec.max_num_seqs), spec.max_num_seqs

    def _make(self, num_rows: int) -> Any:
        """A wrapper for so many sequences: under CUDA graphs it is made for one number of them."""
        fields: dict[str, Any] = {"kv_layout": self.spec.layout.name, "use_tensor_cores": self.tensor_cores}
        if self.spec.params["cuda_graph"]:
            indptr, indices, last = self._buffers
            fields |= {
                "use_cuda_graph": True, "paged_kv_indptr_buffer": indptr[: num_rows + 1], "paged_kv_indices_buffer": indices,
                "paged_kv_last_page_len_buffer": last[:num_rows],
            }
        return self._class(self._floats, **fields)

    def _plan(self, step: AttentionStep) -> None:
        spec, rows = self.spec, Rows.of(step)
        if len(rows.host_seq_lens) != self._num_rows:
            self._num_rows = len(rows.host_seq_lens)
            self._wrapper = self._make(self._num_rows)
        indptr, indices, last = pages(rows.host_block_tables, rows.host_seq_lens, spec.block_size)
        self._wrapper.plan(
            indptr, indices, last, spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.block_size, **self._fields()
        )

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        require_contiguous(out=out, lse=lse)
        more = self._scales()
        if not self.wants_lse:
            self._wrapper.run(query, (key_cache, value_cache), out=out, **more)
            return
        self._wrapper.run(query, (key_cache, value_cache), out=out, lse=lse, return_lse=True, **more)
        lse.mul_(math.log(2))


class TensorCore(Decode):
    """The same wrapper with use_tensor_cores=True: its prefill kernel, the group packed into a tile."""

    tensor_cores = True


class Batch(Planned):
    """BatchAttention: one persistent kernel for decode and prefill. It always writes its log-sum-exp."""

    ledger = {"library": "FlashInfer's plan(), which synchronises the device, is in plan; run() alone is timed"}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._wrapper = FLASHINFER.load().BatchAttention(kv_layout=spec.layout.name, device=spec.device)
        needed = batch_workspace(spec)
        if needed > BATCH_WORKSPACE:  # it takes as much and no more: 32 KV heads run out of it
            self._wrapper.float_workspace_buffer = workspace(needed, torch.uint8, spec.device)
        self._indices = workspace(max(spec.max_num_seqs * spec.max_blocks_per_seq, 1), torch.int32, spec.device).zero_()
        self.workspace_bytes = max(needed, BATCH_WORKSPACE) + INT_WORKSPACE + 4 * len(self._indices)

    def _plan(self, step: AttentionStep) -> None:
        spec = self.spec
        indptr, indices, _ = pages(step.host_block_tables, step.host_seq_lens, spec.block_size)
        held = self._indices[: len(indices)].copy_(indices)
        self._wrapper.plan(
            torch.from_numpy(step.host_query_start_loc), indptr, held, torch.from_numpy(step.host_seq_lens),
            spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim, spec.block_size,
            causal=int(np.diff(step.host_query_start_loc).max()) > 1, sm_scale=spec.scale,
            q_data_type=torch_dtype(spec.dtype), kv_data_type=torch_dtype(spec.dtype),
        )

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        require_contiguous(out=out, lse=lse)
        self._wrapper.run(query, (key_cache, value_cache), out=out, lse=lse)
        if self.wants_lse:
            lse.mul_(math.log(2))


class Xqa(Scaled):
    """xqa_batch_decode_with_kv_cache: TensorRT-LLM's decode. It plans nothing, and gives no log-sum-exp."""

    ledger = {"library": "nothing is planned: tables and lengths are read by the kernel"}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._decode = FLASHINFER.load("flashinfer.decode").xqa_batch_decode_with_kv_cache
        _require_xqa(spec)
        self._workspace = workspace(SEMAPHORES + SCRATCH, torch.uint8, spec.device).zero_()  # semaphores begin at 0
        self.workspace_bytes = len(self._workspace)

    def _plan(self, step: AttentionStep) -> None:
        self._rows = Rows.of(step)
        self._lengths = self._rows.seq_lens.view(torch.uint32)

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        require_contiguous(query=query, out=out)
        scales = self._scales()
        self._decode(
            query, (key_cache, value_cache), self._workspace, self._rows.block_tables, self._lengths, self._rows.max_seq_len,
            bmm1_scale=self.spec.scale * scales.get("k_scale", 1.0), bmm2_scale=scales.get("v_scale", 1.0),
            out=out, kv_layout=self.spec.layout.name,
            window_left=self.spec.window - 1 if self.spec.window else -1, sinks=self.layer.get("sinks"),
        )


class XqaFp8(Xqa):
    """The same for fp8 caches alone: on sm_90 another kernel, which multiplies fp8 by fp8."""

    def __init__(self, spec: AttentionSpec) -> None:
        require_fp8(spec)
        super().__init__(spec)


def _require_xqa(spec: AttentionSpec) -> None:
    """Raise Unsupported for what does not compile or run; a limit cannot say it, since it joins group and head_dim."""
    padded = next(width for width in (64, 128, 256) if spec.head_dim <= width)
    rows = -(-spec.group // 16) * 16
    if 2 * padded * rows > 16 * 1024:
        most = 8192 // padded
        raise Unsupported(f"a group's query heads must fit 16 KiB, {most} of head_dim {spec.head_dim} (got {spec.group})")
    if torch.device(spec.device).type == "cuda":
        major = torch.cuda.get_device_capability(spec.device)[0]
        if major not in (9, 10, 12):
            raise Unsupported(f"XQA runs on sm_90, sm_100 and sm_120 (got sm_{major}x)")


def decode_workspace(spec: AttentionSpec) -> int:
    """Bytes that the decode wrapper lays out for partial results: under CUDA graphs for as many splits as fill the device,
    a tile of query rows in float each, which a group of more than 16 heads makes 64 rows, of more than 64 128.
    """
    tile = 16 if spec.group <= 16 else 64 if spec.group <= 64 else 128
    splits = 2 * spec.max_num_seqs
    if torch.device(spec.device).type == "cuda":
        num_ctas = 2 * torch.cuda.get_device_properties(spec.device).multi_processor_count
        splits = max(splits, -(-num_ctas // spec.num_kv_heads))
    return max(FLOAT_WORKSPACE, 4 * tile * splits * spec.num_q_heads * (spec.head_dim + 1) + 64)


def batch_workspace(spec: AttentionSpec) -> int:
    """Bytes that BatchAttention's plan lays out for partial results, in 16 bits and whatever the step; 0 on a CPU."""
    if torch.device(spec.device).type != "cuda":
        return 0
    num_ctas = torch.cuda.get_device_properties(spec.device).multi_processor_count * (1 if spec.head_dim >= 256 else 2)
    return 4 * num_ctas * BATCH_TILES * spec.num_kv_heads * (2 * spec.head_dim + 4) + 64


def pages(tables: np.ndarray, seq_lens: np.ndarray, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step's tables as FlashInfer takes them, int32 on the host.

    Shapes
        indptr           [num_seqs + 1]     blocks before each sequence
        indices          [num_blocks]       block ids, one sequence after the other
        last_page_len    [num_seqs]         tokens in each sequence's last block; 0 where it has none
    """
    counts = -(-seq_lens // block_size)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    owned = np.arange(tables.shape[1])[None, :] < counts[:, None]
    last = seq_lens - np.maximum(counts - 1, 0) * block_size
    return torch.from_numpy(indptr), torch.from_numpy(tables[owned]), torch.from_numpy(last.astype(np.int32))

"""vLLM's own CUDA kernels: paged_attention_v1 and _v2, reshape_and_cache and reshape_and_cache_flash."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from harness.guards import workspace
from harness.ops.dtypes import ITEMSIZE, movable, torch_dtype
from harness.ops.layouts import HND
from harness.registry import Prepared, Unsupported
from impls.peers.libraries import VLLM_KERNELS
from impls.peers.peer import Peer, Rows, require_contiguous, require_one_scale, require_same_strides

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep
    from harness.ops.cache_write import CacheWriteSpec, CacheWriteStep

#: its names of what a cache holds
FORMATS = {None: "auto", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
PARTITION = 512  # tokens of a CTA of v2
MOST_CHUNKS = 512  # threads of a CTA of reshape_and_cache
#: no ALiBi, nothing block-sparse: tp_rank, local blocks, vertical stride, block size, sliding step
DENSE = (0, 0, 0, 64, 0)


class Version1(Peer):
    """One CTA a (sequence, query head): the scores of a whole sequence lie in shared memory."""

    operator = "paged_attention_v1"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        require_one_scale(spec)
        self._require_room(spec)
        self._attend = VLLM_KERNELS.load(f"_C.{self.operator}")
        self._one = workspace(1, torch.float32, spec.device).fill_(1.0)  # k_scale and v_scale
        self.workspace_bytes = 4

    def _require_room(self, spec: AttentionSpec) -> None:
        """Raise Unsupported where the longest sequence's scores do not fit into a CTA's shared memory."""
        if torch.device(spec.device).type != "cuda":
            return
        held = torch.cuda.get_device_properties(spec.device).shared_memory_per_block_optin
        most = held // 4 - 512  # vLLM's own rule: scores in float32, and some room for the rest
        if spec.max_seq_len > most:
            raise Unsupported(f"max_seq_len must be at most {most}, whose scores fit shared memory (got {spec.max_seq_len})")

    def _plan(self, step: AttentionStep) -> None:
        self._rows = Rows.of(step)

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        require_contiguous(out=out, block_tables=self._rows.block_tables)
        require_same_strides(key_cache, value_cache)
        # Quantised caches are bytes to it.
        self._attend(out, *self._partials(), query, movable(key_cache), movable(value_cache), *self._arguments())

    def _partials(self) -> tuple[torch.Tensor, ...]:
        return ()

    def _arguments(self) -> tuple[object, ...]:
        """All that follow the caches."""
        spec, rows = self.spec, self._rows
        return (
            spec.num_kv_heads, spec.scale, rows.block_tables, rows.seq_lens, spec.block_size, max(rows.max_seq_len, 1),
            self.layer.get("alibi_slopes"), FORMATS[spec.kv_dtype], self.layer.get("k_scale", self._one),
            self.layer.get("v_scale", self._one), *DENSE,
        )


class Version2(Version1):
    """A sequence cut into partitions of 512 tokens, merged by a second kernel; their sums give a log-sum-exp.

    Shapes
        exp_sums, max_logits    [num_rows, num_q_heads, num_partitions]              float32, natural
        tmp_out                 [num_rows, num_q_heads, num_partitions, head_dim]    as the query
    """

    operator = "paged_attention_v2"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        count = max(spec.max_num_seqs * spec.num_q_heads * -(-spec.max_seq_len // PARTITION), 1)
        self._sums, self._logits = (workspace(count, torch.float32, spec.device) for _ in range(2))
        self._outs = workspace(count * spec.head_dim, torch_dtype(spec.dtype), spec.device)
        self.workspace_bytes += count * (8 + spec.head_dim * ITEMSIZE[spec.dtype])

    def _require_room(self, spec: AttentionSpec) -> None:
        """A partition always fits."""

    def _partials(self) -> tuple[torch.Tensor, ...]:
        rows = self._rows
        shape = (len(rows.host_seq_lens), self.spec.num_q_heads, -(-max(rows.max_seq_len, 1) // PARTITION))
        count = math.prod(shape)
        sums, logits = (part[:count].view(shape) for part in (self._sums, self._logits))
        return sums, logits, self._outs[: count * self.spec.head_dim].view(*shape, self.spec.head_dim)

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        super()._launch(query, key_cache, value_cache, out, lse)
        if self.wants_lse:
            sums, logits, _ = self._partials()
            begins = torch.arange(sums.shape[2], device=sums.device) * PARTITION
            absent = (begins >= self._rows.seq_lens[:, None])[:, None]  # nothing is written for these
            lse.copy_((logits + sums.log()).masked_fill_(absent, -math.inf).logsumexp(-1))


class CacheWrite(Prepared):
    """reshape_and_cache_flash: one CTA a token. It goes by strides, so that heads may come before tokens (HND) as well."""

    operator = "reshape_and_cache_flash"

    def __init__(self, spec: CacheWriteSpec) -> None:
        if spec.kv_scales == "head":
            raise Unsupported("takes one scale for K and one for V (got kv_scales head)")
        self._format = FORMATS[spec.kv_dtype]
        self._heads_first = spec.layout is HND
        self._write = VLLM_KERNELS.load(f"_C_cache_ops.{self.operator}")
        self._one = workspace(1, torch.float32, spec.device).fill_(1.0)
        self.workspace_bytes = 4

    def plan(self, step: CacheWriteStep) -> None:
        self._slot_mapping = step.slot_mapping

    def launch(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, **layer: torch.Tensor
    ) -> None:
        if len(key) != len(self._slot_mapping):
            raise ValueError(f"planned for {len(self._slot_mapping)} tokens (got {len(key)})")
        if len(key):
            caches = self._caches(movable(key_cache), movable(value_cache))
            scales = (layer.get(name, self._one) for name in ("k_scale", "v_scale"))
            self._write(key, value, *caches, self._slot_mapping, self._format, *scales)

    def _caches(self, key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        require_same_strides(key_cache, value_cache)
        return (key_cache.transpose(1, 2), value_cache.transpose(1, 2)) if self._heads_first else (key_cache, value_cache)


class PackedCacheWrite(CacheWrite):
    """reshape_and_cache: the layout of paged_attention_v1 and _v2, without gaps between blocks."""

    operator = "reshape_and_cache"

    def __init__(self, spec: CacheWriteSpec) -> None:
        chunks = spec.num_kv_heads * spec.head_dim * ITEMSIZE[spec.dtype] // 16
        if chunks > MOST_CHUNKS:
            raise Unsupported(f"writes the first {MOST_CHUNKS} chunks of 16 bytes of a token, a thread each (got {chunks})")
        super().__init__(spec)

    def _caches(self, key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        require_contiguous(key_cache=key_cache, value_cache=value_cache)
        return key_cache, value_cache

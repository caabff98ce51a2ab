"""FlashAttention-3: Dao-AILab's build (flash_attn_interface) and vLLM's (torch.ops._vllm_fa3_C).

Both are called by their operators, which write into the `out` that they are given; Dao-AILab's Python function would
allocate another and cost a copy. The number of splits is the library's own choice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.guards import workspace
from harness.ops.dtypes import torch_dtype
from harness.registry import Unsupported
from impls.peers.libraries import FA3, VLLM_FA3
from impls.peers.peer import Peer, require_fp8

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep


class FlashAttention3(Peer):
    """Any number of query tokens a sequence, causal, in the varlen form that vLLM uses for decode as well."""

    ledger = {"allocates": "its log-sum-exp, and partial results where it splits"}
    scheduled = False

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        if torch.device(spec.device).type == "cuda" and torch.cuda.get_device_capability(spec.device)[0] != 9:
            raise Unsupported(f"runs on sm_90 (got sm_{torch.cuda.get_device_capability(spec.device)[0]}x)")
        self._window = (spec.window - 1, 0) if spec.window else (-1, -1)
        self._load()
        if spec.kv_dtype:
            self._one = workspace(1, torch.float32, spec.device).fill_(1.0)
            self.workspace_bytes = 4
            self.ledger = {**self.ledger, "casts": "query to fp8, unscaled"}
        if self.scheduled:
            self.ledger = {**self.ledger, "library": "scheduler metadata is computed in plan"}

    def _plan(self, step: AttentionStep) -> None:
        self._step = step
        self._max_q_len = int(np.diff(step.host_query_start_loc).max())
        self._max_seq_len = max(int(step.host_seq_lens.max()), 1)
        self._metadata = self._schedule() if self.scheduled else None

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        if self.spec.kv_dtype:  # its products are fp8 by fp8
            query = query.to(key_cache.dtype)
        logs = self._attend(query, key_cache, value_cache, out)  # [num_q_heads, num_tokens], natural
        if self.wants_lse:
            lse.copy_(logs.T)
            lse.masked_fill_(lse.isposinf(), -math.inf)  # how some releases mark a token that sees no key

    def _descales(self) -> dict[str, torch.Tensor]:
        """Scales of query, K and V where they are fp8, [num_seqs, num_kv_heads] each; strides of 0 are read as such."""
        if not self.spec.kv_dtype:
            return {}
        shape = (self._step.num_seqs, self.spec.num_kv_heads)
        scales = {"q_descale": self._one, "k_descale": self.layer["k_scale"], "v_descale": self.layer["v_scale"]}
        return {name: scale.expand(shape) for name, scale in scales.items()}

    def _load(self) -> None:
        raise NotImplementedError

    def _schedule(self) -> torch.Tensor:
        raise NotImplementedError

    def _attend(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Write `out` and return the log-sum-exp."""
        raise NotImplementedError


class Dao(FlashAttention3):
    """Dao-AILab's build."""

    def _load(self) -> None:
        interface = FA3.load()
        self._forward, self._metadata_of = interface.flash_attn_3_gpu.fwd, interface.get_scheduler_metadata

    def _schedule(self) -> torch.Tensor:
        spec, step = self.spec, self._step
        made: torch.Tensor = self._metadata_of(
            step.num_seqs, self._max_q_len, self._max_seq_len, spec.num_q_heads, spec.num_kv_heads, spec.head_dim,
            step.seq_lens, qkv_dtype=torch_dtype(spec.cache_dtype), cu_seqlens_q=step.query_start_loc,
            page_size=spec.block_size, causal=True, window_size=self._window, has_softcap=bool(spec.softcap),
        )
        return made

    def _attend(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        step = self._step
        logs: torch.Tensor = self._forward(
            query, key_cache, value_cache, out=out, cu_seqlens_q=step.query_start_loc, seqused_k=step.seq_lens,
            max_seqlen_q=self._max_q_len, max_seqlen_k=self._max_seq_len, page_table=step.block_tables,
            softmax_scale=self.spec.scale, is_causal=True, scheduler_metadata=self._metadata, num_splits=0,
            window_size_left=self._window[0], window_size_right=self._window[1], softcap=self.spec.softcap or 0.0,
            **self._descales(),
        )[1]
        return logs


class DaoScheduled(Dao):
    """The same, its tiles dealt out beforehand."""

    scheduled = True


class DaoFp8(DaoScheduled):
    """The same for fp8 caches alone."""

    def __init__(self, spec: AttentionSpec) -> None:
        require_fp8(spec)
        super().__init__(spec)


class Vllm(FlashAttention3):
    """vLLM's build. Its operators have no defaults: every argument is given, in order."""

    def _load(self) -> None:
        self._forward = VLLM_FA3.load("_vllm_fa3_C.fwd")
        self._metadata_of = VLLM_FA3.load("_vllm_fa3_C.get_scheduler_metadata")

    def _schedule(self) -> torch.Tensor:
        spec, step = self.spec, self._step
        window, softcap, num_splits, pack_gqa, sm_margin = self._window, bool(spec.softcap), 0, None, 0
        made: torch.Tensor = self._metadata_of(
            step.num_seqs, self._max_q_len, self._max_seq_len, spec.num_q_heads, spec.num_kv_heads, spec.head_dim,
            spec.head_dim, torch_dtype(spec.cache_dtype), step.seq_lens, step.query_start_loc,
            None, None, None, None,  # cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k
            spec.block_size, 0, True, *window, softcap, num_splits, pack_gqa, sm_margin,  # 0 new keys, causal
        )  # fmt: skip
        return made

    def _attend(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        step = self._step
        absent: Any = None
        logs: torch.Tensor = self._forward(
            query, key_cache, value_cache,
            absent, absent, absent,  # k_new, v_new, q_v
            out, step.query_start_loc,
            absent, absent, absent,  # cu_seqlens_k, cu_seqlens_k_new, seqused_q
            step.seq_lens, self._max_q_len, self._max_seq_len, step.block_tables,
            absent, absent,  # kv_batch_idx, leftpad_k
            absent, absent, absent,  # rotary_cos, rotary_sin, seqlens_rotary
            *(self._descales().get(name) for name in ("q_descale", "k_descale", "v_descale")),
            self.spec.scale, True, *self._window, self.spec.softcap or 0.0, True,  # causal, rotary interleaved
            self._metadata, 0, None, 0,  # num_splits, pack_gqa, sm_margin
            absent, 1, 0, absent,  # s_aux, cp_world_size, cp_rank, cp_tot_seqused_k
        )[1]  # fmt: skip
        return logs


class VllmScheduled(Vllm):
    """The same, its tiles dealt out beforehand."""

    scheduled = True


class VllmFp8(VllmScheduled):
    """The same for fp8 caches alone."""

    def __init__(self, spec: AttentionSpec) -> None:
        require_fp8(spec)
        super().__init__(spec)

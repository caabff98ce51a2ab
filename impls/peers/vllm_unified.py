"""vLLM's Triton unified attention: decode and prefill in one kernel, decode of few sequences in 16 segments each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from harness.guards import workspace
from impls.peers.libraries import VLLM
from impls.peers.peer import Peer, require_one_scale

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

#: of vllm/v1/attention/backends/triton_attn.py: CTAs from which sequences are not cut, and segments of one that is
MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS = 128, 16


class Unified(Peer):
    """Its segments' partial results are in float32, as vLLM's backend allocates them."""

    ledger = {"library": "nothing is planned: tables and lengths are read by the kernel"}

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        require_one_scale(spec)
        self._attend = VLLM.load("vllm.v1.attention.ops.triton_unified_attention").unified_attention
        self._threshold = MIN_LAUNCH_GRID_SIZE_2D // spec.num_kv_heads
        shape = (self._threshold, spec.num_q_heads, NUM_PAR_SOFTMAX_SEGMENTS)
        padded = 1 << (spec.head_dim - 1).bit_length()
        shapes = ((*shape, padded), shape, shape)
        self._output, self._max, self._expsum = (workspace(shape, torch.float32, spec.device) for shape in shapes)
        self.workspace_bytes = sum(4 * part.numel() for part in (self._output, self._max, self._expsum))

    def _plan(self, step: AttentionStep) -> None:
        self._step = step
        self._max_q_len = int(np.diff(step.host_query_start_loc).max())
        self._max_seq_len = int(step.host_seq_lens.max())

    def _launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        step, layer = self._step, self.layer
        self._attend(
            q=query, k=key_cache, v=value_cache, out=out, cu_seqlens_q=step.query_start_loc, max_seqlen_q=self._max_q_len,
            seqused_k=step.seq_lens, max_seqlen_k=self._max_seq_len, softmax_scale=self.spec.scale, causal=True,
            window_size=(self.spec.window - 1, 0) if self.spec.window else (-1, -1), block_table=step.block_tables,
            softcap=self.spec.softcap or 0.0, q_descale=None, k_descale=layer.get("k_scale"), v_descale=layer.get("v_scale"),
            alibi_slopes=layer.get("alibi_slopes"), sinks=layer.get("sinks"),
            seq_threshold_3D=self._threshold, num_par_softmax_segments=NUM_PAR_SOFTMAX_SEGMENTS,
            softmax_segm_output=self._output, softmax_segm_max=self._max, softmax_segm_expsum=self._expsum,
        )

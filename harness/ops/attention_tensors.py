"""Paged attention: its tensors in canonical order, from a case to truth. What a kernel is given: attention_staged.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from harness import hazards as hz
from harness.guards import Guarded, empty, house
from harness.hazards import Hazards
from harness.ops.attention import AttentionCase, AttentionSpec, AttentionStep
from harness.ops.attention_staged import StagedAttention, make_step
from harness.ops.dtypes import torch_dtype
from harness.ops.layouts import Layout
from harness.ops.needles import num_rounds, plant
from harness.ops.outlier import plant_outlier
from harness.truth import TO_FP8, AttentionTruth, attention_truth


class AttentionOperator:
    """Makes the tensors of attention cases."""

    def spec(self, case: AttentionCase, layout: Layout, device: str, params: Mapping[str, Any]) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=case.num_q_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            block_size=case.block_size,
            dtype=case.dtype,
            scale=case.softmax_scale,
            layout=layout,
            num_blocks=case.num_blocks,
            max_num_seqs=case.num_seqs,
            max_num_tokens=case.num_tokens,
            max_q_len=case.max_q_len,
            max_seq_len=case.max_seq_len,
            max_blocks_per_seq=max(case.blocks_per_seq, default=0) + 1,
            device=device,
            params=params,
        )

    def build(self, case: AttentionCase, hazards: Hazards, *, layers: int, device: str) -> AttentionInputs:
        """Make the tensors of `case`; equal cases give equal bytes on equal devices.

        Shapes
            query         [num_tokens, num_q_heads, head_dim]                        case.dtype, a layer
            key, value    [num_blocks, num_kv_heads, block_size, head_dim]           case.dtype, a layer
            step          one for all layers, see AttentionStep

        Blocks are dealt in shuffled order, so that no kernel passes by assuming neighbours.
        """
        rng = np.random.default_rng(hz.seed_of(case.digest, hazards))
        tables = hz.deal_blocks(case.blocks_per_seq, case.num_blocks, rng)
        used = _slots_in_use(case, tables, device)
        if hazards.foreign:
            tables = hz.foreign_entries(tables, case.blocks_per_seq)
        step, held = make_step(tables, np.array(case.seq_lens, np.int32), np.array(case.query_starts, np.int32), device)
        inputs = AttentionInputs(case=case, hazards=hazards, step=step, layers=[], held=held)
        for layer in range(layers):
            inputs.layers.append(_make_layer(inputs, used, layer, f" of set {layer}" if layers > 1 else ""))
        return inputs

    def rounds(self, case: AttentionCase, hazards: Hazards) -> int:
        """Sets of needles that it takes to reach every block."""
        return num_rounds(case) if hazards.needles else 1


def _slots_in_use(case: AttentionCase, tables: np.ndarray, device: str) -> torch.Tensor:
    """[num_blocks, block_size] bool: the slots that hold a token of some sequence."""
    tokens = np.zeros(case.num_blocks, dtype=np.int64)
    for row, seq_len, num_blocks in zip(tables, case.seq_lens, case.blocks_per_seq, strict=True):
        if num_blocks:
            tokens[row[:num_blocks]] = case.block_size
            tokens[row[num_blocks - 1]] = seq_len - (num_blocks - 1) * case.block_size
    used: torch.Tensor = torch.arange(case.block_size, device=device)[None, :] < torch.from_numpy(tokens).to(device)[:, None]
    return used


@dataclasses.dataclass
class Layer:
    """One set of canonical tensors; `held` are their allocations, in this order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    held: Sequence[Guarded]
    truth: AttentionTruth | None = None
    checksum: int | None = None


def _make_layer(inputs: AttentionInputs, used: torch.Tensor, layer: int, of: str) -> Layer:
    case, hazards, device = inputs.case, inputs.hazards, used.device
    generator = torch.Generator(device=device).manual_seed(hz.seed_of(case.digest, hazards, layer))
    dtype = torch_dtype(case.dtype)
    held: list[Guarded] = []

    def normal(name: str, *shape: int) -> torch.Tensor:
        tensor, guarded = empty(name + of, shape, dtype, device)
        held.append(guarded)
        return tensor.normal_(generator=generator)

    pool = (case.num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    query = normal("query", case.num_tokens, case.num_q_heads, case.head_dim)
    key, value = normal("key_cache", *pool), normal("value_cache", *pool)
    if hazards.outlier:
        plant_outlier(case, inputs.step, query, key, value)
    hz.poison(key, value, ~used, hazards.fill)
    if hazards.needles:
        inputs.needles |= plant(case, inputs.step, query, key, value, layer)
    return Layer(query, key, value, held)


@dataclasses.dataclass
class AttentionInputs:
    """Canonical tensors of a case, `layers` sets under one step.

    held       allocations of the step's tensors
    needles    (sequence, number of its block) of every needle in any layer
    """

    case: AttentionCase
    hazards: Hazards
    step: AttentionStep
    layers: list[Layer]
    held: Sequence[Guarded]
    needles: set[tuple[int, int]] = dataclasses.field(default_factory=set)

    @classmethod
    def given(
        cls, case: AttentionCase, hazards: Hazards, tables: np.ndarray, *, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor,
    ) -> AttentionInputs:
        """One layer of these canonical tensors, copied, under the step of these host tables."""
        lens, starts = np.array(case.seq_lens, np.int32), np.array(case.query_starts, np.int32)
        step, of_step = make_step(tables, lens, starts, str(key.device))
        (query, key, value), held = house({"query": query, "key_cache": key, "value_cache": value})
        return cls(case=case, hazards=hazards, step=step, layers=[Layer(query, key, value, held)], held=of_step)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def truth(self, layer: int, quantises: frozenset[str] = frozenset()) -> AttentionTruth:
        """Truth in float64, computed once a layer, and again where what is rounded to fp8 (of `quantises`) is another."""
        made, to_fp8 = self.layers[layer], quantises & TO_FP8
        if made.truth is None or made.truth.quantises != to_fp8:
            made.truth = attention_truth(made.query, made.key, made.value, self.step, self.case.softmax_scale, to_fp8)
        return made.truth

    def stage(self, layout: Layout) -> StagedAttention:
        """Convert every layer to `layout` (HND is not copied) and make outputs, all between canaries."""
        return StagedAttention(self, layout)

    def arrange(self, layer: Layer, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer in `layout`."""
        if layout.paged:
            return layout.arrange(layer.key, layer.value)
        return self._unpage(layer.key), self._unpage(layer.value)

    def _unpage(self, pool: torch.Tensor) -> torch.Tensor:
        """[num_seqs, max_len, num_kv_heads, head_dim]; last blocks keep their poison, and behind them lies as bad."""
        case = self.case
        fill = math.nan if self.hazards.fill == "nan" else hz.DECOY_VALUE
        shape = (case.num_seqs, max(case.max_seq_len, 1), case.num_kv_heads, case.head_dim)
        unpaged = torch.full(shape, fill, dtype=pool.dtype, device=pool.device)
        for seq, num_blocks in enumerate(case.blocks_per_seq):
            blocks = pool[self.step.block_tables[seq, :num_blocks].long()]
            tokens = blocks.transpose(1, 2).reshape(-1, *shape[2:])[: shape[1]]
            unpaged[seq, : len(tokens)] = tokens
        return unpaged

    def checksum(self, layer: int) -> int:
        """Sum of all 32-bit words of K and V in use, modulo 2**32."""
        made = self.layers[layer]
        if made.checksum is None:
            made.checksum = self._sum_words(made)
        return made.checksum

    def _sum_words(self, layer: Layer) -> int:
        case, step = self.case, self.step
        total = torch.zeros((), dtype=torch.int64, device=layer.key.device)
        for pool in (layer.key, layer.value):
            for seq, (seq_len, num_blocks) in enumerate(zip(case.seq_lens, case.blocks_per_seq, strict=True)):
                blocks = pool[step.block_tables[seq, :num_blocks].long()]
                tokens = blocks.transpose(1, 2).reshape(-1, case.num_kv_heads * case.head_dim)[:seq_len].contiguous()
                total += tokens.view(torch.int32).sum(dtype=torch.int64)
        return int(total) % 2**32

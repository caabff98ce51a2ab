"""Paged attention: its tensors, from a case to what a kernel is given and how its answer is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from harness import hazards as hz
from harness.check import Verdict, fill_unwritten, judge_attention
from harness.hazards import Hazards
from harness.ops.attention import AttentionCase, AttentionSpec, AttentionStep
from harness.ops.dtypes import torch_dtype
from harness.ops.layouts import Layout
from harness.registry import PreparedReader
from harness.truth import AttentionTruth, attention_truth

NAN = float("nan")
#: exp of it is beyond f32: one needle in eight has it, so that a kernel which subtracts no maximum shows.
OVERFLOWING_SCORE = 100.0


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
        step = make_step(tables, np.array(case.seq_lens, np.int32), np.array(case.query_starts, np.int32), device)
        used = _slots_in_use(case, tables, device)
        made = [_make_layer(case, hazards, step, used, layer, device) for layer in range(layers)]
        return AttentionInputs(case=case, hazards=hazards, step=step, layers=made)


def make_step(tables: np.ndarray, seq_lens: np.ndarray, query_start_loc: np.ndarray, device: str) -> AttentionStep:
    """Return the step of these host arrays, copied to the device."""
    on_device = [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in (tables, seq_lens, query_start_loc)]
    return AttentionStep(
        block_tables=on_device[0],
        seq_lens=on_device[1],
        query_start_loc=on_device[2],
        host_block_tables=tables,
        host_seq_lens=seq_lens,
        host_query_start_loc=query_start_loc,
    )


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
class _Layer:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    truth: AttentionTruth | None = None
    checksum: int | None = None


def _make_layer(
    case: AttentionCase, hazards: Hazards, step: AttentionStep, used: torch.Tensor, layer: int, device: str
) -> _Layer:
    generator = torch.Generator(device=device).manual_seed(hz.seed_of(case.digest, hazards, layer))
    dtype = torch_dtype(case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    pool = (case.num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    query, key, value = normal(case.num_tokens, case.num_q_heads, case.head_dim), normal(*pool), normal(*pool)
    unused = ~used[:, None, :, None]
    if hazards.fill == "nan":
        key.masked_fill_(unused, NAN)
        value.masked_fill_(unused, NAN)
    else:
        value.masked_fill_(unused, hz.DECOY_VALUE)
    if hazards.needles:
        _plant_needles(case, step, query, key)
    return _Layer(query, key, value)


def _plant_needles(case: AttentionCase, step: AttentionStep, query: torch.Tensor, key: torch.Tensor) -> None:
    """Overwrite keys so that they point along a row's query, with a score of about log(seq_len) + 6 or of 100; see hazards.py.

    Of a long chunk of query tokens only some get needles, so that most keys stay plain. The slot just past the end of
    each sequence gets one too: a decoy for whoever reads a token too many.
    """
    rows, heads, blocks, offsets, decoys = [], [], [], [], []
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        tokens = _needle_tokens(seq_len, q_len, case.group)
        for token in tokens:
            num_visible = seq_len - q_len + token + 1
            positions = hz.needle_positions(num_visible, case.block_size, case.num_q_heads, seq * case.num_q_heads)
            if seq_len % case.block_size:
                positions = np.append(positions, np.full(case.num_kv_heads, seq_len))
            head = np.append(np.arange(case.num_q_heads), np.arange(case.num_kv_heads) * case.group)[: len(positions)]
            rows.append(np.full(len(head), case.query_starts[seq] + token))
            heads.append(head)
            blocks.append(step.host_block_tables[seq, positions // case.block_size].astype(np.int64))
            offsets.append(positions % case.block_size)
            decoys.append(positions == seq_len)
    if not rows:
        return
    row, head, block, offset, decoy = (np.concatenate(part) for part in (rows, heads, blocks, offsets, decoys))
    kv_head = head // case.group
    # One writer a slot, or the bytes would depend on the order of the scatter.
    flat = (block * case.num_kv_heads + kv_head) * case.block_size + offset
    first = np.unique(flat, return_index=True)[1]
    index = [torch.from_numpy(part[first]).to(key.device) for part in (row, head, block, kv_head, offset)]
    direction = query[index[0], index[1]].float()
    seq_of_row = np.searchsorted(np.array(case.query_starts), row[first], side="right") - 1
    scores = np.log(np.maximum(np.array(case.seq_lens)[seq_of_row], 1)) + 6.0
    scores[::8] = OVERFLOWING_SCORE
    scores[decoy[first]] = OVERFLOWING_SCORE + 3.0  # above whatever needle its row has
    score = torch.from_numpy(scores).to(key.device)
    length = score.float() / (case.softmax_scale * direction.square().sum(-1).clamp_min(1e-6))
    key[index[2], index[3], index[4]] = (direction * length[:, None]).to(key.dtype)


def _needle_tokens(seq_len: int, q_len: int, group: int) -> list[int]:
    """The query tokens of a sequence whose rows get needles: those that see a key, at most one in eight keys taken."""
    first = max(q_len - seq_len, 0)
    count = min(q_len - first, max(1, seq_len // (8 * group)))
    return sorted({int(token) for token in np.linspace(first, q_len - 1, count)}) if count > 0 else []


@dataclasses.dataclass
class AttentionInputs:
    """Canonical tensors of a case, `layers` sets under one step."""

    case: AttentionCase
    hazards: Hazards
    step: AttentionStep
    layers: list[_Layer]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def truth(self, layer: int) -> AttentionTruth:
        """Truth in float64, computed once a layer."""
        made = self.layers[layer]
        if made.truth is None:
            made.truth = attention_truth(made.query, made.key, made.value, self.step, self.case.softmax_scale)
        return made.truth

    def stage(self, layout: Layout) -> StagedAttention:
        """Convert every layer to `layout` (HND is not copied) and make poisoned outputs."""
        caches = [self._arrange(layer, layout) for layer in self.layers]
        outs = [torch.empty_like(layer.query) for layer in self.layers]
        lses = [layer.query.new_empty(layer.query.shape[:2], dtype=torch.float32) for layer in self.layers]
        return StagedAttention(inputs=self, layout=layout, caches=caches, outs=outs, lses=lses)

    def _arrange(self, layer: _Layer, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        if layout.paged:
            return layout.arrange(layer.key, layer.value)
        return self._unpage(layer.key), self._unpage(layer.value)

    def _unpage(self, pool: torch.Tensor) -> torch.Tensor:
        """[num_seqs, max_len, num_kv_heads, head_dim]; what no sequence holds is poisoned as in the pool."""
        case = self.case
        fill = NAN if self.hazards.fill == "nan" else hz.DECOY_VALUE
        shape = (case.num_seqs, max(case.max_seq_len, 1), case.num_kv_heads, case.head_dim)
        unpaged = torch.full(shape, fill, dtype=pool.dtype, device=pool.device)
        for seq, (seq_len, num_blocks) in enumerate(zip(case.seq_lens, case.blocks_per_seq, strict=True)):
            blocks = pool[self.step.block_tables[seq, :num_blocks].long()]
            unpaged[seq, :seq_len] = blocks.transpose(1, 2).reshape(-1, *shape[2:])[:seq_len]
        return unpaged

    def checksum(self, layer: int) -> int:
        """Sum of all 32-bit words of K and V in use, modulo 2**32."""
        made = self.layers[layer]
        if made.checksum is None:
            made.checksum = self._sum_words(made)
        return made.checksum

    def _sum_words(self, layer: _Layer) -> int:
        case, step = self.case, self.step
        total = torch.zeros((), dtype=torch.int64, device=layer.key.device)
        for pool in (layer.key, layer.value):
            for seq, (seq_len, num_blocks) in enumerate(zip(case.seq_lens, case.blocks_per_seq, strict=True)):
                blocks = pool[step.block_tables[seq, :num_blocks].long()]
                tokens = blocks.transpose(1, 2).reshape(-1, case.num_kv_heads * case.head_dim)[:seq_len].contiguous()
                total += tokens.view(torch.int32).sum(dtype=torch.int64)
        return int(total) % 2**32


@dataclasses.dataclass
class StagedAttention:
    """Tensors in one layout, as launch takes them, and the judge of what it leaves."""

    inputs: AttentionInputs
    layout: Layout
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    outs: list[torch.Tensor]
    lses: list[torch.Tensor]

    @property
    def step(self) -> AttentionStep:
        return self.inputs.step

    @property
    def num_layers(self) -> int:
        return self.inputs.num_layers

    def arguments(self, layer: int) -> tuple[torch.Tensor, ...]:
        return (self.inputs.layers[layer].query, *self.caches[layer], self.outs[layer], self.lses[layer])

    def soil(self, layer: int) -> None:
        fill_unwritten(self.outs[layer])
        fill_unwritten(self.lses[layer])

    def judge(self, layer: int, quantises: frozenset[str]) -> Verdict:
        truth = self.inputs.truth(layer)
        return judge_attention(self.outs[layer], self.lses[layer], truth, quantises=quantises)

    def judge_reader(self, layer: int, prepared: PreparedReader) -> Verdict:
        got = int(prepared.checksum.sum(dtype=torch.int64)) % 2**32
        want = self.inputs.checksum(layer)
        reason = None if got == want else f"the checksum of what was read is {got:#010x}, of what is there {want:#010x}"
        return Verdict(passed=got == want, num_rows=1, num_failed=int(got != want), reason=reason, got=got, want=want)

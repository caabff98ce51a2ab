"""Paged attention: its tensors in canonical order, from a case to truth. What a kernel is given: attention_staged.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from harness import hazards as hz
from harness.alive import beat
from harness.guards import Guarded, empty, house
from harness.hazards import Hazards
from harness.ops.attention import AttentionCase, AttentionSpec, AttentionStep
from harness.ops.attention_staged import StagedAttention, make_step
from harness.ops.dtypes import movable, negate, torch_dtype
from harness.ops.layer_tensors import by_query_head
from harness.ops.layouts import Layout
from harness.ops.needles import num_rounds, plant
from harness.ops.outlier import plant_outlier
from harness.ops.quantised import AT_ONCE, draw_scale, store
from harness.ops.sharing import blocks_to_read
from harness.truth import BY_HEAD, OF_TRUTH, AttentionTruth, attention_truth


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
            window=case.window,
            softcap=case.softcap,
            alibi=case.alibi,
            sinks=case.sinks,
            kv_dtype=case.kv_dtype,
            kv_scales=case.kv_scales,
        )

    def build(self, case: AttentionCase, hazards: Hazards, *, layers: int, device: str) -> AttentionInputs:
        """Make the tensors of `case`; equal cases give equal bytes on equal devices.

        Shapes
            query         [num_tokens, num_q_heads, head_dim]                        case.dtype, a layer
            key, value    [num_blocks, num_kv_heads, block_size, head_dim]           case.cache_dtype, a layer
            named         what launch takes by keyword, AttentionSpec.layer_shapes   f32, a layer
            step          one for all layers, see AttentionStep

        Blocks are dealt in shuffled order, so that no kernel passes by assuming neighbours.
        """
        rng = np.random.default_rng(hz.seed_of(case.digest, hazards))
        shared = tuple((leader, tokens // case.block_size) for leader, tokens in case.prefix)
        tables = hz.deal_blocks(case.blocks_per_seq, case.num_blocks, rng, shared)
        used = _slots_in_use(case, hazards, tables, device)
        if hazards.foreign:
            tables = hz.foreign_entries(tables, case.blocks_per_seq)
        step, held = make_step(tables, np.array(case.seq_lens, np.int32), np.array(case.query_starts, np.int32), device)
        inputs = AttentionInputs(case=case, hazards=hazards, step=step, layers=[], held=held)
        for layer in range(layers):
            beat()
            inputs.layers.append(_make_layer(inputs, used, layer, f" of set {layer}" if layers > 1 else ""))
        return inputs

    def rounds(self, case: AttentionCase, hazards: Hazards) -> int:
        """Sets of needles that it takes to reach every block."""
        return num_rounds(case) if hazards.needles else 1


def _slots_in_use(case: AttentionCase, hazards: Hazards, tables: np.ndarray, device: str) -> torch.Tensor:
    """[num_blocks, block_size] bool: the slots that hold a token which some row may see, or may multiply by 0."""
    used = np.zeros((case.num_blocks, case.block_size), dtype=bool)
    slot = np.arange(case.block_size)
    firsts = case.first_keys if hazards.behind else (0,) * case.num_seqs
    for row, first, seq_len, num_blocks in zip(tables, firsts, case.seq_lens, case.blocks_per_seq, strict=True):
        begin, last = first // case.block_size, num_blocks - 1
        if begin > last:
            continue
        used[row[begin + 1 : last]] = True
        for block in {begin, last}:  # several sequences may see parts of one block
            position = block * case.block_size + slot
            used[row[block]] |= (position >= first) & (position < seq_len)
    return torch.from_numpy(used).to(device)


@dataclasses.dataclass
class Layer:
    """One set of canonical tensors; `named` is what launch takes by keyword; `held` are their allocations, in this order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    held: Sequence[Guarded]
    named: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    truths: dict[frozenset[str], AttentionTruth] = dataclasses.field(default_factory=dict)
    mirrored: dict[tuple[int, frozenset[str]], AttentionTruth] = dataclasses.field(default_factory=dict)
    checksum: int | None = None


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """One set before it is quantised; key and value in case.dtype, poison and needles in them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    named: dict[str, torch.Tensor]
    needles: set[tuple[int, int]]
    chance: torch.Generator


def _draw(inputs: AttentionInputs, used: torch.Tensor, layer: int, make: Callable[..., torch.Tensor]) -> _Drawn:
    """Draw set number `layer` into what make(name, *shape) allocates."""
    case, hazards = inputs.case, inputs.hazards
    chance = torch.Generator(device=used.device).manual_seed(hz.seed_of(case.digest, hazards, layer))
    pool = (case.num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    query = make("query", case.num_tokens, case.num_q_heads, case.head_dim).normal_(generator=chance)
    key, value = (make(name, *pool).normal_(generator=chance) for name in ("key_cache", "value_cache"))
    if hazards.outlier:
        plant_outlier(case, inputs.step, query, key, value)
    hz.poison(key, value, ~used, hazards.fill)
    needles = plant(case, inputs.step, query, key, value, used, layer) if hazards.needles else set()
    return _Drawn(query, key, value, by_query_head(case, chance), needles, chance)


def _make_layer(inputs: AttentionInputs, used: torch.Tensor, layer: int, of: str) -> Layer:
    case, device = inputs.case, used.device
    dtype, cache_dtype = torch_dtype(case.dtype), torch_dtype(case.cache_dtype)
    held: list[Guarded] = []

    def guarded(name: str, *shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        tensor, allocation = empty(name + of, shape, dtype, device)
        held.append(allocation)
        return tensor

    def make(name: str, *shape: int) -> torch.Tensor:
        passing = case.kv_dtype and name != "query"
        return torch.empty(shape, dtype=dtype, device=device) if passing else guarded(name, *shape)

    drawn = _draw(inputs, used, layer, make)
    inputs.needles |= drawn.needles
    caches, named = {"key_cache": drawn.key, "value_cache": drawn.value}, drawn.named
    if case.kv_dtype:
        for name, raw in caches.items():
            scale = f"{name[0]}_scale"
            named[scale] = draw_scale(scale, raw, used, case.kv_scales, cache_dtype, drawn.chance)
            caches[name] = store(raw, named[scale], guarded(name, *raw.shape, dtype=cache_dtype))
    housed, of_named = house({name + of: tensor for name, tensor in named.items()})
    return Layer(
        query=drawn.query, key=caches["key_cache"], value=caches["value_cache"], held=[*held, *of_named],
        named=dict(zip(named, housed, strict=True)),
    )


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
        value: torch.Tensor, named: Mapping[str, torch.Tensor],
    ) -> AttentionInputs:
        """One layer of these canonical tensors, copied, under the step of these host tables."""
        lens, starts = np.array(case.seq_lens, np.int32), np.array(case.query_starts, np.int32)
        step, of_step = make_step(tables, lens, starts, str(key.device))
        (query, key, value, *rest), held = house({"query": query, "key_cache": key, "value_cache": value, **named})
        layer = Layer(query, key, value, held, dict(zip(named, rest, strict=True)))
        return cls(case=case, hazards=hazards, step=step, layers=[layer], held=of_step)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def truth(self, layer: int, quantises: frozenset[str] = frozenset()) -> AttentionTruth:
        """Truth in float64, computed once a layer for each set of what is rounded besides (of `quantises`)."""
        made, rounded = self.layers[layer], quantises & OF_TRUTH
        if self.case.softcap is None:
            rounded -= {"tanh"}
        if rounded not in made.truths:
            made.truths[rounded] = self._attend(made.query, made.key, made.value, made.named, rounded)
        return made.truths[rounded]

    def mirrored_truth(self, layer: int, head: int, quantises: frozenset[str], *, in_place: bool) -> AttentionTruth:
        """Truth where keys and values of one KV head are negated; `in_place`: they are so in these tensors already."""
        whole, made, group = self.truth(layer, quantises), self.layers[layer], self.case.group
        rows, key = slice(head * group, (head + 1) * group), (head, whole.quantises)
        if key not in made.mirrored:
            made.mirrored[key] = self._attend_mirrored(made, head, rows, whole.quantises, in_place)
        changed = {}
        for name in BY_HEAD:
            changed[name] = getattr(whole, name).clone()
            changed[name][:, rows] = getattr(made.mirrored[key], name)
        return dataclasses.replace(whole, **changed)

    def _attend_mirrored(
        self, made: Layer, head: int, rows: slice, rounded: frozenset[str], in_place: bool
    ) -> AttentionTruth:
        """Truth of the rows of one KV head alone."""
        pools = [pool[:, head : head + 1].clone() for pool in (made.key, made.value)]
        if not in_place:
            for pool in pools:
                negate(pool)
        named = {
            name: tensor if len(tensor) == 1 else tensor[head : head + 1] if name in ("k_scale", "v_scale") else tensor[rows]
            for name, tensor in made.named.items()
        }
        return self._attend(made.query[:, rows], pools[0], pools[1], named, rounded)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, named: Mapping[str, torch.Tensor],
        rounded: frozenset[str] = frozenset(),
    ) -> AttentionTruth:
        case = self.case
        return attention_truth(
            query, key, value, self.step, case.softmax_scale, rounded, window=case.window, softcap=case.softcap, named=named
        )

    @functools.cached_property
    def format_error(self) -> float | None:
        """What storing K and V in fp8 changes in the output: the L2 of a row's difference as a share of the row's, the median
        over rows of the first set. It is the format's, whoever reads it. None where nothing is quantised or seen."""
        if not self.case.kv_dtype or self.hazards.needles:
            return None
        device = str(self.layers[0].key.device)
        stored, used = self.truth(0), _slots_in_use(self.case, self.hazards, self.step.host_block_tables, device)
        dtype = torch_dtype(self.case.dtype)
        drawn = _draw(self, used, 0, lambda _, *shape: torch.empty(shape, dtype=dtype, device=used.device))
        exact = self._attend(drawn.query, drawn.key, drawn.value, drawn.named).out
        share = ((stored.out - exact).norm(dim=-1) / exact.norm(dim=-1))[stored.num_visible > 0]
        return float(share.median()) if share.numel() else None

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
        fill = math.nan if self.hazards.fill == "nan" else min(hz.DECOY_VALUE, torch.finfo(pool.dtype).max)
        shape = (case.num_seqs, max(case.max_seq_len, 1), case.num_kv_heads, case.head_dim)
        unpaged, bits = torch.full(shape, fill, dtype=pool.dtype, device=pool.device), movable(pool)
        tables = self.step.block_tables[:, : max(case.blocks_per_seq, default=0)].long()
        filled = torch.tensor(case.blocks_per_seq, device=pool.device)[:, None] * case.block_size
        is_filled = (torch.arange(shape[1], device=pool.device) < filled)[..., None, None]
        seqs_at_once = max(1, AT_ONCE // math.prod(shape[1:]))
        for some in (slice(at, at + seqs_at_once) for at in range(0, case.num_seqs, seqs_at_once)):
            blocks = bits[tables[some]].transpose(2, 3)  # [sequences, blocks, block_size, num_kv_heads, head_dim]
            tokens = blocks.flatten(1, 2)[:, : shape[1]]
            part = movable(unpaged)[some, : tokens.shape[1]]
            part.copy_(torch.where(is_filled[some, : tokens.shape[1]], tokens, part))
        return unpaged

    def checksum(self, layer: int) -> int:
        """Sum of all 32-bit words of K and V that a reader reads, modulo 2**32: each block that some row sees, up to its last
        token, once."""
        made = self.layers[layer]
        if made.checksum is None:
            made.checksum = self._sum_words(made)
        return made.checksum

    def _sum_words(self, layer: Layer) -> int:
        case = self.case
        blocks, tokens = blocks_to_read(self.step, case.block_size, case.window)
        total = torch.zeros((), dtype=torch.int64, device=layer.key.device)
        for pool in (layer.key, layer.value):
            for count in np.unique(tokens).tolist():
                ids = torch.from_numpy(blocks[tokens == count])
                for some in torch.split(ids, max(1, AT_ONCE // pool[:1].numel())):
                    words = pool.view(torch.uint8)[some.to(pool.device), :, :count].view(torch.int32)
                    total += words.sum(dtype=torch.int64)
        return int(total) % 2**32

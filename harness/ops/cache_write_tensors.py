"""Cache write: its tensors, and the judge: every bit of both caches, written and untouched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from harness.check import Verdict, judge_exact
from harness.guards import Guarded, house, seal
from harness.hazards import Hazards, seed_of
from harness.ops.cache_write import CacheWriteCase, CacheWriteSpec, CacheWriteStep
from harness.ops.dtypes import movable, torch_dtype
from harness.ops.in_place import StagedInPlace
from harness.ops.layouts import Layout
from harness.ops.quantised import quantise

#: how far apart the extremes lie among new keys and values; prime, so that they come to lie in all dimensions
EVERY = 7


class CacheWriteOperator:
    """Makes the tensors of cache_write cases. Families differ in values and slots only; there is nothing to poison.

    What is copied as it is has extremes among its values: NaN, infinities, the largest and the smallest numbers, -0.
    """

    def spec(self, case: CacheWriteCase, layout: Layout, device: str, params: Mapping[str, Any]) -> CacheWriteSpec:
        return CacheWriteSpec(
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            block_size=case.block_size,
            dtype=case.dtype,
            layout=layout,
            num_blocks=case.num_blocks,
            max_num_tokens=case.num_tokens,
            device=device,
            params=params,
            kv_dtype=case.kv_dtype,
            kv_scales=case.kv_scales,
        )

    def build(self, case: CacheWriteCase, hazards: Hazards, *, layers: int, device: str) -> CacheWriteInputs:
        """Make new tokens, [num_tokens, num_kv_heads, head_dim], and a cache full of random bits for each layer."""
        rng = np.random.default_rng(seed_of(case.digest, hazards))
        slots = _slots(case, rng)
        (on_device,), held = house({"slot_mapping": torch.from_numpy(slots).to(device)})
        step = CacheWriteStep(slot_mapping=on_device, host_slot_mapping=slots)
        made, named = [], []
        for layer in range(layers):
            generator = torch.Generator(device=device).manual_seed(seed_of(case.digest, hazards, layer))
            made.append(_make_layer(case, generator, device))
            named.append(_make_scales(case, generator))
        return CacheWriteInputs(case=case, step=step, layers=made, named=named, held=held)

    def rounds(self, case: CacheWriteCase, hazards: Hazards) -> int:
        return 1


def _slots(case: CacheWriteCase, rng: np.random.Generator) -> np.ndarray:
    """Slots of the tokens, [num_tokens] int64: -1 for padding, which lies anywhere among the others."""
    num_written = case.num_tokens - case.num_padding
    if case.order == "scattered":
        written = rng.choice(case.num_blocks * case.block_size, num_written, replace=False)
    else:
        blocks = rng.permutation(case.num_blocks)[: -(-num_written // case.block_size)].astype(np.int64)
        written = (blocks[:, None] * case.block_size + np.arange(case.block_size)).reshape(-1)[:num_written]
    slots = np.full(case.num_tokens, -1, dtype=np.int64)
    slots[np.sort(rng.choice(case.num_tokens, num_written, replace=False))] = written
    return slots


def _make_layer(case: CacheWriteCase, generator: torch.Generator, device: str) -> tuple[torch.Tensor, ...]:
    dtype = torch_dtype(case.dtype)

    def normal(*shape: int, of: str = case.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator).to(torch_dtype(of))

    token = (case.num_tokens, case.num_kv_heads, case.head_dim)
    pool = (case.num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    key, value = normal(*token), normal(*token)
    if not case.kv_dtype:
        for new in (key, value):
            _plant_extremes(new)
    return key, value, normal(*pool, of=case.cache_dtype), normal(*pool, of=case.cache_dtype)


def _plant_extremes(new: torch.Tensor) -> None:
    """Make each EVERYth element one of which arithmetic keeps not every bit: a write is a copy."""
    info, integers = torch.finfo(new.dtype), {2: torch.int16, 4: torch.int32}[new.element_size()]
    bits = torch.tensor([math.nan, math.inf, info.max, info.tiny, 0.0], dtype=new.dtype).view(integers)
    bits[0] += 5  # a NaN that is not the one that arithmetic makes
    bits = torch.cat([bits, torch.ones_like(bits[:1])])  # and the smallest subnormal
    signed = torch.cat([bits, bits | torch.iinfo(integers).min]).to(new.device)
    places = new.view(integers).view(-1)[::EVERY]
    places.copy_(signed.repeat(-(-len(places) // len(signed)))[: len(places)])


def _make_scales(case: CacheWriteCase, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Scales by which one number in a hundred is too large for the type, or one in some ten thousand."""
    if not case.kv_dtype:
        return {}
    count, most = case.num_kv_heads if case.kv_scales == "head" else 1, torch.finfo(torch_dtype(case.kv_dtype)).max
    room = {"k_scale": 2.5, "v_scale": 3.5}
    drawn = {name: torch.rand(count, generator=generator, device=generator.device) for name in room}
    return {name: (room[name] + drawn[name] / 2) / most for name in room}


@dataclasses.dataclass
class CacheWriteInputs:
    """Canonical tensors: key, value, and the caches before the write, a layer each, and its scales by name; `held` is the
    step's allocation."""

    case: CacheWriteCase
    step: CacheWriteStep
    layers: list[tuple[torch.Tensor, ...]]
    named: list[dict[str, torch.Tensor]]
    held: Sequence[Guarded]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def stage(self, layout: Layout) -> StagedCacheWrite:
        """Copy the caches into `layout`, all between canaries; a launch changes the copy only."""
        return StagedCacheWrite(self, layout)

    def expected(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches, canonical, as they must be after the write."""
        key, value, *caches = self.layers[layer]
        slots = self.step.slot_mapping
        token = (slots >= 0).nonzero()[:, 0]
        block, offset = slots[token] // self.case.block_size, slots[token] % self.case.block_size
        wanted = [cache.clone() for cache in caches]
        for cache, new, scale in zip(wanted, (key, value), ("k_scale", "v_scale"), strict=True):
            rows = new[token]
            if self.case.kv_dtype:
                rows = quantise(rows, self.named[layer][scale][:, None], cache.dtype)
            movable(cache)[block, :, offset] = movable(rows)
        return wanted[0], wanted[1]


class StagedCacheWrite(StagedInPlace):
    """Tensors in one layout, as launch takes them, and the judge of what it leaves."""

    inputs: CacheWriteInputs

    def __init__(self, inputs: CacheWriteInputs, layout: Layout) -> None:
        super().__init__(inputs, layout)
        self._arguments: list[tuple[torch.Tensor, ...]] = []
        self._keywords: list[dict[str, torch.Tensor]] = []
        for index, (key, value, *caches) in enumerate(inputs.layers):
            of = f" of set {index}" if len(inputs.layers) > 1 else ""
            new, read = house({"key" + of: key, "value" + of: value})
            key_cache, value_cache = layout.arrange(*caches)
            housed, written = house({"key_cache" + of: key_cache, "value_cache" + of: value_cache})
            named = inputs.named[index]
            scales, of_scales = house({name + of: scale for name, scale in named.items()})
            self._arguments.append((*new, *housed))
            self._keywords.append(dict(zip(named, scales, strict=True)))
            self.read += [*read, *of_scales]
            self._writes(written)
        seal(self.read)

    def arguments(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self._arguments[layer]

    def keywords(self, layer: int) -> Mapping[str, torch.Tensor]:
        return self._keywords[layer]

    def soil(self, layer: int) -> None:
        """Put the caches back as they were, so that a write left undone shows."""
        arranged = self.layout.arrange(*self.inputs.layers[layer][2:])
        for cache, before in zip(self._arguments[layer][2:], arranged, strict=True):
            movable(cache).copy_(movable(before))

    def judge(self, layer: int, quantises: frozenset[str], lse: bool = True) -> Verdict:
        """Every element, written or untouched, bit for bit."""
        got = self.layout.restore(*self._arguments[layer][2:])
        for name, cache, want in zip(("key_cache", "value_cache"), got, self.inputs.expected(layer), strict=True):
            verdict = judge_exact(cache, want, name)
            if not verdict.passed:
                return verdict
        return verdict

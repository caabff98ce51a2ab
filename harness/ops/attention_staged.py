"""Paged attention: the tensors that a kernel is given, in its layout, and the judge of what it leaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness import hazards as hz
from harness.alive import beat
from harness.check import Verdict, fill_unwritten, is_unwritten, judge_attention
from harness.guards import Guarded, empty_each, house, leaves_unwritten, seal
from harness.ops.attention import AttentionStep
from harness.ops.dtypes import negate
from harness.ops.layouts import HND, Layout
from harness.ops.quantised import AT_ONCE
from harness.registry import PreparedReader

if TYPE_CHECKING:
    from harness.ops.attention_tensors import AttentionInputs, Layer


Rule = Callable[[torch.Tensor], torch.Tensor]


class StagedAttention:
    """Tensors in one layout, as launch takes them.

    read, written    all allocations that launches read, sealed, and that they write
    caches           (key_cache, value_cache) of every layer; outs, lses likewise
    """

    def __init__(self, inputs: AttentionInputs, layout: Layout) -> None:
        self.inputs, self.layout = inputs, layout
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outs: list[torch.Tensor] = []
        self.lses: list[torch.Tensor] = []
        self.read: list[Guarded] = [*inputs.held]
        self.written: list[Guarded] = []
        self._mirrored: set[int] = set()
        for index, layer in enumerate(inputs.layers):
            beat()
            self._add(layer, self._of(index))
        self.renew()
        seal(self.read)

    def _of(self, index: int) -> str:
        return f" of set {index}" if len(self.inputs.layers) > 1 else ""

    def _add(self, layer: Layer, of: str) -> None:
        if self.layout is HND:
            self.caches.append((layer.key, layer.value))
            self.read += layer.held
        else:
            key, value = self.inputs.arrange(layer, self.layout)
            (key, value), held = house({"key_cache" + of: key, "value_cache" + of: value})
            self.caches.append((key, value))
            self.read += [layer.held[0], *held, *layer.held[3:]]

    def renew(self) -> bool:
        query, layers = self.inputs.layers[0].query, range(self.num_layers)
        self.outs, of_outs = empty_each([f"out{self._of(i)}" for i in layers], query.shape, query.dtype, query.device)
        self.lses, of_lses = empty_each([f"lse{self._of(i)}" for i in layers], query.shape[:2], torch.float32, query.device)
        self.written = [guarded for pair in zip(of_outs, of_lses, strict=True) for guarded in pair]
        self._unwritten = set(range(self.num_layers)) if leaves_unwritten() else set()
        return True

    @property
    def step(self) -> AttentionStep:
        return self.inputs.step

    @property
    def num_layers(self) -> int:
        return self.inputs.num_layers

    def arguments(self, layer: int) -> tuple[torch.Tensor, ...]:
        return (self.inputs.layers[layer].query, *self.caches[layer], self.outs[layer], self.lses[layer])

    def keywords(self, layer: int) -> Mapping[str, torch.Tensor]:
        return self.inputs.layers[layer].named

    def outputs(self, layer: int) -> Sequence[Guarded]:
        return self.written[2 * layer : 2 * layer + 2]

    def soil(self, layer: int) -> None:
        """Pre-fill the outputs; under initcheck their first launch meets them as they were allocated."""
        if layer in self._unwritten:
            self._unwritten.remove(layer)
            return
        fill_unwritten(self.outs[layer])
        fill_unwritten(self.lses[layer])

    def wear(self, layer: int, lse: bool = True) -> None:
        """Make the outputs those of other rows and of another sign, and each LSE the larger of any two."""
        out, log = self.outs[layer], self.lses[layer]
        out.copy_(1 - out.roll(1, 0))
        if lse:
            log.copy_(torch.where(log.isfinite(), log, 0.0).amax() + 8 if log.numel() else log)
        else:
            fill_unwritten(log)

    def wild_step(self) -> AttentionStep:
        """The same step with ids of no block in unused table entries, on which an access is illegal."""
        case, step = self.inputs.case, self.step
        wild = hz.wild_entries(step.host_block_tables, case.blocks_per_seq, case.num_blocks)
        return make_step(wild, step.host_seq_lens, step.host_query_start_loc, str(step.seq_lens.device))[0]

    def coverage(self) -> Mapping[str, Any]:
        """How many blocks had a needle, of how many, in how many rounds; without needles, what a cache's format errs."""
        if not self.inputs.hazards.needles:
            error = self.inputs.format_error
            return {} if error is None else {"format_error": error}
        return {
            "needle_rounds": self.num_layers,
            "needle_blocks": len(self.inputs.needles),
            "blocks": self.inputs.case.seen_blocks,
        }

    def scan(self, layers: Sequence[int], lse: bool = True) -> str | None:
        """Say what no right launch leaves in these layers: elements never written or not finite; None where there is none."""
        of_out: dict[str, Rule] = {"outputs were never written": is_unwritten, "outputs are not finite": _not_finite}
        of_lse: dict[str, Rule] = {"LSE were never written": is_unwritten, "LSE are NaN or +inf": _not_below_infinity}
        found = {rule: _count(wrong, [self.outs[layer] for layer in layers]) for rule, wrong in of_out.items()}
        if lse:
            found |= {rule: _count(wrong, [self.lses[layer] for layer in layers]) for rule, wrong in of_lse.items()}
        counts = torch.stack(list(found.values())).tolist()
        for rule, of_rule in zip(found, counts, strict=True):
            for layer, count in zip(layers, of_rule, strict=True):
                if count:
                    return f"set {layer}: {count} {rule}"
        return None

    def mirror(self, layer: int) -> bool:
        """Negate keys and values of one KV head, which changes its weights, its LSE and its outputs and leaves the rest alone;
        a second time undoes it.

        One, so that a look at a few elements tells nobody that they changed, and its truth costs little. The layer must have
        been judged before: the others' truth is that of what was made.
        """
        for cache in self.caches[layer]:
            negate(cache.select(self.layout.head_dimension, self._mirrored_head(layer)))
        self._mirrored ^= {layer}
        return True

    def _mirrored_head(self, layer: int) -> int:
        return random.Random(f"{self.inputs.case.digest} {layer}").randrange(self.inputs.case.num_kv_heads)

    def judge(self, layer: int, quantises: frozenset[str], lse: bool = True) -> Verdict:
        truth = self.inputs.truth(layer, quantises)
        if layer in self._mirrored:
            truth = self.inputs.mirrored_truth(layer, self._mirrored_head(layer), quantises, in_place=self.layout is HND)
        return judge_attention(self.outs[layer], self.lses[layer] if lse else None, truth, quantises=quantises)

    def judge_reader(self, layer: int, prepared: PreparedReader) -> Verdict:
        got = int(prepared.checksum.sum(dtype=torch.int64)) % 2**32
        want = self.inputs.checksum(layer)
        reason = None if got == want else f"the checksum of what was read is {got:#010x}, of what is there {want:#010x}"
        return Verdict(passed=got == want, num_rows=1, num_failed=int(got != want), reason=reason, got=got, want=want)


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    return ~tensor.isfinite()


def _not_below_infinity(tensor: torch.Tensor) -> torch.Tensor:
    return ~(tensor < torch.inf)


def _count(wrong: Rule, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n]: elements of each of n tensors, which are alike, that are wrong; some tensors at a time, one operation for all."""
    at_once = max(1, AT_ONCE // max(tensors[0].numel(), 1))
    starts = range(0, len(tensors), at_once)
    return torch.cat([wrong(torch.stack(list(tensors[at : at + at_once]))).flatten(1).sum(1) for at in starts])


def make_step(
    tables: np.ndarray, seq_lens: np.ndarray, query_start_loc: np.ndarray, device: str
) -> tuple[AttentionStep, list[Guarded]]:
    """Return the step of these host arrays, copied to the device between canaries."""
    host = {"block_tables": tables, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    on_device = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in host.items()}
    housed, held = house(on_device)
    step = AttentionStep(
        block_tables=housed[0],
        seq_lens=housed[1],
        query_start_loc=housed[2],
        host_block_tables=tables,
        host_seq_lens=seq_lens,
        host_query_start_loc=query_start_loc,
    )
    return step, held

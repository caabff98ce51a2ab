"""The plain inputs behind a relation of attention, and variations of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from harness.check import Verdict, judge_attention
from harness.hazards import PLAIN
from harness.ops.attention import AttentionCase
from harness.ops.attention_tensors import AttentionInputs
from harness.ops.dtypes import movable
from harness.relations import Answer, NotRun, Subject, launched
from harness.trial import Trial
from harness.truth import AttentionTruth

if TYPE_CHECKING:
    from harness.ops.attention_staged import StagedAttention

Pair = tuple[torch.Tensor, torch.Tensor]


class Plain:
    """The plain inputs behind a subject, and answers in their order."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.staged = cast("StagedAttention", subject.staged)
        self.case: AttentionCase = self.staged.inputs.case
        self.inputs, self.step = self.staged.inputs, self.staged.step
        self.query, self.key, self.value = (getattr(self.inputs.layers[0], name) for name in ("query", "key", "value"))
        self.named = self.inputs.layers[0].named
        self.original = tuple(
            words.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
            for words, tensor in zip(subject.answer, (self.staged.outs[0], self.staged.lses[0]), strict=True)
        )

    def vary(self, case: AttentionCase, **changed: Any) -> AttentionInputs:
        """Inputs like these but for `tables` on the host, `query`, `key`, `value` and what is `named`."""
        tables = changed.pop("tables", self.step.host_block_tables)
        tensors = {"query": self.query, "key": self.key, "value": self.value, "named": self.named, **changed}
        return AttentionInputs.given(case, PLAIN, tables, **tensors)

    def attend(self, name: str, make: Callable[[], AttentionInputs], trial: Trial | None = None) -> Pair:
        """Plan and launch on what `make` makes, once for all rows in this layout: `name` says of what."""
        staged = cast("StagedAttention", self.subject.varied(name, lambda: make().stage(self.subject.entry.layout)))
        launched(trial or self.subject.trial, staged, busy=trial is not None)  # one prepared anew has not shown its streams
        return staged.outs[0], staged.lses[0]

    def answer(
        self, pair: Sequence[torch.Tensor], like: Sequence[torch.Tensor] | None = None,
        truth: Callable[[], AttentionTruth] | None = None, rounds: frozenset[str] = frozenset(),
    ) -> Answer:
        """An answer to be equal to `like`, or right by `truth`; both are the original's where they are not given."""
        quantises = self.subject.entry.impl.quantises | rounds
        lse = pair[1] if self.subject.entry.impl.lse else None

        def judge() -> Verdict:
            known = truth() if truth else self.inputs.truth(0, quantises)
            return judge_attention(pair[0], lse, known, quantises)

        return Answer(pair, like or self.original, judge)

    def require_blocks(self) -> None:
        if not self.subject.entry.layout.paged:
            raise NotRun("the layout has no blocks")


def repage(
    pool: torch.Tensor, plain: Plain, other: AttentionCase, tables: np.ndarray, num_blocks: int, begins: np.ndarray
) -> torch.Tensor:
    """The tokens of a pool in a pool of blocks of another case, NaN around them where the entry takes that.

    begins    [num_seqs] position of each sequence's token that is the first one of `other`
    """
    shape = (num_blocks, other.block_size, other.num_kv_heads, other.head_dim)
    repaged = torch.full(shape, plain.subject.unused, dtype=pool.dtype, device=pool.device)
    lens = np.array(other.seq_lens, np.int64)
    seq = np.repeat(np.arange(len(lens)), lens)
    position = np.arange(len(seq)) - np.repeat(lens.cumsum() - lens, lens)
    places = (
        (plain.step.host_block_tables, plain.case.block_size, position + begins[seq]), (tables, other.block_size, position),
    )  # fmt: skip
    source, target = (
        [torch.from_numpy(part.astype(np.int64)).to(pool.device) for part in (table[seq, at // size], at % size)]
        for table, size, at in places
    )
    movable(repaged)[target[0], target[1]] = movable(pool)[source[0], :, source[1]]
    return repaged.transpose(1, 2).contiguous()

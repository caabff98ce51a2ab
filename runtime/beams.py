"""Beam search of fixed length over sequences that share blocks: no end of sequence, length penalty 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.groups import Group, Sequence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best continuations of a group's beams, the best first.

    parents    which beam each continues
    tokens     with which token
    scores     sums of log-probabilities
    """

    parents: list[int]
    tokens: list[int]
    scores: list[float]


def best_continuations(logits: torch.Tensor, scores: torch.Tensor, num_beams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and places, beam * vocabulary + token, of the best num_beams continuations.

    Shapes
        logits    [beams, vocabulary]    any float type
        scores    [beams]                f32, of each beam so far
    """
    import torch

    totals = torch.log_softmax(logits.float(), -1) + scores[:, None]
    best = torch.topk(totals.flatten(), num_beams)
    return best.values, best.indices


def advance(
    group: Group, found: Found, fork: Callable[[Sequence], Sequence], release: Callable[[Sequence], None]
) -> None:
    """Make the group's sequences those of `found`. The first heir of a beam takes its sequence over, others fork it."""
    before, heirs = group.sequences, set[int]()
    after = []
    for parent in found.parents:
        after.append(fork(before[parent]) if parent in heirs else before[parent])
        heirs.add(parent)
    for index, sequence in enumerate(before):
        if index not in heirs:
            release(sequence)
    for sequence, token in zip(after, found.tokens, strict=True):
        sequence.tokens.append(token)
    group.sequences, group.scores, group.is_forked = after, list(found.scores), True

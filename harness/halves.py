"""Two halves of each row's keys, attended to alone and merged by their log-sum-exp, are the whole.

A half is a sequence of its own: positions begin anew in it, and its query token stands behind its last key. What depends on
positions is put right for the first half, whose query token stood as far behind as the second half is long:

    window    the halves are those of the keys that are seen, no more than a window each: nothing is masked in them
    alibi     scores of the first half are larger by slope * (tokens of the second), all of a row alike: its LSE is, too
    sinks     the second half has them, the first one such that weigh nothing
    softcap   is of a score alone

With several query tokens the first half, which all of them see to its end, would need a mask of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch

from harness.hazards import deal_blocks
from harness.ops.attention_tensors import AttentionInputs
from harness.plain import Pair, Plain, repage
from harness.relations import Answer, NotRun, Subject

NO_SINK = -1e4  # exp of it is 0 beside any key


def halves(subject: Subject) -> Iterator[Answer]:
    """The first keys of each row and the others, attended to alone and merged by their LSE."""
    plain = Plain(subject)
    plain.require_blocks()
    case = plain.case
    if not subject.entry.impl.lse:
        raise NotRun("the entry gives no LSE to merge by")
    if case.max_q_len > 1:
        raise NotRun("halves are for decode: with several query tokens the mask would move")
    lens, begins = np.array(case.seq_lens, np.int64), np.array(case.first_keys, np.int64)
    if case.prefix and begins.any():
        raise NotRun("sequences share blocks, in which what a window leaves would begin at another place")
    cuts = _cuts(lens, begins, case.block_size)
    rest = np.maximum(lens - cuts, 0)
    light = {"sinks": torch.full_like(plain.named["sinks"], NO_SINK)} if case.sinks else {}
    parts = [
        plain.attend(name, functools.partial(_part, plain, first, count, named))
        for name, first, count, named in (("first half", begins, lens - rest - begins, light), ("second half", cuts, rest, {}))
    ]
    if case.alibi:
        behind = torch.from_numpy(np.repeat(rest, case.q_lens)).to(plain.query.device)
        parts[0] = (parts[0][0], (parts[0][1].double() - behind[:, None] * plain.named["alibi_slopes"].double()).float())
    yield plain.answer(_merge(parts), rounds=frozenset({"partials"}))


def _cuts(lens: np.ndarray, begins: np.ndarray, block_size: int) -> np.ndarray:
    """Where the second half of each sequence begins: with a block, past the end of a short one; or in the midst of windows."""
    blocks = -(-lens // block_size)
    cuts: np.ndarray = begins + -(-(lens - begins) // 2) if begins.any() else -(-blocks // 2) * block_size
    return cuts


def _part(plain: Plain, begins: np.ndarray, lens: np.ndarray, named: dict[str, torch.Tensor]) -> AttentionInputs:
    """So many tokens of each sequence from `begins` on, as sequences of their own: in their blocks, if they begin with one."""
    case, tables = plain.case, plain.step.host_block_tables
    part = dataclasses.replace(case, seq_lens=tuple(lens.tolist()), prefix=())
    named = {**plain.named, **named}
    if not (begins % case.block_size).any():
        column = np.arange(tables.shape[1])[None, :] + begins[:, None] // case.block_size
        shifted = np.take_along_axis(tables, np.minimum(column, tables.shape[1] - 1), axis=1)
        return plain.vary(part, tables=shifted, named=named)
    dealt = deal_blocks(part.blocks_per_seq, case.num_blocks, np.random.default_rng(0))
    key, value = (repage(pool, plain, part, dealt, case.num_blocks, begins) for pool in (plain.key, plain.value))
    return plain.vary(part, tables=dealt, key=key, value=value, named=named)


def _merge(parts: Sequence[Pair]) -> Pair:
    """Two normalised partial results as one, in float64; where neither saw a key, out is 0 and lse -inf."""
    logs = torch.stack([lse for _, lse in parts]).double()
    whole = logs.logsumexp(0)
    weights = (logs - torch.where(whole.isneginf(), 0.0, whole)).exp()
    out = sum(weight[..., None] * out.double() for weight, (out, _) in zip(weights, parts, strict=True))
    return cast("torch.Tensor", out).to(parts[0][0].dtype), whole.float()

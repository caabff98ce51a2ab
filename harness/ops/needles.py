"""Needles: keys that carry most of a row's weight, at the edges where kernels err, and in every block in turn.

One round of needles gives each row one. Rows of a short batch are too few for all blocks of a long one, so there are
several rounds, each a set of inputs of its own, where the case is small enough.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from harness.alive import beat
from harness.hazards import DECOY_VALUE
from harness.ops.attention import AttentionCase, AttentionStep

#: Score of one needle in eight: its exponential is beyond every 16-bit and 32-bit float, so a maximum must be subtracted.
OVERFLOWING_SCORE = 100.0
#: At most so many rounds, and bytes of cache for all of them.
MAX_ROUNDS, ROUNDS_BYTES = 8, 48 << 20


def num_rounds(case: AttentionCase) -> int:
    """Rounds after which every block of every sequence has had a needle, as far as the bounds allow; 1 at least."""
    wanted = 1
    lens = zip(case.seq_lens, case.q_lens, case.blocks_per_seq, case.first_keys, strict=True)
    for seq_len, q_len, blocks, first_key in lens:
        num_blocks = blocks - first_key // case.block_size
        num_rows = len(needle_tokens(seq_len, q_len, case.group)) * case.num_q_heads
        if num_rows:
            wanted = max(wanted, 1 + math.ceil((num_blocks - num_rows // 2) / num_rows))
    return max(1, min(wanted, MAX_ROUNDS, ROUNDS_BYTES // max(case.cache_bytes, 1)))


def needle_tokens(seq_len: int, q_len: int, group: int) -> list[int]:
    """The query tokens of a sequence whose rows get needles: those that see a key, at most one in eight keys taken.

    The last, which sees all, is among them.
    """
    first = max(q_len - seq_len, 0)
    count = min(q_len - first, max(1, seq_len // (8 * group)))
    return sorted({int(token) for token in np.linspace(q_len - 1, first, count)}) if count > 0 else []


def needle_positions(end: int, block_size: int, num_rows: int, start: int, begin: int = 0) -> np.ndarray:
    """Positions of the needles of `num_rows` rows that see keys begin..end - 1; `start` rotates them between sequences.

    Half of the rows take an edge in turn: first and last key, both sides of the first and last block edge, and of a
    cut in 2, 4 and 8 splits. The other half walk through the blocks, first or last slot in turn.
    """
    first_edge, last_edge = (begin // block_size + 1) * block_size, (end - 1) // block_size * block_size
    edges = {begin, end - 1, first_edge - 1, first_edge, last_edge, last_edge - 1}
    for splits in (2, 4, 8):
        cut = begin + (end - begin) // splits
        edges |= {cut, cut - 1}
    sorted_edges = np.array(sorted(edge for edge in edges if begin <= edge < end))
    turn = start + np.arange(num_rows)
    return np.where(turn % 2 == 0, sorted_edges[(turn // 2) % len(sorted_edges)], walk(end, block_size, turn // 2, begin))


def walk(end: int, block_size: int, turn: np.ndarray, begin: int = 0) -> np.ndarray:
    """Positions that go from block to block, the first slot or the last in turn."""
    first = begin // block_size
    count = -(-end // block_size) - first
    slot = (turn + turn // count) % 2 * (block_size - 1)
    positions: np.ndarray = np.clip((first + turn % count) * block_size + slot, begin, end - 1)
    return positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Needles:
    """Arrays of equal length: for each needle its sequence, its row (query token, head), its slot (block, offset), and
    whether it is a decoy, which no kernel may read: "own" behind the end of its sequence or before every window of it,
    "foreign" in the block that the first unused table entry names."""

    seq: np.ndarray
    row: np.ndarray
    head: np.ndarray
    position: np.ndarray
    block: np.ndarray
    offset: np.ndarray
    own: np.ndarray
    foreign: np.ndarray

    def take(self, index: np.ndarray) -> _Needles:
        return _Needles(**{field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)})


def plant(
    case: AttentionCase, step: AttentionStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, used: torch.Tensor,
    layer: int,
) -> set[tuple[int, int]]:
    """Overwrite keys of pools so that they point along a row's query, with a score of about log(seq_len) + 6 or of 100.

    Of a long chunk of query tokens only some get needles, so that most keys stay plain. The slot just past the end of
    each sequence gets one too, the first of the block past its last, and the one before the first window: decoys for
    whoever reads too far. `used` [num_blocks, block_size] says which slots hold a key that some row sees, `layer` is the
    round. Returns (sequence, number of its block) of every needle.
    """
    found = _choose(case, step, layer)
    if found is None:
        return set()
    in_use = used.cpu().numpy()
    found = found.take(np.flatnonzero(~(found.own & in_use[found.block, found.offset])))  # another sequence may see it
    # One writer a slot, or the bytes would depend on the order of the scatter; needles before decoys.
    found = found.take(np.argsort(found.own | found.foreign, kind="stable"))
    flat = (found.block * case.num_kv_heads + found.head // case.group) * case.block_size + found.offset
    found = found.take(np.unique(flat, return_index=True)[1])
    scores = np.log(np.maximum(np.array(case.seq_lens)[found.seq], 1)) + 6.0
    scores[::8] = OVERFLOWING_SCORE
    scores[found.own] = OVERFLOWING_SCORE + 3.0  # above whatever needle its row has
    scores[found.foreign] = np.log(np.array(case.seq_lens)[found.seq[found.foreign]]) + 9.0  # a live key of its owner
    row, head, block, kv_head, offset = (
        torch.from_numpy(part).to(key.device)
        for part in (found.row, found.head, found.block, found.head // case.group, found.offset)
    )
    direction = query[row, head].float()
    length = torch.from_numpy(scores).to(key.device).float()
    length = length / (case.softmax_scale * direction.square().sum(-1).clamp_min(1e-6))
    key[block, kv_head, offset] = (direction * length[:, None]).to(key.dtype)
    unowned = np.flatnonzero((found.own | found.foreign) & ~in_use[found.block, found.offset])
    some = torch.from_numpy(unowned).to(key.device)
    value[block[some], kv_head[some], offset[some]] = DECOY_VALUE
    needles = found.take(np.flatnonzero(~found.own & ~found.foreign))
    return set(zip(needles.seq.tolist(), (needles.position // case.block_size).tolist(), strict=True))


def _choose(case: AttentionCase, step: AttentionStep, layer: int) -> _Needles | None:
    parts = []
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        beat()
        tokens = needle_tokens(seq_len, q_len, case.group)
        for ordinal, token in enumerate(tokens):
            num_rows = case.num_q_heads
            end = seq_len - q_len + token + 1
            begin = max(end - case.window, 0) if case.window else 0
            if layer == 0:
                positions = needle_positions(end, case.block_size, num_rows, (seq + ordinal) * num_rows, begin)
            else:  # go on where the rounds before have stopped
                walked = (seq + len(tokens)) * num_rows // 2 + ((layer - 1) * len(tokens) + ordinal) * num_rows
                positions = walk(end, case.block_size, walked + np.arange(num_rows), begin)
            parts.append(_at(case, step, seq, token, positions))
    if not parts:
        return None
    fields = {field.name: [getattr(part, field.name) for part in parts] for field in dataclasses.fields(_Needles)}
    return _Needles(**{name: np.concatenate(arrays) for name, arrays in fields.items()})


def _at(case: AttentionCase, step: AttentionStep, seq: int, token: int, positions: np.ndarray) -> _Needles:
    """The needles of one query token at these positions, a head each, and its decoys, one a KV head and kind."""
    seq_len, past_blocks = case.seq_lens[seq], case.blocks_per_seq[seq] * case.block_size
    decoys = [past_blocks] if seq_len == past_blocks else [seq_len, past_blocks]
    first = case.first_keys[seq]
    decoys = [first - 1, *decoys] if first else decoys
    first_heads = np.arange(case.num_kv_heads) * case.group
    position = np.concatenate([positions, np.repeat(decoys, case.num_kv_heads)]).astype(np.int64)
    return _Needles(
        seq=np.full(len(position), seq),
        row=np.full(len(position), case.query_starts[seq] + token),
        head=np.concatenate([np.arange(case.num_q_heads), *[first_heads] * len(decoys)]),
        position=position,
        block=step.host_block_tables[seq, position // case.block_size].astype(np.int64),
        offset=position % case.block_size,
        own=((position >= seq_len) & (position < past_blocks)) | (position < first),
        foreign=position >= past_blocks,
    )

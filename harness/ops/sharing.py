"""Shared prefixes: which sequence owns a block, and how many tokens of the cache some row sees. No torch.

`prefix` holds one (leader, tokens) a sequence: its table begins with the first blocks of a sequence before it, which may
have them from another. Block j of a table is always block j of its owner: a position is the same in all that share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from harness.ops.attention import AttentionStep

Prefix = Sequence[tuple[int, int]]


def owned_parts(prefix: Prefix, seq: int, end: int) -> list[tuple[int, int, int]]:
    """(owner, begin, end) of the positions 0..end of a sequence, from the last part to the first."""
    parts = []
    while True:
        leader, shared = prefix[seq] if prefix else (seq, 0)
        if shared < end:
            parts.append((seq, shared, end))
            end = shared
        if not end:
            return parts
        seq = leader


def count_tokens(begins: Sequence[int], ends: Sequence[int], prefix: Prefix) -> int:
    """Tokens at begin..end - 1 of each sequence, those that several sequences share counted once."""
    if not prefix:
        return sum(max(end - begin, 0) for begin, end in zip(begins, ends, strict=True))
    seen: dict[int, list[tuple[int, int]]] = {}
    for seq, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        for owner, low, high in owned_parts(prefix, seq, end):
            if max(low, begin) < high:
                seen.setdefault(owner, []).append((max(low, begin), high))
    return sum(_length(parts) for parts in seen.values())


def _length(parts: list[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total = reached = 0
    for begin, end in sorted(parts):
        total += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return total


def blocks_to_read(step: AttentionStep, block_size: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Block ids and tokens in them, [n] int64 each, of every block that holds a key which some row sees, once, by order of
    sequences. What a reader reads: of each the slots from the first one on, also where a window begins inside it."""
    import numpy as np

    ids, tokens = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    q_lens = np.diff(step.host_query_start_loc)
    for table, seq_len, q_len in zip(step.host_block_tables, step.host_seq_lens.tolist(), q_lens.tolist(), strict=True):
        first = max(seq_len - q_len - window + 1, 0) // block_size if window else 0
        begins = np.arange(first * block_size, seq_len, block_size)
        ids.append(table[first : first + len(begins)].astype(np.int64))
        tokens.append(np.minimum(seq_len - begins, block_size))
    every = np.concatenate(ids)
    once = np.sort(np.unique(every, return_index=True)[1])
    return every[once], np.concatenate(tokens)[once]

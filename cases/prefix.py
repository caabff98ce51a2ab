"""Shared prefixes: block tables of many sequences that begin with the same blocks, as a system prompt or a tree of samples
makes them. Who reads those blocks once moves fewer bytes; who does not is right all the same."""

from __future__ import annotations

from cases import models
from cases.lengths import ragged
from harness.ops.attention import AttentionCase

Prefix = tuple[tuple[int, int], ...]


def with_first(count: int, tokens: int) -> Prefix:
    """`count` sequences that all begin with the same tokens."""
    return ((0, 0), *((0, tokens),) * (count - 1))


def groups(count: int, size: int, tokens: int) -> Prefix:
    """`count` groups of `size` neighbours, each with a prefix of its own."""
    return tuple((seq - seq % size, tokens if seq % size else 0) for seq in range(count * size))


def levels(count: int, size: int, outer: int, inner: int) -> Prefix:
    """As `groups`, of which all begin with the same `outer` tokens; members of a group share `inner` altogether."""
    return tuple(
        (seq - seq % size, inner) if seq % size else (0, outer if seq else 0) for seq in range(count * size)
    )


def _of(name: str, seq_lens: tuple[int, ...], prefix: Prefix, **fields: object) -> AttentionCase:
    return models.LLAMA3_8B.attention(f"prefix.{name}", seq_lens, prefix=prefix, **fields)


# A long document and 64 questions: of 33024 tokens each 256 are its own.
DOCUMENT = _of("64x32768_of_33024", (33024,) * 64, with_first(64, 32768))
PREFIXES = (
    DOCUMENT,
    _of("256x2048_of_2304", (2304,) * 256, with_first(256, 2048)),
    _of("16x8192_all", (8192,) * 16, with_first(16, 8192)),
    _of("8_groups_of_8x8192", (8448,) * 64, groups(8, 8, 8192)),
    _of("levels.64x2048_8192", tuple(8192 + n for n in ragged(64, 1, 512, seed=6)), levels(8, 8, 2048, 8192)),
    # Little to gain, and nothing to lose: a short prefix, two of many, none that overlap in time.
    _of("64x512_of_8192", (8192,) * 64, with_first(64, 512)),
    _of("2_of_64x4096", (4096,) * 64, (*((seq, 0) for seq in range(63)), (7, 4096))),
    # Drafts of several tokens behind one prefix.
    _of("32x8192_of_8448.q4", (8448,) * 32, with_first(32, 8192), q_lens=(4,) * 32),
    _of("64x32768_of_33024.e4m3", (33024,) * 64, with_first(64, 32768), kv_dtype="e4m3"),
)
SMALL = models.QWEN3_0_6B.attention(
    "prefix.qwen3_0_6b.8x512_of_640", (640,) * 8, prefix=with_first(8, 512)
)
PREFIX = (*PREFIXES, SMALL)

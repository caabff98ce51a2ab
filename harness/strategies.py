"""Hypothesis strategies for whole cases: shapes, lengths, layouts of the pool, of all three operators.

What comes first in a list is simpler: a failure is shrunk towards it. Shapes that kernels are compiled for are drawn from
short lists, so that a long run spends its time on kernels and not on compilers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from harness.ops.attention import DTYPES, AttentionCase
from harness.ops.block_copy import BlockCopyCase
from harness.ops.cache_write import CacheWriteCase
from harness.ops.case import Case
from harness.ops.features import KV_DTYPES, KV_SCALES

HEAD_DIMS = (64, 128, 16, 32, 80, 96, 112, 120, 192, 256, 8, 40, 20)
BLOCK_SIZES = (16, 32, 8, 1, 64, 2, 3, 24, 48, 128, 256)
GROUPS = (1, 2, 4, 8, 3, 5, 6, 7, 12, 16)
WINDOWS = (1, 4, 16, 17, 64, 128, 1000)
#: tokens of the longest sequence, enough for several blocks, tiles and splits; query tokens of one; sequences
MAX_SEQ_LEN, MAX_Q_LEN, MAX_SEQS = 2100, 70, 9
#: how often a drawn batch stands in its case, and tokens of its longest sequence where that is more than once
TIMES, MAX_REPEATED = (1, 1, 1, 5), 200


def cases(ops: Sequence[str], max_seq_len: int = MAX_SEQ_LEN) -> st.SearchStrategy[Case]:
    """Cases of the named operators, each called "fuzz.OPERATOR"; with less than MAX_SEQ_LEN they are checked faster."""
    made: dict[str, st.SearchStrategy[Case]] = {
        "attention": attention_cases(max_seq_len), "cache_write": cache_write_cases(), "block_copy": block_copy_cases()
    }  # fmt: skip
    return st.one_of([made[op] for op in ops])


@st.composite
def attention_cases(draw: st.DrawFn, max_seq_len: int = MAX_SEQ_LEN) -> AttentionCase:
    """Decode, chunks of prompts, drafts to verify, and what they have at their edges: empty rows, full blocks, no rows."""
    num_kv_heads, group = draw(st.integers(1, 4)), draw(st.sampled_from(GROUPS))
    head_dim, block_size = draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from(BLOCK_SIZES))
    times = draw(st.sampled_from(TIMES))
    longest = max_seq_len if times == 1 else min(max_seq_len, MAX_REPEATED)
    seq_lens = draw(st.lists(lengths(block_size, longest), max_size=MAX_SEQS)) * times
    q_lens = draw(st.just(()) | st.tuples(*(st.integers(0, 8) | st.integers(0, MAX_Q_LEN) for _ in seq_lens)))
    usual = head_dim**-0.5
    more = draw(st.just({}) | st.just({}) | features(tuple(seq_lens), block_size))
    return AttentionCase(
        name="fuzz.attention",
        num_q_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        seq_lens=tuple(seq_lens),
        q_lens=q_lens,
        dtype=draw(st.sampled_from(DTYPES)),
        pool_slack=draw(st.sampled_from((1.25, 1.0, 8.0))),
        scale=draw(st.none() | st.sampled_from((usual / 2, usual * 2, -usual))),
        **more,
    )


@st.composite
def features(draw: st.DrawFn, seq_lens: tuple[int, ...], block_size: int) -> dict[str, Any]:
    """Some of what a case can ask besides; one in three does, since many entries implement little of it."""
    kv_dtype = draw(st.sampled_from((None, None, *KV_DTYPES)))
    return {
        "window": draw(st.none() | st.sampled_from(WINDOWS) | st.integers(1, 2000)),
        "softcap": draw(st.sampled_from((None, None, 50.0, 5.0))),
        "alibi": draw(st.sampled_from((False, False, True))),
        "sinks": draw(st.sampled_from((False, False, True))),
        "kv_dtype": kv_dtype,
        "kv_scales": draw(st.sampled_from(KV_SCALES)) if kv_dtype else "tensor",
        "prefix": draw(st.just(()) | prefixes(seq_lens, block_size)),
    }


@st.composite
def prefixes(draw: st.DrawFn, seq_lens: tuple[int, ...], block_size: int) -> tuple[tuple[int, int], ...]:
    """For each sequence one before it, and how many of its full blocks it begins with."""
    made = []
    for seq, seq_len in enumerate(seq_lens):
        leader = draw(st.integers(0, seq))
        most = min(seq_len, seq_lens[leader]) // block_size if leader < seq else 0
        made.append((leader, draw(st.integers(0, most)) * block_size))
    return tuple(made)


def lengths(block_size: int, most: int) -> st.SearchStrategy[int]:
    """Tokens of a sequence: few, any, or about a whole number of blocks or of tiles of 64."""

    def about(size: int, at_most: int) -> st.SearchStrategy[int]:
        count, more = st.integers(0, at_most), st.integers(-1, 1)
        return st.builds(lambda count, more: min(max(count * size + more, 0), most), count, more)

    return st.integers(0, 40) | about(block_size, 40) | about(64, 16) | st.integers(0, most)


@st.composite
def cache_write_cases(draw: st.DrawFn) -> CacheWriteCase:
    """New tokens, padding among them, up to every slot of the pool."""
    shape = draw(_pool_shapes())
    slots = shape["num_blocks"] * shape["block_size"]
    num_written, num_padding = draw(st.integers(0, min(slots, 300))), draw(st.integers(0, 20))
    return CacheWriteCase(
        name="fuzz.cache_write",
        num_tokens=num_written + num_padding,
        num_padding=num_padding,
        order=draw(st.sampled_from(("scattered", "runs"))),
        **shape,
    )


@st.composite
def block_copy_cases(draw: st.DrawFn) -> BlockCopyCase:
    """Lists of pairs, chained or not, up to every block of the pool, in one layer or several."""
    shape = draw(_pool_shapes())
    return BlockCopyCase(
        name="fuzz.block_copy",
        num_copies=draw(st.integers(0, shape["num_blocks"] // 2)),
        num_layers=draw(st.integers(1, 4)),
        chained=draw(st.booleans()),
        **shape,
    )


@st.composite
def _pool_shapes(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "num_kv_heads": draw(st.integers(1, 4)),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "block_size": draw(st.sampled_from(BLOCK_SIZES)),
        "num_blocks": draw(st.integers(1, 60)),
        "dtype": draw(st.sampled_from(DTYPES)),
    }

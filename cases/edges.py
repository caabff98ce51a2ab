"""Edges: the smallest inputs on which such kernels have gone wrong, on every length, group, head and block size."""

from __future__ import annotations

from typing import Any

from harness.ops.attention import AttentionCase
from harness.ops.block_copy import BlockCopyCase
from harness.ops.cache_write import CacheWriteCase


def _edge(name: str, seq_lens: tuple[int, ...], **fields: Any) -> AttentionCase:
    """Two KV heads of 128, four query heads, block size 16, f16, unless `fields` say otherwise."""
    fields = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128, "block_size": 16, "dtype": "f16", **fields}
    return AttentionCase(name=f"edges.{name}", seq_lens=seq_lens, **fields)


# Lengths at, before and after each boundary of a block, with an empty sequence and a single token among them.
ALL_LENGTHS = _edge("lengths", (0, 1, 15, 16, 17, 31, 32, 33, 48, 100), dtype="f32")

LENGTHS = (
    ALL_LENGTHS,
    _edge("length_0", (5, 0, 7)),
    _edge("length_0_only", (0, 0)),
    _edge("length_1", (1,), dtype="bf16"),
    _edge("block_boundary", (15, 16, 17), dtype="bf16"),
    _edge("empty_batch", ()),
    _edge("batch_256", tuple(1 + i % 5 for i in range(256)), num_q_heads=2, num_kv_heads=1),
    # The table is as wide as the longest sequence; the others use a sliver of it.
    _edge("wide_table", (1500, 1, 17, 0), dtype="bf16"),
    # More than any one warp, tile or split holds, ending one token into the last block.
    _edge("split_boundary", (1025, 1024, 1023), num_q_heads=2, num_kv_heads=1),
)

# Few heads, small and narrow, so that a CPU reads them at once: what ends at 4096 keys, at 16 bits of a length or a
# position, or in the second round of a loop over splits, shows nowhere above.
LONG = (
    _edge("length_5000_ragged", (5000, 1, 2049, 0, 4097), num_q_heads=2, num_kv_heads=1, head_dim=16),
    _edge("length_40000", (40_000,), head_dim=16, dtype="f32"),
    _edge("length_70000", (70_000,), num_q_heads=1, num_kv_heads=1, head_dim=16, block_size=64, dtype="bf16"),
)

GROUPS = tuple(
    _edge(f"group_{group}", (70, 16), num_q_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    for group, num_kv_heads, dtype in (
        (1, 3, "bf16"), (5, 2, "f16"), (6, 1, "bf16"), (7, 2, "f32"), (8, 2, "bf16"), (12, 1, "f16"), (16, 1, "bf16"),
        (32, 1, "f16"), (71, 1, "f16"),
    )
)

HEAD_DIMS = tuple(
    _edge(f"head_dim_{head_dim}", (37, 16), head_dim=head_dim, dtype=dtype)
    for head_dim, dtype in (
        (16, "f16"), (32, "bf16"), (64, "f16"), (80, "f16"), (96, "bf16"), (112, "f32"), (120, "f16"), (192, "bf16"),
        (256, "bf16"),
    )
)

BLOCK_SIZES = tuple(
    _edge(f"block_size_{size}", (size - 1, size, size + 1, 3 * size), block_size=size, dtype=dtype)
    for size, dtype in (
        (1, "f16"), (2, "bf16"), (8, "bf16"), (24, "f16"), (32, "f32"), (48, "f16"), (64, "bf16"), (128, "f16"),
        (256, "bf16"),
    )
)

QUERIES = (
    # Token i sees keys <= seq_len - q_len + i, each sequence with a q_len of its own.
    _edge("q_len_ragged", (5, 1, 64, 17, 33), q_lens=(3, 1, 5, 2, 33)),
    # Rows 0 and 1 see no key: out 0, lse -inf.
    _edge("q_len_over_seq_len", (2, 40), q_lens=(4, 3), dtype="bf16"),
    _edge("q_len_over_seq_len_0", (0, 9), q_lens=(3, 2), dtype="f32"),
    # A sequence without a query token, first, in the middle and last.
    _edge("q_len_0", (5, 9, 0, 33, 12), q_lens=(0, 2, 0, 1, 0)),
    _edge("q_len_0_only", (5, 9), q_lens=(0, 0)),
    _edge("prefill_chunk", (96, 17, 130), q_lens=(32, 17, 3), dtype="bf16"),
    _edge("prefill_chunk_f32", (48, 21), q_lens=(40, 5), num_q_heads=6, block_size=8, dtype="f32"),
    _edge("prefill_head_dim_80", (50, 3), q_lens=(20, 3), head_dim=80, block_size=24),
    _edge("prefill_group_7", (35, 20), q_lens=(9, 20), num_q_heads=14),
)

# One token before, on and after the ends of tiles of 64 to 512, of three splits of 512, and more sequences than a warp has
# lanes, no two neighbours alike; three query heads of one KV head, a scale of its own.
TILES = _edge(
    "tiles",
    (
        129, 3, 63, 0, 65, 511, 2, 64, 128, 1, 257, 17, 127, 1536, 5, 193, 255, 4, 512, 31, 191, 256, 7, 513, 33, 192, 6, 8,
        385, 9, 47, 10, 49, 11, 66, 12, 130, 13, 62, 0, 15, 126,
    ),
    num_q_heads=3, num_kv_heads=1, head_dim=64, block_size=32, dtype="bf16", scale=0.2,
)  # fmt: skip

OTHERS = (
    TILES,
    # Over one or two KV heads many a wrong map of heads is right by chance.
    _edge("kv_heads_8", (70, 16, 33), num_q_heads=24, num_kv_heads=8, head_dim=64, dtype="bf16"),
    _edge("scale", (70,), scale=0.5),
    _edge("pool_mostly_free", (33, 90), pool_slack=8.0, dtype="bf16"),
    # Nothing to spare but the two blocks that no sequence owns.
    _edge("pool_full", (33, 90), pool_slack=1.0),
)

WRITES = (
    CacheWriteCase(name="edges.write_nothing", num_kv_heads=2, head_dim=128, block_size=16, num_tokens=0, num_blocks=8),
    CacheWriteCase(
        name="edges.write_padding_only", num_kv_heads=2, head_dim=128, block_size=16, num_tokens=9, num_padding=9, num_blocks=8
    ),
    CacheWriteCase(
        name="edges.write_full_pool", num_kv_heads=2, head_dim=64, block_size=16, num_tokens=128, num_blocks=8, dtype="f16"
    ),
    CacheWriteCase(
        name="edges.write_block_size_1", num_kv_heads=1, head_dim=96, block_size=1, num_tokens=19, num_padding=2, num_blocks=40,
        dtype="f32",
    ),
    CacheWriteCase(
        name="edges.write_block_size_24", num_kv_heads=3, head_dim=80, block_size=24, num_tokens=50, num_padding=1,
        num_blocks=8, order="runs", dtype="f16",
    ),
)

COPIES = (
    BlockCopyCase(name="edges.copy_nothing", num_kv_heads=2, head_dim=128, block_size=16, num_copies=0, num_blocks=8),
    BlockCopyCase(name="edges.copy_one", num_kv_heads=1, head_dim=80, block_size=24, num_copies=1, num_blocks=8, dtype="f16"),
    BlockCopyCase(
        name="edges.copy_block_size_1", num_kv_heads=2, head_dim=64, block_size=1, num_copies=7, num_layers=3, num_blocks=32,
        dtype="f32",
    ),
    BlockCopyCase(
        name="edges.copy_chained", num_kv_heads=2, head_dim=128, block_size=16, num_copies=12, num_layers=2, num_blocks=24,
        chained=True,
    ),
)

EDGES = (*LENGTHS, *LONG, *GROUPS, *HEAD_DIMS, *BLOCK_SIZES, *QUERIES, *OTHERS, *WRITES, *COPIES)

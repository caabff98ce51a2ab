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

# Lengths about a window's own and a block's, a token that it ends before, and the window of one key.
_WINDOW_LENS = (1, 4, 5, 15, 16, 17, 20, 33, 70, 0, 100)
WINDOWS = (
    *(_edge(f"window_{window}", _WINDOW_LENS, window=window, dtype=dtype)
      for window, dtype in ((1, "f16"), (4, "f32"), (16, "bf16"), (17, "f16"), (64, "bf16"))),
    _edge("window_over_all", (5, 33, 64), window=4096),
    _edge("window_q_len_ragged", (70, 33, 100, 16, 3), q_lens=(5, 33, 2, 4, 3), window=9),
    _edge("window_block_size_1", (40, 7), window=8, block_size=1),
    _edge("window_block_size_256", (700, 256, 300), window=100, block_size=256, dtype="bf16"),
    _edge("window_long", (20_000, 3), window=1000, head_dim=16, dtype="bf16"),
)
SCORES = (
    _edge("softcap", (70, 16, 1), softcap=50.0),
    # Scores of a hundred times the cap: exp(2 * score / cap) is beyond every float.
    _edge("softcap_1", (70, 16, 1), softcap=1.0, dtype="bf16"),
    _edge("softcap_prefill", (40, 17), q_lens=(9, 17), softcap=20.0, dtype="f32"),
    _edge("alibi", (70, 16, 1, 300), alibi=True, num_q_heads=8),
    _edge("alibi_group_1", (33, 100), alibi=True, num_q_heads=3, num_kv_heads=3, dtype="f32"),
    _edge("alibi_12_heads", (129, 64), alibi=True, num_q_heads=12, dtype="bf16"),
    _edge("alibi_q_len", (50, 33), q_lens=(7, 33), alibi=True),
    _edge("sinks", (70, 16, 1, 1500), sinks=True, num_q_heads=16),
    _edge("sinks_group_5", (70, 17), sinks=True, num_q_heads=5, num_kv_heads=1, dtype="f32"),
    # Rows that see no key have the sink for their LSE.
    _edge("sinks_without_keys", (0, 2, 40), q_lens=(2, 4, 3), sinks=True, dtype="bf16"),
    _edge("scores_all", (70, 300, 17), softcap=30.0, alibi=True, sinks=True, window=50, num_q_heads=8),
    _edge("scores_all_q_len", (70, 120, 17), q_lens=(8, 40, 1), softcap=30.0, alibi=True, sinks=True, window=33, dtype="f32"),
)
FP8 = (
    *(_edge(f"{kv_dtype}_{kv_scales}", (70, 16, 1, 1025), kv_dtype=kv_dtype, kv_scales=kv_scales, dtype=dtype)
      for kv_dtype, kv_scales, dtype in (
          ("e4m3", "tensor", "bf16"), ("e4m3", "head", "f16"), ("e5m2", "tensor", "f16"), ("e5m2", "head", "bf16"))),
    _edge("e4m3_f32", (33, 90), kv_dtype="e4m3", dtype="f32"),
    _edge("e4m3_head_dim_80", (37, 16), kv_dtype="e4m3", head_dim=80),
    _edge("e4m3_block_size_24", (49, 24), kv_dtype="e4m3", block_size=24, dtype="bf16"),
    _edge("e4m3_prefill", (96, 17), q_lens=(32, 17), kv_dtype="e4m3", kv_scales="head", dtype="bf16"),
    _edge("e4m3_window_sinks", (150, 33), kv_dtype="e4m3", window=40, sinks=True, dtype="bf16"),
    _edge("e4m3_scores_all", (150, 33), kv_dtype="e4m3", kv_scales="head", window=40, sinks=True, alibi=True, softcap=30.0),
)
PREFIXES = (
    _edge("prefix", (100, 70, 64), prefix=((0, 0), (0, 64), (0, 48))),
    _edge("prefix_all_shared", (64, 64, 64), prefix=((0, 0), (0, 64), (0, 64)), dtype="bf16"),
    _edge("prefix_levels", (200, 150, 97, 40), prefix=((0, 0), (0, 64), (1, 96), (0, 16)), dtype="bf16"),
    _edge("prefix_groups", (70, 40, 90, 33), prefix=((0, 0), (1, 0), (0, 64), (1, 32))),
    # Four of one length, two of which share: only block ids tell which.
    _edge("prefix_of_two", (64, 64, 64, 64), prefix=((0, 0), (1, 0), (2, 0), (1, 48))),
    _edge("prefix_window", (100, 200, 64), prefix=((0, 0), (0, 96), (0, 48)), window=40),
    _edge("prefix_q_len", (100, 70, 64), q_lens=(3, 5, 64), prefix=((0, 0), (0, 64), (0, 48))),
    _edge("prefix_e4m3_sinks", (100, 70, 64), prefix=((0, 0), (0, 64), (0, 48)), kv_dtype="e4m3", sinks=True, dtype="bf16"),
)
FEATURES = (*WINDOWS, *SCORES, *FP8, *PREFIXES)

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
    CacheWriteCase(
        name="edges.write_e4m3", num_kv_heads=3, head_dim=64, block_size=6, num_tokens=50, num_padding=3, num_blocks=16,
        kv_dtype="e4m3", kv_scales="head",
    ),
    CacheWriteCase(
        name="edges.write_e5m2_f32", num_kv_heads=2, head_dim=128, block_size=16, num_tokens=19, num_blocks=8, dtype="f32",
        kv_dtype="e5m2",
    ),
)

COPIES = (
    BlockCopyCase(name="edges.copy_nothing", num_kv_heads=2, head_dim=128, block_size=16, num_copies=0, num_blocks=8),
    BlockCopyCase(name="edges.copy_one", num_kv_heads=1, head_dim=80, block_size=24, num_copies=1, num_blocks=8, dtype="f16"),
    BlockCopyCase(
        name="edges.copy_block_size_1", num_kv_heads=2, head_dim=64, block_size=1, num_copies=7, num_layers=3, num_blocks=32,
        dtype="f32",
    ),
    BlockCopyCase(name="edges.copy_e4m3", num_kv_heads=3, head_dim=80, block_size=24, num_copies=3, num_blocks=8, dtype="e4m3"),
    BlockCopyCase(
        name="edges.copy_chained", num_kv_heads=2, head_dim=128, block_size=16, num_copies=12, num_layers=2, num_blocks=24,
        chained=True,
    ),
)

EDGES = (*LENGTHS, *LONG, *GROUPS, *HEAD_DIMS, *BLOCK_SIZES, *QUERIES, *OTHERS, *FEATURES, *WRITES, *COPIES)

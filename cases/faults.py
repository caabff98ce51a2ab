"""Public faults: the smallest input that shows each. docs/faults.md says of every known one how it is tried.

Numbers in brackets are the rows of that page. Inputs are poisoned whatever the case: every slot and table entry that no
sequence owns (harness/hazards.py), so that a case here is a shape, and the poison is where the fault would read.
"""

from __future__ import annotations

from typing import Any

from harness.ops.attention import AttentionCase
from harness.ops.block_copy import BlockCopyCase
from harness.ops.cache_write import CacheWriteCase


def _fault(name: str, seq_lens: tuple[int, ...], **fields: Any) -> AttentionCase:
    """One query and one KV head of 64, block size 16, f16, unless `fields` say otherwise."""
    fields = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 64, "block_size": 16, "dtype": "f16", **fields}
    return AttentionCase(name=f"faults.{name}", seq_lens=seq_lens, **fields)


TAILS = (
    # [1, 5, 6] vllm#641, vllm#936, vllm-ascend#10276: 0 * NaN of slots 5..15 reaches the output.
    _fault("tail_of_block", (5,)),
    # [2] flash-attention#1745, #2374: NaN behind seqused; kBlockN of 64, 128 and 176, one less and one more.
    _fault("tail_of_page_128", (1, 63, 65, 127, 129, 175, 177), head_dim=128, block_size=128),
    # [3] vllm#47305: tiles of 32 over blocks of 16; the second half of the tile is not there.
    _fault("tail_of_tile_32", (17,), dtype="bf16"),
    # [4] flashinfer#941, #1018: the last tile of keys is not full, page 1 and page 16.
    _fault("tail_of_tile_page_1", (63, 95, 127), head_dim=128, block_size=1),
    _fault("tail_of_tile_page_16", (63, 95, 127), head_dim=128),
)

# Few tokens in a pool so large that some of their blocks lie behind the limit, in every family of inputs. The large
# pools need a GPU that holds them (10 and 18 GB of cache, times two families, times the layouts that are checked).
_WIDE = {"num_q_heads": 8, "num_kv_heads": 8, "head_dim": 128}
OFFSETS = (
    # [8] vllm#1486: 2^31 elements, in blocks of 16384.
    _fault("over_2_31_elements", (2000,), **_WIDE, pool_slack=1200.0),
    # [9] vllm#47671: the same with block ids below 5000: each factor is small, the product is not.
    _fault("over_2_31_large_blocks", (11000,), **{**_WIDE, "head_dim": 256}, block_size=256, pool_slack=110.0),
    # [11] flashinfer#3130, #3136: an unsigned 32-bit product wraps.
    _fault("over_2_32_elements", (2000,), **_WIDE, dtype="bf16", pool_slack=2200.0),
    # Ids of 16 bits, signed or not: a pool of 9 MB.
    _fault("block_ids_over_65535", (100, 3, 57), head_dim=32, block_size=1, pool_slack=438.0),
    # A grid's y and z end at 65535. (Too large for a CPU, where one program after another would take minutes.)
    _fault("seqs_over_65535", tuple(1 + i % 3 for i in range(65600)), num_q_heads=2),
)

EMPTY = (
    # [13] vllm#28181, flashinfer#4051: a cut for the longest sequence leaves splits of the others empty.
    _fault("empty_splits", (1, 0, 4096, 17), num_q_heads=2),
    # [14, 16] flashinfer#363, #440, #4975, flash-attention#978: an empty row between two others.
    _fault("length_0_between", (5, 0, 7), dtype="bf16"),
    # [15] flashinfer#4452: q_len over kv_len; rows 0 and 1 see no key.
    _fault("query_over_keys", (2,), q_lens=(4,)),
    # [19] flash-attention#2503, vllm#38436: nothing to do.
    _fault("no_sequences", ()),
    _fault("no_query_tokens", (5, 3), q_lens=(0, 0)),
    # [28] flashinfer#641, #726: batches padded to 8, with 1, 3, 5 and 7 real rows.
    *(
        _fault(f"padded_batch_{rows}_of_8", (*(300, 1, 64, 17, 129, 16, 33)[:rows], *(0,) * (8 - rows)), num_q_heads=2)
        for rows in (1, 3, 5, 7)
    ),
)

SPLITS = (
    # [20] flashinfer#1661: three splits and more, head_dim 256; the merge lacks a barrier.
    _fault("merge_head_dim_256", (1000, 200), num_q_heads=2, head_dim=256),
    # [23] vllm-project/flash-attention#87: LSE of packed heads, split.
    _fault("lse_of_packed_heads", (700,), num_q_heads=8, num_kv_heads=2),
    # [30] sglang#2465, flash-attention#2550: lengths at which cuts by 2, 3, 7, 16 and 33 leave odd ends.
    _fault("split_lengths", (1, 63, 64, 65, 1000), dtype="bf16"),
    # [47] vllm#905, #1510: a row of scores that fits no shared memory.
    _fault("context_16384", (16384,), num_q_heads=2),
)

TABLES = (
    # [35, 36] onnxruntime#32391, vllm#42494: the entry behind a block that is just full must not be looked at.
    _fault("unused_entries", (16, 17, 32), dtype="bf16"),
    # [45] flashinfer#3022, TRT-LLM#17964: head_dim 256 with pages under 64 reads another page's V.
    _fault("head_dim_256_page_16", (100, 31), head_dim=256, dtype="bf16"),
    _fault("head_dim_256_page_32", (100, 31), head_dim=256, block_size=32, dtype="bf16"),
    # [49] flashinfer#3219, vllm-ascend#14038: page ids that do not rise. All tables are shuffled; this one is long.
    _fault("scattered_pages", (900,), block_size=2),
)

# [40, 41] flashinfer#996, #2684, #4316, #3563, b12x#24 and others: a group that nobody instantiated, rows past 8 dropped.
GROUPS = tuple(
    _fault(f"heads_{num_q_heads}_{num_kv_heads}", (33, 16), num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=128)
    for num_q_heads, num_kv_heads in (
        (5, 1), (6, 1), (7, 1), (12, 1), (28, 4), (24, 4), (16, 1), (32, 1), (64, 1), (71, 1),
    )
)

# [43] vllm#302, #1455, #3952, flashinfer#142
HEAD_DIMS = tuple(
    _fault(f"head_dim_{head_dim}", (37,), head_dim=head_dim, num_q_heads=2) for head_dim in (80, 96, 112, 120, 192, 256, 512)
)

# [46] vllm#38502, #42510, flash-attention#824, #1579, #1627
BLOCK_SIZES = tuple(
    _fault(f"block_size_{size}", (size + 1, 2 * size), head_dim=128, block_size=size)
    for size in (1, 2, 8, 16, 24, 48, 64, 96, 128, 256, 512, 2048)
)

QUERIES = (
    # [56] aiter#4290, hyprstream#1521: token i sees keys <= kv_len - q_len + i.
    _fault("causal_offset", (5,), q_lens=(3,)),
    # [57] transformers#48296: the first chunk has nothing in the cache and is causal all the same.
    _fault("causal_first_chunk", (33, 16), q_lens=(33, 16), dtype="bf16"),
)


MASKS = (
    # [42] flashinfer#4525: a group that is no multiple of 8, its sinks at the end of their allocation.
    _fault("sinks_group_5", (33, 16), num_q_heads=5, head_dim=128, sinks=True),
    # [50] sglang#32902: a window that begins in the middle of a page.
    _fault("window_64_page_16", (100, 70), window=64),
    # [51] vllm#945, #496: the last key has no bias; heads of a group have slopes of their own.
    _fault("alibi_heads", (3, 1), num_q_heads=4, num_kv_heads=2, alibi=True),
    # [52] zml#763, vllm#4380: one key before the window, on its edge, and behind it.
    _fault("window_4", (3, 4, 5, 6), window=4),
    # [53] tt-metal#30362, vllm#4768: what lies before the window is poison.
    _fault("window_16_of_100", (100,), window=16, dtype="bf16"),
    # [54] flashinfer#350: three keys of a tile, and a cap at which a masked one would count.
    _fault("softcap_1", (3,), softcap=1.0),
    # [55] vllm-metal#665, flashinfer#3890: with and without splits, past a chunk.
    _fault("softcap_split", (65, 4097), softcap=30.0),
    # Sinks belong to the whole row, however it is split; a row without keys has nothing else.
    _fault("sinks_split", (4097, 1, 0), num_q_heads=2, sinks=True),
    # Every token of a draft has a window of its own, and so has a first chunk.
    _fault("window_draft", (40, 9), q_lens=(5, 9), window=8),
)

FP8 = (
    # [58] flashinfer#1023, #4979
    _fault("fp8_scales", (5,), kv_dtype="e4m3"),
    # [59] sglang#18904: a chunk over what was cached, all of it quantised.
    _fault("fp8_cached_chunk", (48,), q_lens=(16,), kv_dtype="e4m3", dtype="bf16"),
    # [60] sglang#20705, TRT-LLM#2699: four scales, no two alike.
    _fault("fp8_scales_of_heads", (33, 17), num_q_heads=4, num_kv_heads=2, kv_dtype="e4m3", kv_scales="head"),
    # The format with infinities: what a slot must not be read for is among them.
    _fault("fp8_e5m2", (5, 33), kv_dtype="e5m2"),
)

PREFIXES = (
    # [62] vllm#55227, #23130: equal lengths, some blocks referenced twice, and two that really share.
    _fault("prefix_of_some", (64,) * 8, prefix=(*((seq, 0) for seq in range(6)), (5, 48), (2, 16))),
    # All of a sequence is another's; nothing of its own is left to attend to.
    _fault("prefix_of_all", (64, 64, 48), prefix=((0, 0), (0, 64), (0, 48))),
)


def _write(name: str, **fields: Any) -> CacheWriteCase:
    fields = {"num_kv_heads": 2, "head_dim": 64, "block_size": 16, "num_blocks": 8, "dtype": "f16", **fields}
    return CacheWriteCase(name=f"faults.{name}", **fields)


def _copy(name: str, **fields: Any) -> BlockCopyCase:
    fields = {"num_kv_heads": 2, "head_dim": 64, "block_size": 16, "num_blocks": 16, "dtype": "f16", **fields}
    return BlockCopyCase(name=f"faults.{name}", **fields)


_WIDE_CACHE = {"num_kv_heads": 8, "head_dim": 128, "order": "scattered"}
WRITES = (
    # [58] of the write: divided by its scale, the too large as the largest.
    _write("write_fp8_scales", num_tokens=20, kv_dtype="e4m3", kv_scales="head"),
    # [37] vllm-ascend#3482, #11774: a buffer of 8 slots in a step of 5 tokens.
    _write("write_5_of_8", num_tokens=8, num_padding=3),
    # [39] torch's FlexAttention `assign`: -1 as an index is the end of the cache, here full of other tokens.
    _write("write_padding_full_pool", num_tokens=129, num_padding=1),
    # [8, 11] the same offsets, written.
    _write("write_over_2_31_elements", num_tokens=2000, num_blocks=144000, **_WIDE_CACHE),
    _write("write_over_2_32_elements", num_tokens=2000, num_blocks=268500, **_WIDE_CACHE, dtype="bf16"),
    _write("write_block_ids_over_65535", num_tokens=200, num_kv_heads=1, head_dim=32, block_size=1, num_blocks=70000),
    _write("write_tokens_over_65535", num_tokens=65600, num_kv_heads=1, head_dim=16, num_blocks=200000),
)
COPIES = (
    # Copies of a list run at once, though a later one reads what an earlier one wrote.
    _copy("copy_chained", num_copies=8, chained=True),
    _copy("copy_over_2_31_elements", num_kv_heads=8, head_dim=128, num_copies=200, num_blocks=144000),
    _copy("copy_block_ids_over_65535", num_kv_heads=1, head_dim=32, block_size=1, num_copies=500, num_blocks=70000),
)

FAULTS = (
    *TAILS, *OFFSETS, *EMPTY, *SPLITS, *TABLES, *GROUPS, *HEAD_DIMS, *BLOCK_SIZES, *QUERIES, *MASKS, *FP8,
    *PREFIXES, *WRITES, *COPIES,
)

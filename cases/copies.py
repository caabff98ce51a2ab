"""Block copies: copy-on-write moves a few blocks of every layer, defragmentation and swaps move many."""

from __future__ import annotations

from cases import models

# Copy-on-write: one block a fork, all layers at once.
FEW = models.LLAMA3_8B.copy("copy.llama3_8b.4", 4)
MANY = models.LLAMA3_8B.copy("copy.llama3_8b.256", 256)
# A source that an earlier pair of the list has written: order counts.
CHAINED = models.LLAMA3_8B.copy("copy.llama3_8b.64_chained", 64, chained=True)
ONE_LAYER = models.LLAMA3_8B.copy("copy.llama3_8b.512.one_layer", 512, num_layers=1, num_blocks=2048)

# Caches of 67 MB and less, for a machine without a GPU.
SMALL = models.QWEN3_0_6B.copy("copy.qwen3_0_6b.16.four_layers", 16, num_layers=4, num_blocks=256)
SMALL_CHAINED = models.QWEN3_0_6B.copy(
    "copy.qwen3_0_6b.16_chained.two_layers", 16, num_layers=2, num_blocks=64, chained=True
)

SMOKE = models.QWEN3_0_6B.copy("copy.qwen3_0_6b.6.two_layers", 6, num_layers=2, num_blocks=32)
SMOKE_CHAINED = models.QWEN3_0_6B.copy(
    "copy.qwen3_0_6b.9_chained.bs8", 9, num_layers=2, block_size=8, num_blocks=32, chained=True
)

FP8 = models.LLAMA3_8B.copy("copy.llama3_8b.64.e4m3", 64, dtype="e4m3")

SHAPES = (
    models.GPT_OSS.copy("copy.gpt_oss.32", 32),
    models.GEMMA2_9B.copy("copy.gemma2_9b.32", 32, num_blocks=512),
    models.QWEN3_0_6B.copy("copy.qwen3_0_6b.16.f32", 16, num_layers=2, num_blocks=128, dtype="f32"),
)

BLOCK_SIZE = tuple(
    models.QWEN3_0_6B.copy(f"copy.qwen3_0_6b.8.bs{size}", 8, num_layers=2, block_size=size, num_blocks=64)
    for size in (1, 8, 24, 64, 256)
)

COPIES = (SMALL, SMALL_CHAINED, FEW, MANY, CHAINED, ONE_LAYER, *SHAPES, FP8)

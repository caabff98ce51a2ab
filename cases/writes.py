"""Cache writes: a decode step scatters one token a sequence, a prefill writes runs of them."""

from __future__ import annotations

from cases import models

# One token a sequence, each into a block of its own choosing.
DECODE = tuple(models.LLAMA3_8B.write(f"write.decode.llama3_8b.{batch}", batch) for batch in (1, 4, 16, 64, 256))
DECODE_64, DECODE_256 = DECODE[3], DECODE[4]

# A prompt's tokens in order, through shuffled blocks of a pool twice their size.
PREFILL = tuple(
    models.LLAMA3_8B.write(f"write.prefill.llama3_8b.{tokens}", tokens, order="runs", num_blocks=tokens // 8)
    for tokens in (2048, 4096, 8192, 16384)
)
PREFILL_2048, PREFILL_16384 = PREFILL[0], PREFILL[3]

# A step captured for 256 sequences, replayed for fewer: the others are padding.
PADDED = models.LLAMA3_8B.write("write.decode.llama3_8b.256_padded", 256, num_padding=77)

SHAPES = (
    models.GPT_OSS.write("write.decode.gpt_oss.128", 128),
    models.GEMMA2_9B.write("write.decode.gemma2_9b.64", 64),
    models.LLAMA_7B.write("write.prefill.llama_7b.4096", 4096, order="runs"),
    models.QWEN3_0_6B.write("write.decode.qwen3_0_6b.64.f32", 64, dtype="f32"),
    models.QWEN3_0_6B.write("write.prefill.qwen3_0_6b.1024.f16", 1024, order="runs", dtype="f16"),
)

# Into a quantised cache: what was 16 bits is divided by its scale and rounded to 8.
FP8 = (
    models.LLAMA3_8B.write("write.decode.llama3_8b.64.e4m3", 64, kv_dtype="e4m3"),
    models.LLAMA3_8B.write(
        "write.prefill.llama3_8b.8192.e4m3", 8192, order="runs", num_blocks=1024, kv_dtype="e4m3", kv_scales="head"
    ),
    models.GPT_OSS.write("write.decode.gpt_oss.128.e5m2", 128, kv_dtype="e5m2", dtype="f16"),
)

BLOCK_SIZE = tuple(
    models.LLAMA3_8B.write(
        f"write.prefill.llama3_8b.1000.bs{size}", 1000, order="runs", block_size=size, num_blocks=-(-2000 // size) + 2
    )
    for size in (1, 8, 24, 32, 64, 128, 256)
)

SMALL = models.QWEN3_0_6B.write("write.qwen3_0_6b.48_padded", 48, num_padding=5, num_blocks=64)
SMOKE_RUNS = models.QWEN3_0_6B.write("write.qwen3_0_6b.100_runs.f16", 100, order="runs", num_blocks=32, dtype="f16")

WRITES = (SMALL, *DECODE, PADDED, *PREFILL, *SHAPES)

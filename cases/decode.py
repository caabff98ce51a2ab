"""Decode on real model shapes: one new token a sequence, batch 1 to 256, context 512 to 131072."""

from __future__ import annotations

from cases import models
from cases.lengths import log_normal, ragged

BLOCK_SIZES = (1, 8, 16, 24, 32, 64, 128, 256)

# A few thousand tokens and heads: also Triton's interpreter answers in a second.
SMOKE_QWEN3_0_6B = models.QWEN3_0_6B.attention("decode.qwen3_0_6b.200_17", (200, 17))
SMOKE_GPT_OSS_F16 = models.GPT_OSS.attention("decode.gpt_oss.130_1.f16", (130, 1), dtype="f16")
SMOKE_GEMMA2_9B = models.GEMMA2_9B.attention("decode.gemma2_9b.33_100.bs32", (33, 100), block_size=32)

# A machine without a GPU measures these: 4 to 17 MB of K and V.
QWEN3_0_6B_SMALL = models.QWEN3_0_6B.decode(4, 1024)
LLAMA3_8B_SINGLE = models.LLAMA3_8B.decode(1, 4096)
GPT_OSS_SMALL = models.GPT_OSS.decode(4, 1024, suffix=".f16", dtype="f16")
GEMMA2_9B_SMALL = models.GEMMA2_9B.decode(2, 1024)
QWEN3_0_6B_RAGGED_F16 = models.QWEN3_0_6B.attention(
    "decode.qwen3_0_6b.8_ragged.bs32.f16", ragged(8, 1, 1024, seed=1), block_size=32, dtype="f16"
)
QWEN3_0_6B_F32 = models.QWEN3_0_6B.decode(4, 512, suffix=".f32", dtype="f32")
SMALL = (
    QWEN3_0_6B_SMALL, LLAMA3_8B_SINGLE, GPT_OSS_SMALL, GEMMA2_9B_SMALL, QWEN3_0_6B_RAGGED_F16, QWEN3_0_6B_F32,
)

# The Ascend article's own case.
LLAMA_7B_ASCEND = models.LLAMA_7B.decode(16, 2048)

# What a server holds: 0.5 to 2 GB of K and V in one layer.
LLAMA3_70B_SERVED = models.LLAMA3_70B.decode(32, 4096)
GPT_OSS_SERVED = models.GPT_OSS.decode(64, 8192)
GEMMA2_9B_SERVED = models.GEMMA2_9B.decode(32, 4096)
SERVED = (
    models.QWEN3_0_6B.decode(256, 1024),
    models.QWEN3_1_7B.decode(128, 2048),
    models.QWEN3_8B.decode(64, 4096),
    models.QWEN3_32B.decode(32, 8192),
    models.QWEN3_30B_A3B.decode(64, 8192),
    models.LLAMA3_8B.decode(128, 2048),
    LLAMA3_70B_SERVED,
    LLAMA_7B_ASCEND,
    GPT_OSS_SERVED,
    GEMMA2_9B_SERVED,
    models.GEMMA2_27B.decode(32, 4096),
)

# One user: start-up and merge latency rule. One model for each set of heads.
SINGLE = tuple(
    model.decode(1, 8192)
    for model in (
        models.QWEN3_1_7B, models.QWEN3_8B, models.QWEN3_30B_A3B, models.LLAMA3_70B, models.LLAMA_7B, models.GPT_OSS,
        models.GEMMA2_9B, models.GEMMA2_27B,
    )
)

# As requests come: every length of its own.
RAGGED = (
    models.QWEN3_8B.attention("decode.qwen3_8b.64_ragged", ragged(64, 1, 8192, seed=2)),
    models.LLAMA3_8B.attention("decode.llama3_8b.256_ragged", ragged(256, 128, 4096, seed=3)),
    models.LLAMA3_70B.attention("decode.llama3_70b.16_ragged", ragged(16, 1024, 32768, seed=4)),
    models.GPT_OSS.attention("decode.gpt_oss.128_ragged", ragged(128, 1, 4096, seed=5)),
)

# One long sequence among short ones: whoever draws it finishes last.
STRAGGLER = models.LLAMA3_8B.attention("decode.llama3_8b.straggler", (32768, *(64,) * 15))
# The same at the end of a large batch, where a scheduler that deals in order meets it last.
STRAGGLER_LAST = models.QWEN3_32B.attention("decode.qwen3_32b.straggler_last", (*(256,) * 127, 131072))
# One long sequence in the middle of 255 that a block or four hold: who splits by sequences leaves all SMs but one idle.
ONE_OF_256 = models.LLAMA3_8B.attention("decode.llama3_8b.one_64k_of_256", (*(64,) * 128, 65536, *(64,) * 127))
# As requests come: as many below 1024 tokens as above, one in six beyond 2784, the longest 18345.
LOG_NORMAL = models.LLAMA3_8B.attention("decode.llama3_8b.log_normal", log_normal(256, median=1024, sigma=1.0, seed=1))
SKEWED = (STRAGGLER, STRAGGLER_LAST, ONE_OF_256, LOG_NORMAL)

# More tokens, in two ways: longer sequences, and more of them.
CONTEXT = (
    *(models.LLAMA3_8B.decode(1, 512 << i) for i in range(9)),
    *(models.LLAMA3_8B.decode(16, 512 << i) for i in range(7)),
    *(models.LLAMA3_8B.decode(batch, 2048) for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
)

# The same tokens in blocks of every size; the small twins run on a CPU too.
BLOCK_SIZE = (
    *(models.LLAMA3_8B.decode(16, 4096, suffix=f".bs{size}", block_size=size) for size in BLOCK_SIZES),
    *(models.QWEN3_0_6B.decode(2, 1000, suffix=f".bs{size}", block_size=size) for size in BLOCK_SIZES),
)

# The other 16-bit type, and the exact one, at a size that a GPU feels.
DTYPES = (
    models.LLAMA3_8B.decode(32, 4096, suffix=".f16", dtype="f16"),
    models.LLAMA3_8B.decode(16, 4096, suffix=".f32", dtype="f32"),
)

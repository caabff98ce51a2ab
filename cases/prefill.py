"""Several query tokens a sequence: prefill in chunks, verification of drafts, and batches that mix them with decode."""

from __future__ import annotations

from cases import models

SMOKE_MIXED = models.QWEN3_0_6B.attention("mixed.qwen3_0_6b.chunk24", (60, 33, 5), q_lens=(24, 1, 5))

# A chunk of a prompt over what is cached already, beside three sequences that decode.
MIXED_SMALL = models.QWEN3_0_6B.attention(
    "mixed.qwen3_0_6b.chunk128", (640, 700, 33, 1), q_lens=(128, 1, 1, 1)
)
# The first chunk sees only itself.
FIRST_CHUNK_SMALL = models.QWEN3_0_6B.attention("prefill.qwen3_0_6b.256_of_256", (256,), q_lens=(256,))

CHUNKED = models.LLAMA3_8B.attention("prefill.llama3_8b.512_of_8192", (8192,), q_lens=(512,))
CHUNKED_2048 = models.LLAMA3_8B.attention("prefill.llama3_8b.2048_of_10240", (10240,), q_lens=(2048,))
CHUNKED_BATCH = models.QWEN3_8B.attention("prefill.qwen3_8b.4x256_of_4096", (4096,) * 4, q_lens=(256,) * 4)
MIXED = models.LLAMA3_8B.attention("mixed.llama3_8b.chunk512", (4096, *(2048,) * 63), q_lens=(512, *(1,) * 63))
# A draft of four tokens is verified in one launch.
VERIFY = models.LLAMA3_70B.attention("verify.llama3_70b.16x4096.q5", (4096,) * 16, q_lens=(5,) * 16)
VERIFY_SMALL = models.QWEN3_0_6B.attention("verify.qwen3_0_6b.4x512.q5", (512,) * 4, q_lens=(5,) * 4)

PREFILL = (MIXED_SMALL, FIRST_CHUNK_SMALL, VERIFY_SMALL, CHUNKED, CHUNKED_2048, CHUNKED_BATCH, MIXED, VERIFY)

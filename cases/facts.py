"""The twelve cases in which FlashAttention, FlashInfer, TensorRT-LLM's and vLLM's kernels were measured side by side.

bf16, head_dim 128, block size 16, one query token a sequence; the letters are those of the published table.
"""

from __future__ import annotations

from harness.ops.attention import AttentionCase

# Two long sequences, sixty of 512 to 4096 tokens with more short ones than long, and two that end inside a block:
# 1.01 GB of K and V.
SKEWED = (65536, 65536, *(512 + 3584 * i * (i + 30) // (59 * 89) for i in range(60)), 300, 77)


def _fact(letter: str, seq_lens: tuple[int, ...], num_q_heads: int, num_kv_heads: int) -> AttentionCase:
    return AttentionCase(
        name=f"facts.{letter}", num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=128, block_size=16,
        seq_lens=seq_lens,
    )


A = _fact("a", (8192,) * 64, 32, 8)
B = _fact("b", (131072,), 32, 8)
C = _fact("c", (1024,) * 256, 32, 8)
D = _fact("d", (4096,) * 16, 32, 32)
E = _fact("e", (2048,) * 8, 32, 8)
F = _fact("f", SKEWED, 32, 8)
G = _fact("g", (8192,) * 32, 64, 8)
H = _fact("h", (2048,) * 128, 16, 8)
I = _fact("i", (8192,) * 32, 32, 2)  # noqa: E741 - the table's letter
J = _fact("j", (2048,), 32, 8)
K = _fact("k", (512,) * 16, 32, 8)
L = _fact("l", (1024,) * 32, 64, 8)

FACTS = (A, B, C, D, E, F, G, H, I, J, K, L)

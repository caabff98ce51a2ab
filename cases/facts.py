"""The twelve cases in which FlashAttention, FlashInfer, TensorRT-LLM's and vLLM's kernels were measured side by side.

bf16, head_dim 128, block size 16, one query token a sequence; the letters are those of the published table.
"""

from __future__ import annotations

import dataclasses

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

# The same with a quantised cache: half the bytes.
E4M3 = tuple(dataclasses.replace(fact, name=f"{fact.name}.e4m3", kv_dtype="e4m3") for fact in FACTS)
# One scale a head, and the other format, at one size.
FP8 = (
    *E4M3,
    dataclasses.replace(A, name="facts.a.e4m3.head", kv_dtype="e4m3", kv_scales="head"),
    dataclasses.replace(A, name="facts.a.e5m2", kv_dtype="e5m2"),
)

# Drafts to verify: each sequence of A, B and G asks for several tokens at once, all of A for as many as it likes.
VERIFY = (
    *(
        dataclasses.replace(fact, name=f"verify.{fact.name}.q{q_len}", q_lens=(q_len,) * fact.num_seqs)
        for fact in (A, B, G) for q_len in (4, 8)
    ),
    dataclasses.replace(A, name="verify.facts.a.q2_8", q_lens=tuple(2 + 5 * seq % 7 for seq in range(64))),
    dataclasses.replace(A, name="verify.facts.a.q4.e4m3", q_lens=(4,) * 64, kv_dtype="e4m3"),
)

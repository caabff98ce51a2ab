"""What `pagedbench ceiling` reads by itself: so many bytes of K and V, in chunks that lie anywhere.

A chunk is what lies together in one cache: in HND a head's tokens of a block, in NHD rows of all heads, 2 KB a token.
"""

from __future__ import annotations

from harness.ops.attention import AttentionCase

TOTALS = tuple(1 << bits for bits in (23, 25, 27, 29, 31))  # bytes of K and V
HND_CHUNKS = tuple(1 << bits for bits in range(10, 16))     # bytes
NHD_CHUNKS = (1 << 11, 1 << 13, 1 << 15)

_ROW_BYTES, _NUM_SEQS = 256, 16  # a head's K or V of one token: head_dim 128 in bf16


def _reads(layout: str, num_kv_heads: int, chunk_bytes: int, total_bytes: int) -> AttentionCase:
    token_bytes = _ROW_BYTES * num_kv_heads
    return AttentionCase(
        name=f"ceiling.{layout}.{chunk_bytes >> 10}kb.{total_bytes // 10**6}mb", num_q_heads=num_kv_heads,
        num_kv_heads=num_kv_heads, head_dim=128, block_size=chunk_bytes // token_bytes,
        seq_lens=(total_bytes // (2 * token_bytes * _NUM_SEQS),) * _NUM_SEQS,
    )


HND = tuple(_reads("hnd", 1, chunk, total) for total in TOTALS for chunk in HND_CHUNKS)
NHD = tuple(_reads("nhd", 8, chunk, total) for total in TOTALS for chunk in NHD_CHUNKS)
CEILINGS = (*HND, *NHD)

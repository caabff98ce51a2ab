"""Attention shapes of public models: heads, head_dim and layers, each from the model's published configuration.

A case of a model is one of its layers; where its layers differ, or do more than softmax(scale * q.k) v, the others have
an entry of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.ops.attention import AttentionCase
from harness.ops.block_copy import BlockCopyCase
from harness.ops.cache_write import CacheWriteCase


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What attention needs to know of a model; `scale` None is head_dim ** -0.5, window to alibi as in AttentionCase."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    def attention(self, name: str, seq_lens: tuple[int, ...], **fields: Any) -> AttentionCase:
        """One layer over `seq_lens`, block size 16 unless `fields` say otherwise."""
        asked = {name: getattr(self, name) for name in ("scale", "window", "softcap", "sinks", "alibi")}
        fields = {"block_size": 16, **asked, **fields}
        return AttentionCase(
            name=name, num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            seq_lens=seq_lens, **fields,
        )

    def decode(self, batch: int, context: int, *, suffix: str = "", **fields: Any) -> AttentionCase:
        """`batch` sequences of `context` tokens, one new token each: decode.MODEL.BATCHxCONTEXT."""
        return self.attention(f"decode.{self.name}.{batch}x{context}{suffix}", (context,) * batch, **fields)

    def write(self, name: str, num_tokens: int, **fields: Any) -> CacheWriteCase:
        """New keys and values of one layer."""
        fields = {"block_size": 16, **fields}
        return CacheWriteCase(
            name=name, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, num_tokens=num_tokens, **fields
        )

    def copy(self, name: str, num_copies: int, **fields: Any) -> BlockCopyCase:
        """Whole blocks of all layers, unless `fields` give fewer."""
        fields = {"block_size": 16, "num_layers": self.num_layers, **fields}
        return BlockCopyCase(
            name=name, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, num_copies=num_copies, **fields
        )


# config.json of Qwen/Qwen3-0.6B, -1.7B, -8B, -32B, -30B-A3B; also tables 1 and 2 of the Qwen3 report, arXiv 2505.09388.
# head_dim stands in the configuration and is not hidden_size / num_attention_heads.
QWEN3_0_6B = Model(name="qwen3_0_6b", num_q_heads=16, num_kv_heads=8, head_dim=128, num_layers=28)
QWEN3_1_7B = Model(name="qwen3_1_7b", num_q_heads=16, num_kv_heads=8, head_dim=128, num_layers=28)
QWEN3_8B = Model(name="qwen3_8b", num_q_heads=32, num_kv_heads=8, head_dim=128, num_layers=36)
QWEN3_32B = Model(name="qwen3_32b", num_q_heads=64, num_kv_heads=8, head_dim=128, num_layers=64)
QWEN3_30B_A3B = Model(name="qwen3_30b_a3b", num_q_heads=32, num_kv_heads=4, head_dim=128, num_layers=48)

# config.json of meta-llama/Meta-Llama-3-8B and -70B (3.1 has the same heads); arXiv 2407.21783, table 3.
LLAMA3_8B = Model(name="llama3_8b", num_q_heads=32, num_kv_heads=8, head_dim=128, num_layers=32)
LLAMA3_70B = Model(name="llama3_70b", num_q_heads=64, num_kv_heads=8, head_dim=128, num_layers=80)

# arXiv 2302.13971, table 2: dimension 4096, 32 heads, 32 layers; no grouping of heads.
LLAMA_7B = Model(name="llama_7b", num_q_heads=32, num_kv_heads=32, head_dim=128, num_layers=32)

# config.json of openai/gpt-oss-120b (20b has 24 layers, the same heads): the shape of a full-attention layer without its
# sinks; its layers as they are, half of them with a window of 128 keys.
GPT_OSS = Model(name="gpt_oss", num_q_heads=64, num_kv_heads=8, head_dim=64, num_layers=36)
GPT_OSS_FULL = dataclasses.replace(GPT_OSS, name="gpt_oss_full", num_layers=18, sinks=True)
GPT_OSS_WINDOW = dataclasses.replace(GPT_OSS_FULL, name="gpt_oss_window", window=128)

# config.json of google/gemma-2-9b and -27b; arXiv 2408.00118, table 1. Scores are scaled by query_pre_attn_scalar ** -0.5,
# which is head_dim in the 9B and 144 in the 27B. First the shapes alone, then the layers with their soft cap of 50, half
# of them with a window of 4096 keys.
GEMMA2_9B = Model(name="gemma2_9b", num_q_heads=16, num_kv_heads=8, head_dim=256, num_layers=42)
GEMMA2_27B = Model(name="gemma2_27b", num_q_heads=32, num_kv_heads=16, head_dim=128, num_layers=46, scale=144**-0.5)
GEMMA2_9B_FULL = dataclasses.replace(GEMMA2_9B, name="gemma2_9b_full", num_layers=21, softcap=50.0)
GEMMA2_9B_WINDOW = dataclasses.replace(GEMMA2_9B_FULL, name="gemma2_9b_window", window=4096)

# arXiv 2310.06825, table 1: 32 heads over 8, a window of 4096 keys in every layer (v0.1).
MISTRAL_7B = Model(name="mistral_7b", num_q_heads=32, num_kv_heads=8, head_dim=128, num_layers=32, window=4096)

# config.json of mosaicml/mpt-7b (d_model 4096, n_heads 32, alibi) and of bigscience/bloom (n_head 112, hidden_size 14336);
# neither groups its heads, and 112 is no power of two, which decides how slopes go on.
MPT_7B = Model(name="mpt_7b", num_q_heads=32, num_kv_heads=32, head_dim=128, num_layers=32, alibi=True)
BLOOM = Model(name="bloom", num_q_heads=112, num_kv_heads=112, head_dim=128, num_layers=70, alibi=True)

MODELS = (
    QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B, QWEN3_32B, QWEN3_30B_A3B,
    LLAMA3_8B, LLAMA3_70B, LLAMA_7B, GPT_OSS, GEMMA2_9B, GEMMA2_27B, GPT_OSS_FULL, GPT_OSS_WINDOW, GEMMA2_9B_FULL,
    GEMMA2_9B_WINDOW, MISTRAL_7B, MPT_7B, BLOOM,
)

"""Shapes of models by name: Qwen's own with random weights, and tiny ones whose greedy tokens differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPES = ("f32", "f16", "bf16")
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "initializer_range": 0.2,
    "tie_word_embeddings": False, "rope_theta": 1_000_000.0,
}  # fmt: skip
LARGE = {
    "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-tiny": {"model_type": "qwen3", **TINY},
    "qwen3-moe-tiny": {
        "model_type": "qwen3_moe", **TINY, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", **LARGE, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3", **LARGE, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", **LARGE, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}  # fmt: skip

"""How an engine is laid out, and how large a pool its memory has room for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from harness.device import find_device
from harness.names import UsageError
from harness.ops.dtypes import ITEMSIZE
from runtime.model import Model
from runtime.stores import WATERMARK

COMPILE = ("no", "layer", "model")
CPU_CACHE_BYTES = 1 << 30  # of a cache whose size nobody has said, where there is no GPU's memory to take a share of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine is laid out.

    block_size         tokens of a block
    num_blocks         of the pool; None: what `memory_share` of the device's memory leaves beside weights and a step's own
    num_host_blocks    for preemption by swap
    max_model_len      tokens of a sequence; None is what the model takes
    max_num_seqs       sequences that run at once
    max_num_tokens     query tokens of a step, the budget of chunked prefill
    impl, prefill      rows of the registry, "cuda.split_kv[NHD]"; None is the best for the model
    preempt_by         "recompute" or "swap"
    graphs             whether decode steps are replayed as CUDA graphs; on a CPU they never are
    compile            "no", "layer": torch.compile of the layer that all share, or "model": of the model in one graph
    """

    block_size: int = 16
    num_blocks: int | None = None
    num_host_blocks: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_tokens: int = 8192
    memory_share: float = 0.9
    impl: str | None = None
    prefill: str | None = None
    preempt_by: str = "recompute"
    graphs: bool = True
    compile: str = "no"

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_tokens"):
            _require(type(getattr(self, name)) is int and getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("num_blocks", "max_model_len"):
            value = getattr(self, name)
            _require(value is None or (type(value) is int and value >= 1), name, "at least 1, or None", value)
        host = self.num_host_blocks
        _require(type(host) is int and host >= 0, "num_host_blocks", "at least 0", host)
        share = self.memory_share
        _require(isinstance(share, int | float) and 0 < share <= 1, "memory_share", "above 0 and at most 1", share)
        for name in ("impl", "prefill"):
            value = getattr(self, name)
            _require(value is None or (isinstance(value, str) and bool(value)), name, "a row's name, or None", value)
        _require(self.preempt_by in ("recompute", "swap"), "preempt_by", '"recompute" or "swap"', self.preempt_by)
        _require(isinstance(self.graphs, bool), "graphs", "True or False", self.graphs)
        _require(self.compile in COMPILE, "compile", f"one of {', '.join(COMPILE)}", self.compile)
        _require(self.max_num_tokens >= self.max_num_seqs, "max_num_tokens", "at least max_num_seqs", self.max_num_tokens)


def _require(holds: bool, name: str, rule: str, got: object) -> None:
    if not holds:
        raise UsageError(f"Settings: {name} must be {rule} (got {got!r})")


def num_blocks(model: Model, settings: Settings, max_model_len: int) -> int:
    """Of the pool: as asked for, or as many as memory has room for, and no more than all sequences could fill."""
    config, itemsize = model.config, ITEMSIZE[model.dtype]
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    block_bytes = settings.block_size * token_bytes
    _require_room("num_host_blocks", settings.num_host_blocks, block_bytes, "cpu")
    if settings.num_blocks is not None:
        _require_room("num_blocks", settings.num_blocks, block_bytes, model.device)
        return settings.num_blocks
    if model.device == "cpu":
        room = CPU_CACHE_BYTES
    else:
        free, total = torch.cuda.mem_get_info(model.device)
        room = int(free - (1 - settings.memory_share) * total) - _step_bytes(model, settings)
    fill = settings.max_num_seqs * -(-max_model_len // settings.block_size)
    most = math.ceil(fill / (1 - WATERMARK)) + 1  # the last that is let in leaves a watermark
    if room < block_bytes:
        raise UsageError(f"no memory is left for a cache: {room} bytes; give more memory_share, or less max_num_tokens")
    return int(min(room // block_bytes, most))


def _require_room(name: str, count: int, block_bytes: int, device: str) -> None:
    free = find_device(device).free_bytes()
    room = f"few enough for {device}, where {free / 1e9:.1f} GB are free for blocks of {block_bytes} bytes"
    _require(count * block_bytes <= free, name, room, count)


def _step_bytes(model: Model, settings: Settings) -> int:
    """What a step takes at most beside weights and cache: activations of all its tokens, and logits in two types."""
    config, itemsize = model.config, ITEMSIZE[model.dtype]
    heads = config.num_attention_heads * config.head_dim
    width = 8 * config.hidden_size + 3 * getattr(config, "intermediate_size", 0) + 4 * heads
    logits = 4 * settings.max_num_seqs * config.vocab_size * (itemsize + 4)
    return int(settings.max_num_tokens * width * max(itemsize, 4) + logits + (1 << 30))

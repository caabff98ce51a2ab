"""The floor of a serving run: what its steps must compute and read, at the rates at which this device computes and reads.

    prompts    FLOPs of all their tokens, at the rate of a large matrix product
    decode     every weight once a step, and keys and values of every sequence, at the rate of a large copy

Neither overlaps with the other, and nothing else takes time; what a step with prompts in it decodes reads keys and values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from harness.ops.dtypes import ITEMSIZE, torch_dtype
from runtime.clock import Timed
from runtime.model import Model

SIDE = {"cuda": 8192, "cpu": 512}  # of the matrix product
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in a second: FLOPs of a matrix product in `dtype`, bytes read and written by a copy."""

    flops: float
    bytes: float


def measure_rates(device: str, dtype: str) -> Rates:
    """Measure both, each as the best of a few."""
    kind = device.partition(":")[0]
    side, size = SIDE[kind], COPY_BYTES[kind]
    one = torch.randn(side, side, device=device).to(torch_dtype(dtype))
    out = torch.empty_like(one)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Rates(
        flops=2 * side**3 / _best(lambda: torch.mm(one, one, out=out), device),
        bytes=2 * size / _best(lambda: target.copy_(source), device),
    )


def _best(run: Callable[[], object], device: str) -> float:
    """The shortest of some runs, seconds."""
    times = []
    for _ in range(REPEATS):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(4):
            run()
        _wait(device)
        times.append((time.perf_counter() - begin) / 4)
    return min(times)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a model's step moves and computes.

    token_flops    of one token, all products but attention's
    key_flops      of one pair of query token and key
    token_bytes    keys and values of one token
    expert_bytes   of all experts; of which a token reads `expert_share`
    """

    token_flops: float
    key_flops: float
    token_bytes: int
    dense_bytes: int
    expert_bytes: int
    expert_share: float

    @classmethod
    def of(cls, model: Model) -> Costs:
        """Of a model; an embedding that is not the head's too is looked up and not read."""
        config, module, itemsize = model.config, model.module, ITEMSIZE[model.dtype]
        experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
        head = module.lm_head.weight
        embedding = module.model.embed_tokens.weight
        looked_up = 0 if head is embedding or head.data_ptr() == embedding.data_ptr() else embedding.numel()
        dense = model.num_parameters - experts - looked_up
        share = config.num_experts_per_tok / config.num_experts if experts else 0.0
        heads, head_dim, layers = config.num_attention_heads, config.head_dim, config.num_hidden_layers
        return cls(
            token_flops=2 * (dense - head.numel() + share * experts), key_flops=4.0 * heads * head_dim * layers,
            token_bytes=2 * config.num_key_value_heads * head_dim * layers * itemsize,
            dense_bytes=dense * itemsize, expert_bytes=experts * itemsize, expert_share=share,
        )  # fmt: skip

    def step_s(self, step: Timed, rates: Rates) -> float:
        """The floor of one step."""
        kv = step.kv_tokens * self.token_bytes / rates.bytes
        if step.is_decode:
            read = self.expert_bytes * (1 - (1 - self.expert_share) ** step.num_rows)
            return kv + (self.dense_bytes + read) / rates.bytes
        return kv + (step.num_tokens * self.token_flops + step.keys * self.key_flops) / rates.flops


def floor_s(steps: Iterable[Timed], costs: Costs, rates: Rates) -> float:
    """The floor of all steps."""
    return sum(costs.step_s(step, rates) for step in steps)

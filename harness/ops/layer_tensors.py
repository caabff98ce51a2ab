"""What a layer's launch takes by keyword besides its caches: sinks and ALiBi's slopes, one a query head."""

from __future__ import annotations

import math

import torch

from harness.ops.attention import AttentionCase


def slopes(num_heads: int) -> torch.Tensor:
    """ALiBi's slopes, [num_heads] f32: 2 ** (-8 (h + 1) / n) for n heads, a power of two; other numbers take those of the
    next smaller power and then, for the rest, every second one of the next larger (Press, Smith, Lewis, arXiv 2108.12409)."""
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * (head + 1) / power for head in range(power)]
    exponents += [4 * (2 * rest + 1) / power for rest in range(num_heads - power)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32)


def by_query_head(case: AttentionCase, chance: torch.Generator) -> dict[str, torch.Tensor]:
    """What the case asks for of the two, by the names that launch takes; drawn anew for each layer."""
    made = {}
    if case.alibi:
        made["alibi_slopes"] = slopes(case.num_q_heads).to(chance.device)
    if case.sinks:
        made["sinks"] = sinks(case, chance)
    return made


def sinks(case: AttentionCase, chance: torch.Generator) -> torch.Tensor:
    """Sinks, [num_q_heads] f32: about as heavy as all keys of a row together, one in eight far heavier, one far lighter.

    A sink of ordinary size is lost among some thousand keys, and whoever forgets it would be right.
    """
    seen = sorted(min(n, case.window or n) for n in case.seq_lens)
    usual = math.log(max(seen[len(seen) // 2], 1)) if seen else 0.0
    drawn = usual + torch.randn(case.num_q_heads, generator=chance, device=chance.device)
    drawn[3::8] += 8.0
    drawn[6::8] -= 20.0
    return drawn

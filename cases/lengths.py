"""Sequence lengths that no two machines draw differently."""

from __future__ import annotations

import math
import random
import statistics


def ragged(count: int, low: int, high: int, *, seed: int) -> tuple[int, ...]:
    """Draw `count` lengths evenly from low..high, both included.

    Only `random()` is used: it is the one method whose sequence Python promises for a given seed.
    """
    draw = random.Random(seed).random
    return tuple(low + int(draw() * (high - low + 1)) for _ in range(count))


def log_normal(count: int, *, median: int, sigma: float, seed: int) -> tuple[int, ...]:
    """Return the quantiles of `count` lengths whose logarithm is normal, in an order that is drawn.

    They are the same for every seed, so that two such batches move the same bytes.
    """
    draw = random.Random(seed).random
    of_chance = statistics.NormalDist(sigma=sigma).inv_cdf
    lengths = [round(median * math.exp(of_chance((i + 0.5) / count))) for i in range(count)]
    return tuple(length for _, length in sorted((draw(), length) for length in lengths))

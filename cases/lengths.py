"""Sequence lengths that no two machines draw differently."""

from __future__ import annotations

import random


def ragged(count: int, low: int, high: int, *, seed: int) -> tuple[int, ...]:
    """Draw `count` lengths evenly from low..high, both included.

    Only `random()` is used: it is the one method whose sequence Python promises for a given seed.
    """
    draw = random.Random(seed).random
    return tuple(low + int(draw() * (high - low + 1)) for _ in range(count))

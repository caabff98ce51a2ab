"""Student's t distribution: tail and quantile, in the standard library's numbers."""

from __future__ import annotations

import math

_STEPS, _TINY = 500, 1e-300


def tail(t: float, freedom: float) -> float:
    """Probability that a variable of Student's t distribution with `freedom` degrees exceeds `t`."""
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    half = 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return half if t >= 0 else 1.0 - half


def quantile(outside: float, freedom: float) -> float:
    """The t that is exceeded with probability `outside`, which must lie in (0, 0.5]."""
    low, high = 0.0, 1.0
    while tail(high, freedom) > outside:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > outside else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function (DLMF 8.17.22), from the front (modified Lentz)."""
    c, d = 1.0, 1.0 / _not_zero(1.0 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _not_zero(1.0 + term * d)
            c = _not_zero(1.0 + term / c)
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY

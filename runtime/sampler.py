"""Tokens from logits, on the device, without a sort and without a wait.

Noise is a function of a request's seed, its answer and the token's position, and of nothing else: who else is in the batch,
and whether a request was preempted, changes no token. With Gumbel's noise the largest sum of logit and noise is a sample.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from runtime.groups import Sequence

#: of SplitMix64
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

ONE = 0x3F800000  # the bits of 1.0, the largest probability
LEAST_SHARE = 1e-30  # of top_p: the likeliest token has more; in float32 a smaller one may be 0, which no token is within


def sample(logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """Return int64 [num_rows], a token for each row of logits [num_rows, vocabulary], whose temperature is above 0.

    Top-k comes first, top-p among what it leaves, as elsewhere.
    """
    settings = [sequence.group.request.sampling for sequence in sequences]
    device = logits.device
    scores = logits / _column([setting.temperature for setting in settings], torch.float32, device)  # in f32, whatever they are
    if any(setting.top_k for setting in settings):
        most = logits.shape[1]
        counts = [min(setting.top_k or most, most) for setting in settings]
        scores = keep_top_k(scores, _column(counts, torch.int64, device))
    if any(setting.top_p < 1 for setting in settings):
        shares = [max(setting.top_p, LEAST_SHARE) for setting in settings]
        scores = keep_top_p(scores, _column(shares, torch.float32, device))
    keys = _column([noise_key(s.group.request.sampling.seed, s.index, s.num_outputs) for s in sequences], torch.int64, device)
    return (scores + gumbel(keys, logits.shape[1])).argmax(-1)


def keep_top_k(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Scores with -inf where counts [num_rows, 1] of others or more are larger."""
    ranks = _ranks(scores)
    return torch.where(ranks >= _threshold(ranks, None, counts), scores, -torch.inf)


def keep_top_p(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Scores with -inf where the likelier ones have the probability `shares` [num_rows, 1] already."""
    chances = torch.softmax(scores, -1)
    ranks = chances.view(torch.int32)  # none is negative
    return torch.where(ranks >= _threshold(ranks, chances, shares), scores, -torch.inf)


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """int32 in the order of the f32 values: of negative ones, all bits but the sign are turned round."""
    bits = values.contiguous().view(torch.int32)
    return torch.bitwise_xor(bits, (bits >> 31) & 0x7FFFFFFF)


def _threshold(ranks: torch.Tensor, weights: torch.Tensor | None, limit: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1]: the smallest rank above which there is less than `limit` in weight (None: one each), by bisection."""
    least, most = (-(2**31) - 1, 2**31 - 1) if weights is None else (-1, ONE)
    low = torch.full_like(limit, least, dtype=torch.int64)  # too small, or no rank
    high = torch.full_like(low, most)  # nothing is above it
    for _ in range((most - least - 1).bit_length()):
        middle = (low + high) >> 1
        above = ranks > middle
        weight = above.sum(-1, keepdim=True) if weights is None else torch.where(above, weights, 0.0).sum(-1, keepdim=True)
        fits = weight < limit
        high = torch.where(fits, middle, high)
        low = torch.where(fits, low, middle)
    return high


def noise_key(seed: int, index: int, position: int) -> int:
    """A 64-bit number for one token of one answer."""
    key = seed
    for part in (index, position):
        key = _mixed((key ^ (part * _GOLDEN)) % 2**64)
    return _signed(key)


def _mixed(key: int) -> int:
    """SplitMix64's finaliser."""
    key = (key + _GOLDEN) % 2**64
    key = (key ^ (key >> 30)) * _MIX_1 % 2**64
    key = (key ^ (key >> 27)) * _MIX_2 % 2**64
    return key ^ (key >> 31)


def _signed(bits: int) -> int:
    """The int64 of these 64 bits."""
    return bits - 2**64 if bits >= 2**63 else bits


def gumbel(keys: torch.Tensor, num_columns: int) -> torch.Tensor:
    """f32 [num_rows, num_columns] of Gumbel's distribution, a function of keys int64 [num_rows, 1] and the column."""
    bits = keys + torch.arange(num_columns, device=keys.device) * _signed(_GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_MIX_2)  # what the finaliser does after this changes none of the first 31 bits
    uniform = (_shifted(bits, 41).float() + 0.5) / 2**23  # inside (0, 1); of 24 bits the largest would be rounded to 1
    return -torch.log(-torch.log(uniform))


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right, zeros coming in: int64 has a sign."""
    return torch.bitwise_and(bits >> by, 2 ** (64 - by) - 1)


def _column(values: list[float] | list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return upload(torch.tensor(values, dtype=dtype), device)[:, None]


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a small tensor to the device, without waiting for it."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

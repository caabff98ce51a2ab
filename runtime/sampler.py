"""Tokens from logits, on the device, without a sort and without a wait.

Noise is a function of a request's seed, its answer and the token's position, and of nothing else: who else is in the batch,
and whether a request was preempted, changes no token. With Gumbel's noise the largest sum of logit and noise is a sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray

from impls.triton.interpreter import why_missing
from runtime.groups import Sequence

#: of SplitMix64
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

#: the same as int64
MIXING = tuple(int(number.astype(np.int64)) for number in (_GOLDEN, _MIX_1, _MIX_2))

LEAST_SHARE = 1e-30  # of top_p: the likeliest token has more; in float32 a smaller one may be 0, which no token is within


def sample(logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """Return int64 [num_rows], a token for each row of logits [num_rows, vocabulary], whose temperature is above 0.

    Top-k comes first, top-p among what it leaves, as elsewhere. By one kernel where Triton compiles for the device, else by
    torch: the same token, unless it hangs on how a sum or a logarithm is rounded.
    """
    settings, most, device = [sequence.group.request.sampling for sequence in sequences], logits.shape[1], logits.device
    counts = [min(setting.top_k or most, most) for setting in settings]
    shares = [max(setting.top_p, LEAST_SHARE) for setting in settings]
    keys = noise_keys((s.seed for s in settings), (s.index for s in sequences), (s.num_outputs for s in sequences))
    counts_there, keys_there = upload(torch.from_numpy(np.stack([np.array(counts), keys])), device)
    broken = [[setting.temperature for setting in settings], shares]
    temperatures, shares_there = upload(torch.tensor(broken, dtype=torch.float32), device)
    if kernel := _kernel(device.type):
        return kernel(logits, temperatures, counts_there, shares_there, keys_there, MIXING)
    ranks, scores = rank(logits), scores_of(logits, temperatures[:, None])
    if min(counts, default=most) < most:
        scores = torch.where(ranks >= top_k(ranks, counts_there[:, None]), scores, -torch.inf)
    if min(shares, default=1) < 1:
        scores = torch.where(ranks >= top_p(ranks, scores, shares_there[:, None]), scores, -torch.inf)
    tokens: torch.Tensor = (scores + gumbel(keys_there[:, None], most)).argmax(-1)
    return tokens


def warm_up_sampler(vocab_size: int, dtype: torch.dtype, device: str) -> None:
    """Let whatever `sample` compiles be compiled now."""
    if kernel := _kernel(torch.device(device).type):
        ones = torch.ones(2, 1, dtype=torch.float32, device=device)
        kernel(torch.zeros(1, vocab_size, dtype=dtype, device=device), ones[0], ones[0].long(), ones[1], ones[1].long(), MIXING)


@functools.cache
def _kernel(device_kind: str) -> Callable[..., torch.Tensor] | None:
    """`sample` of impls/triton/sample.py, where Triton compiles for such devices."""
    if device_kind == "cpu" or why_missing(device_kind):
        return None
    from impls.triton import sample as page

    return page.sample


def scores_of(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """f32, 0 for the row's largest logit: a low temperature leaves room for noise. As they are where that is infinite."""
    largest = logits.float().amax(-1, keepdim=True)
    return (logits - torch.where(largest.isfinite(), largest, 0.0)) / temperatures


def rank(logits: torch.Tensor) -> torch.Tensor:
    """int32 of as many bits as logits have, in their order; zeros of both signs are equal."""
    is_short = logits.element_size() == 2
    bits = logits.contiguous().view(torch.int16 if is_short else torch.int32).to(torch.int32)
    turned = bits ^ ((bits >> 31) & (0x7FFF if is_short else 0x7FFFFFFF))
    return torch.where(turned == -1, 0, turned)  # -1 is what -0.0 became


def top_k(ranks: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1]: the smallest rank that fewer than counts [num_rows, 1] others are above."""
    return _threshold(ranks, torch.ones((), device=ranks.device), counts)


def top_p(ranks: torch.Tensor, scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1]: the smallest rank above which the probability is less than shares [num_rows, 1]; all, where that is 1."""
    least = _threshold(ranks, torch.softmax(scores, -1), shares)
    return torch.where(shares < 1, least, ranks.amin(-1, keepdim=True))


def _threshold(ranks: torch.Tensor, weights: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1]: the smallest rank above which there is less than `limit` in weight, by bisection."""
    low = torch.full_like(limit, -(2**31) - 1, dtype=torch.int64)  # too small, or no rank
    high = torch.full_like(low, 2**31 - 1)  # nothing is above it
    for _ in range(32):
        middle = (low + high) >> 1
        fits = torch.where(ranks > middle, weights, 0.0).sum(-1, keepdim=True) < limit
        high = torch.where(fits, middle, high)
        low = torch.where(fits, low, middle)
    return high


def noise_keys(seeds: Iterable[int], indices: Iterable[int], positions: Iterable[int]) -> NDArray[np.int64]:
    """A number of 64 bits for each: one token of one answer of a request."""
    keys = np.array(list(seeds), np.uint64)
    for part in (indices, positions):
        keys = _mixed(keys ^ (np.array(list(part), np.uint64) * _GOLDEN))
    return keys.view(np.int64)


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's next number, from its state."""
    keys = keys + _GOLDEN
    keys = (keys ^ (keys >> np.uint64(30))) * _MIX_1
    keys = (keys ^ (keys >> np.uint64(27))) * _MIX_2
    return keys ^ (keys >> np.uint64(31))


def gumbel(keys: torch.Tensor, num_columns: int) -> torch.Tensor:
    """f32 [num_rows, num_columns] of Gumbel's distribution, a function of keys int64 [num_rows, 1] and the column."""
    golden, mix_1, mix_2 = MIXING
    bits = keys + torch.arange(num_columns, device=keys.device) * golden
    bits = (bits ^ _shifted(bits, 30)) * mix_1
    bits = (bits ^ _shifted(bits, 27)) * mix_2
    bits = bits ^ _shifted(bits, 31)
    return gumbel_of((_shifted(bits, 24).float() + 0.5) / 2**40)


def gumbel_of(uniform: torch.Tensor) -> torch.Tensor:
    """Gumbel's distribution of f32 between 0 and 1: of 40 bits the largest noise is 28, for tokens as rare as 2^-40.

    Of shares next to 1, which are rounded to it, the noise would be -inf, below what a filter excludes.
    """
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2**-24)))


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right, zeros coming in: int64 has a sign."""
    return torch.bitwise_and(bits >> by, 2 ** (64 - by) - 1)


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a small tensor to the device, without waiting for it."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

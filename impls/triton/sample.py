"""Tokens from logits in one kernel, a program a row: what runtime/sampler.py says, there in some hundred launches.

A row is read once for its largest logit and once for its token; under top-p once more for its weight; and for each of the two
filters eight times, sixteen in float32: their thresholds are found two bits at a time. Sums are taken in an order that follows
from the row's length alone, so a row gets the same token in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: logits that a program of so many warps looks at together
TILE, WARPS = 8192, 32
#: columns whose number float32, in which they are counted, still tells apart
MOST_COLUMNS = 2**24


@triton.jit
def load(row, start, num_columns, tile: tl.constexpr):
    """The logits of a tile; -inf, which neither weighs nor is drawn, behind the row's end."""
    columns = start + tl.arange(0, tile)
    return tl.load(row + columns, columns < num_columns, other=float("-inf"))


@triton.jit
def ranks(logits, bits: tl.constexpr):
    """uint32 below 2^bits, in the order of the logits, floats of so many bits; zeros of both signs are equal."""
    if bits == 16:
        number = logits.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        number = logits.to(tl.int32, bitcast=True)
    turned = number ^ ((number >> 31) & (2 ** (bits - 1) - 1))
    turned = tl.where(turned == -1, 0, turned)  # what -0.0 became
    return turned.to(tl.uint32, bitcast=True) + tl.full([], 2 ** (bits - 1), tl.uint32)


@triton.jit
def scores_of(logits, largest, temperature):
    """0 for the row's largest, so that a low temperature leaves room for noise."""
    return tl.div_rn(logits.to(tl.float32) - largest, temperature)


@triton.jit
def largest_of(row, num_columns, tile: tl.constexpr):
    """The row's largest logit; 0 where it is infinite, from which nothing can be subtracted."""
    maxima = tl.full([tile], float("-inf"), tl.float32)
    for start in range(0, num_columns, tile):
        maxima = tl.maximum(maxima, load(row, start, num_columns, tile).to(tl.float32))
    largest = tl.max(maxima)
    return tl.where(tl.abs(largest) < float("inf"), largest, 0.0)


@triton.jit
def threshold(
    row, num_columns, largest, temperature, least, limit, is_weighed: tl.constexpr, bits: tl.constexpr, tile: tl.constexpr
):
    """The smallest rank above which there is less than `limit` in weight: one each, or e^score from `least` on."""
    found = tl.zeros([], tl.uint32)
    digit = tl.full([], 2 ** (bits - 2), tl.uint32)
    for _ in range(bits // 2):
        last = found + digit - 1  # of the ranks that go on with 0; at most one of digits 1, 2 and 3 follow
        above_0 = tl.zeros([tile], tl.float32)
        above_1 = tl.zeros([tile], tl.float32)
        above_2 = tl.zeros([tile], tl.float32)
        for start in range(0, num_columns, tile):
            logits = load(row, start, num_columns, tile)
            rank = ranks(logits, bits)
            weight = tl.full([tile], 1.0, tl.float32)
            if is_weighed:
                weight = tl.where(rank >= least, tl.exp(scores_of(logits, largest, temperature)), 0.0)
            above_0 += tl.where(rank > last, weight, 0.0)
            above_1 += tl.where(rank > last + digit, weight, 0.0)
            above_2 += tl.where(rank > last + 2 * digit, weight, 0.0)
        if tl.sum(above_0) >= limit:
            found += digit
        if tl.sum(above_1) >= limit:
            found += digit
        if tl.sum(above_2) >= limit:
            found += digit
        digit = digit >> 2
    return found


@triton.jit
def top_p(row, num_columns, largest, temperature, share, least, bits: tl.constexpr, tile: tl.constexpr):
    """The smallest rank above which there is less than `share` of what weighs from `least` on."""
    sums = tl.zeros([tile], tl.float32)
    for start in range(0, num_columns, tile):
        logits = load(row, start, num_columns, tile)
        sums += tl.where(ranks(logits, bits) >= least, tl.exp(scores_of(logits, largest, temperature)), 0.0)
    limit = share * tl.sum(sums)
    return threshold(row, num_columns, largest, temperature, least, limit, True, bits, tile)


@triton.jit
def noise(key, columns, golden, mix_1, mix_2):
    """As `gumbel` of runtime/sampler.py."""
    bits = key + columns.to(tl.uint64) * golden
    bits = (bits ^ (bits >> 30)) * mix_1
    bits = (bits ^ (bits >> 27)) * mix_2
    bits = bits ^ (bits >> 31)
    uniform = tl.minimum(((bits >> 24).to(tl.float32) + 0.5) / 1099511627776.0, 1 - 5.9604644775390625e-08)
    near_0 = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3 + uniform * 0.25)))  # where 1 - uniform has lost bits
    return -tl.log(tl.where(uniform < 0.015625, near_0, -tl.log(1.0 - uniform)))


#: addresses that depend on the number of rows, for which nothing is to be compiled anew
VARIED = ["temperatures", "counts", "shares", "keys", "tokens"]


@triton.jit(do_not_specialize_on_alignment=VARIED)
def draw(
    logits, temperatures, counts, shares, keys, tokens, num_columns, row_stride, golden_number, mix_number_1, mix_number_2,
    bits: tl.constexpr, tile: tl.constexpr,
):
    """Grid (num_rows,); `sample` below says what is what."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * row_stride
    temperature, share = tl.load(temperatures + index), tl.load(shares + index)
    count, key = tl.load(counts + index), tl.load(keys + index).to(tl.uint64, bitcast=True)
    golden = golden_number.to(tl.uint64, bitcast=True)
    mix_1, mix_2 = mix_number_1.to(tl.uint64, bitcast=True), mix_number_2.to(tl.uint64, bitcast=True)

    largest = largest_of(row, num_columns, tile)
    least = tl.zeros([], tl.uint32)
    if count < num_columns:
        least = threshold(row, num_columns, largest, temperature, least, count.to(tl.float32), False, bits, tile)
    if share < 1.0:
        least = tl.maximum(least, top_p(row, num_columns, largest, temperature, share, least, bits, tile))

    best = tl.full([tile], float("-inf"), tl.float32)
    places = tl.zeros([tile], tl.int32)
    for start in range(0, num_columns, tile):
        columns = start + tl.arange(0, tile)
        values = load(row, start, num_columns, tile)
        sums = scores_of(values, largest, temperature) + noise(key, columns, golden, mix_1, mix_2)
        sums = tl.where(ranks(values, bits) >= least, sums, float("-inf"))
        is_better = sums > best
        best, places = tl.where(is_better, sums, best), tl.where(is_better, columns, places)
    tl.store(tokens + index, tl.min(tl.where(best == tl.max(best), places, num_columns)).to(tl.int64))


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, counts: torch.Tensor, shares: torch.Tensor, keys: torch.Tensor,
    mixing: tuple[int, int, int],
) -> torch.Tensor:
    """Return int64 [num_rows], a token for each row of logits [num_rows, num_columns], bf16, f16 or f32.

    temperatures    f32 [num_rows], above 0
    counts          int64 [num_rows]: top-k, num_columns and more for none
    shares          f32 [num_rows]: top-p, above 0, 1 for none
    keys            int64 [num_rows], of the noise; `mixing` are the three numbers that it is made with, as int64

    Raises ValueError for logits of other types, and for 2^24 columns and more, which float32 does not count.
    """
    num_rows, num_columns = logits.shape
    is_read = logits.dtype in (torch.bfloat16, torch.float16, torch.float32) and logits.stride(1) == 1
    if not is_read or num_columns >= MOST_COLUMNS:
        raise ValueError(
            f"sample: logits must be bf16, f16 or f32, of fewer than {MOST_COLUMNS} columns, which are adjacent"
            f" (got {logits.dtype}, {num_columns} columns, strides {logits.stride()})"
        )
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        draw[(num_rows,)](
            logits, temperatures, counts, shares, keys, tokens, num_columns, logits.stride(0), *mixing,
            bits=8 * logits.element_size(), tile=TILE, num_warps=WARPS,
        )
    return tokens

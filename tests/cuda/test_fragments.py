"""Tiles by loads to registers: what a lane loads, and where the MMA takes it to be; no GPU is needed."""

from __future__ import annotations

import itertools

import pytest

from harness.ops.layouts import HND
from impls.cuda import fragments, tensor_core
from impls.cuda.attention import Shape
from impls.cuda.builds import SHARED_LIMIT

HEAD_DIMS = [16, 48, 64, 80, 96, 112, 128, 192, 256]


def operand(step_count):
    """Each (step, lane, register) of operand A, with its row and the lower of its two columns."""
    for step, lane, register in itertools.product(range(step_count), range(32), range(4)):
        yield step, lane, register, lane // 4 + register % 2 * 8, lane % 4 * 2 + register // 2 * 8


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "warps"),
    [
        (8, 64, 16, 16), (8, 64, 8, 16), (16, 64, 16, 12), (4, 128, 16, 12), (8, 128, 32, 12), (8, 128, 8, 8), (9, 128, 16, 8),
        (7, 80, 16, 12), (7, 80, 24, 8), (8, 192, 16, 8), (8, 256, 16, 8), (71, 128, 16, 8),
    ],
)
def test_as_many_warps_as_registers_allow(group, head_dim, block_size, warps):
    """There is no ring, so that shared memory holds partials and sequences only, also where a CTA gets least of it."""
    shape = Shape(layout=HND.name, group=group, head_dim=head_dim, block_size=block_size)
    heads = -(-group // tensor_core.count_parts(shape))

    assert fragments.count_warps(shape, heads) == warps
    for limit in SHARED_LIMIT.values():
        assert tensor_core.count_warps(shape, heads, 0, 256, limit, [warps]) == warps


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_word_of_k_meets_its_own_of_the_query(head_dim):
    """Steps of a line's second half hold the neighbour's row; in a column all rows hold the same word, each word once."""
    chunks = head_dim // 8
    met = []
    for step, lane, register, row, _ in operand(-(-chunks // 4) * 2):
        half, line, place = step // 2 % 2, step // 4, step % 2 * 2 + register // 2
        odd = lane // 4 % 2 != half
        token = lane // 8 * 2 + odd + register % 2 * 8
        chunk = line * 8 + (lane % 8 ^ 4 * odd)
        query_word = (step // 2 * 4 + lane % 4) * 4 + place

        assert token == row ^ half
        assert query_word == chunk * 4 + place
        if chunk < chunks:
            met.append((token, query_word))
    assert sorted(met) == list(itertools.product(range(16), range(head_dim // 2)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_element_of_v_goes_to_a_row_of_its_own(head_dim):
    """Columns are tokens in their order; of each row, sums are stored as the element that it was loaded as."""
    met = []
    for step, lane, register, row, column in operand(4 * -(-head_dim // 64)):
        chunk, tokens = step // 4 * 8 + lane // 4, (lane % 4 * 2 + register // 2 * 8, lane % 4 * 2 + register // 2 * 8 + 1)
        element = chunk * 8 + step % 4 * 2 + register % 2
        stored = (step // 4 * 8 + row % 8) * 8 + step % 4 * 2 + row // 8

        assert tokens[0] == column
        assert stored == element
        if chunk < head_dim // 8:
            met += [(token, element) for token in tokens]
    assert sorted(met) == list(itertools.product(range(16), range(head_dim)))


def test_a_load_of_a_warp_is_of_whole_lines():
    """Eight lanes read the 128 bytes of a row, of K and of V: four lines a load."""
    for i in range(4):
        further = i % 2 + i // 2 * 8
        keys = {(lane // 8 * 2 + further, lane % 8 ^ i % 2 * 4) for lane in range(32)}
        values = {(lane % 4 * 2 + further, lane // 4) for lane in range(32)}

        assert keys == values == {(token + further, chunk) for token in (0, 2, 4, 6) for chunk in range(8)}

"""What neighbours share, found on block ids; no library and no torch operator is needed."""

from __future__ import annotations

import numpy as np
import pytest

from harness.ops.attention_staged import make_step
from impls.peers.levels import find_levels

SIZE = 4


def step_of(tables, seq_lens, q_lens=None):
    starts = np.concatenate([[0], np.cumsum(q_lens or [1] * len(seq_lens))])
    return make_step(np.array(tables, np.int32), np.array(seq_lens, np.int32), starts.astype(np.int32), "cpu")[0]


def levels_of(*arguments, most=3, **fields):
    return [(list(level.starts), list(level.rows), level.tokens) for level in find_levels(step_of(*arguments), SIZE, most)]


def test_groups_of_neighbours_go_on_in_fewer():
    """All begin alike, two pairs go on; the last level is what each has alone."""
    tables = [[1, 2, 3, 10], [1, 2, 3, 11], [1, 5, 12, 13], [1, 5, 14, 15]]

    assert levels_of(tables, [16, 14, 15, 13]) == [
        ([0, 4], [0], [4]),
        ([0, 2, 4], [0, 2], [8, 4]),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3], [4, 2, 7, 5]),
    ]
    assert levels_of(tables, [16, 14, 15, 13], most=2)[0] == ([0, 4], [0], [4])


def test_who_shares_nothing_has_no_tokens_at_a_level():
    """A group of its own, as has one between two that would share: neighbours alone do."""
    assert levels_of([[1, 2], [1, 3], [4, 5], [1, 6]], [8, 7, 6, 8]) == [
        ([0, 2, 3, 4], [0, 2, 3], [4, 0, 0]),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3], [4, 3, 6, 8]),
    ]


@pytest.mark.parametrize(("seq_lens", "q_lens", "shared"), [([9, 9], [1, 1], 8), ([8, 9], [1, 1], 4), ([12, 9], [1, 6], 0)])
def test_no_level_goes_past_what_all_query_tokens_see(seq_lens, q_lens, shared):
    """The last tokens of a sequence are its own."""
    levels = levels_of([[1, 2, 3], [1, 2, 3]], seq_lens, q_lens)

    assert levels[-1][2] == [seq_len - shared for seq_len in seq_lens]
    assert [level[2] for level in levels[:-1]] == ([[shared]] if shared else [])


@pytest.mark.parametrize("seed", range(10))
def test_the_levels_of_a_sequence_are_its_tokens(seed):
    """Once each, in order, by blocks that its own table has."""
    rng = np.random.default_rng(seed)
    tables = np.arange(20 * 8, dtype=np.int32).reshape(20, 8)
    for seq in range(1, 20):
        shared = rng.integers(0, 8)
        tables[seq, :shared] = tables[seq - rng.integers(1, min(seq, 2) + 1), :shared]
    seq_lens, q_lens = rng.integers(3, 33, 20), rng.integers(0, 4, 20)
    step = step_of(tables, seq_lens, q_lens.tolist())
    for most in (1, 2, 3, 9):
        reached = np.zeros(20, int)
        for level in find_levels(step, SIZE, most):
            firsts = [*level.rows, 20]
            for row, end, block, tokens in zip(level.rows, firsts[1:], level.blocks, level.tokens, strict=True):
                blocks = slice(block, block + -(-tokens // SIZE))
                for seq in range(row, end):
                    assert reached[seq] == block * SIZE
                    assert (tables[seq, blocks] == tables[row, blocks]).all()
                    reached[seq] += tokens
            assert list(level.starts) == [*step.host_query_start_loc[list(level.rows)], step.host_query_start_loc[-1]]
        assert reached.tolist() == seq_lens.tolist()


def test_a_level_is_told_as_the_library_takes_it():
    """qo_indptr, paged_kv_indptr, indices and last_page_len."""
    tables = np.array([[1, 2, 3], [1, 2, 4], [5, 6, 7]], np.int32)
    levels = find_levels(step_of(tables, [12, 9, 5]), SIZE, 3)
    told = [[tensor.tolist() for tensor in level.tensors(tables, SIZE)] for level in levels]

    assert told == [
        [[0, 2, 3], [0, 2, 2], [1, 2], [4, 0]],
        [[0, 1, 2, 3], [0, 1, 2, 4], [3, 4, 5, 6], [4, 1, 1]],
    ]

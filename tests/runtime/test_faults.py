"""How block managers have gone wrong in public, tried on ours. The numbers are those of the list compiled for this project."""

import random

import numpy as np
import pytest

from runtime import BlockManager, OutOfBlocks, UnknownSequence


def filled(manager, tokens, **options):
    """A sequence with all of `tokens` appended and committed."""
    sequence = manager.create_sequence(tokens, **options)
    rest = tokens[manager.sequences[sequence].sequence_length :]
    manager.append_tokens([sequence], [len(rest)])
    manager.commit_tokens([sequence], rest, [len(rest)])
    return sequence


def table(manager, sequence):
    return manager.sequences[sequence].block_table


# 34. flash-attention#2709: lengths beyond the table's capacity.
def test_no_length_exceeds_its_table():
    """Appending past the pool is refused whole, so lengths and tables always agree."""
    manager = BlockManager(2, 16)
    sequence = manager.create_sequence()

    with pytest.raises(OutOfBlocks, match="needs 3 blocks, and 2 of 2 can be taken"):
        manager.append_tokens([sequence], [40])
    assert manager.sequences[sequence].sequence_length == 0
    assert manager.num_free_blocks == 2


# 35, 36. onnxruntime#32391, vllm#42494, vllm#42273: -1, or a stale id, behind the used part of a table.
def test_nothing_stale_stands_behind_a_table():
    """A row that was long and is short again, or another's, shows zeros."""
    manager = BlockManager(16, 4)
    long, short = filled(manager, list(range(40))), filled(manager, [7, 8])
    manager.truncate(long, 5)
    assert manager.get_block_tables_tensor([long]).tolist() == [table(manager, long)]
    manager.release_sequence(long)
    third = filled(manager, [1])

    seen = manager.get_block_tables_tensor([short, third]).tolist()
    wide = filled(manager, list(range(100, 130)))
    wider = manager.get_block_tables_tensor([third, wide, short])

    assert seen == [table(manager, short), table(manager, third)]
    assert wider[0, 1:].eq(0).all()
    assert wider[2, 1:].eq(0).all()


# 37. vllm-ascend#3482, #11774: slots of an earlier, larger step in a buffer used again.
def test_slots_are_those_of_this_step_only():
    """Eight tokens, then five: five slots, none of them given before, and the earlier eight stay as they were."""
    manager = BlockManager(16, 4)
    ids = [manager.create_sequence() for _ in range(8)]
    first = manager.append_tokens(ids)
    kept = first.copy()
    second = manager.append_tokens(ids[:5])

    assert second.shape == (5,)
    assert not set(second.tolist()) & set(first.tolist())
    assert (first == kept).all()


# 38. The free-list faults below, seen from the kernel: two live tables name a block that is written.
def test_no_two_tables_share_a_block_that_is_written():
    """However sequences fork, grow and end, a slot that is given out belongs to one sequence."""
    manager, rng = BlockManager(64, 4), random.Random(0)
    ids = [filled(manager, [1, 2, 3, 4, 5])]
    for _ in range(300):
        if len(ids) > 1 and rng.random() < 0.3:
            manager.release_sequence(ids.pop(rng.randrange(len(ids))))
        elif len(ids) < 8:
            ids.append(manager.fork(rng.choice(ids)))
        if manager.can_append(ids):
            blocks = (manager.append_tokens(ids) // 4).tolist()
            manager.take_copies()
            assert all(sum(block in table(manager, i) for i in ids) == 1 for block in blocks)
        for sequence in ids:
            if manager.sequences[sequence].sequence_length > 20:
                manager.truncate(sequence, 6)
        manager.check_invariants()


# 39. FlexAttention's paged `assign` before `reserve` writes to page -1, the end of the cache.
def test_a_sequence_without_blocks_gives_no_slot_by_accident():
    """The first token gets a block before it gets a slot."""
    manager = BlockManager(4, 4)
    sequence = manager.create_sequence()

    assert manager.get_block_tables_tensor([sequence]).shape == (1, 0)
    assert manager.append_token(sequence) == table(manager, sequence)[0] * 4


# 62. vllm#55227, #23130: equal reference counts taken for a shared prefix.
def test_a_common_prefix_is_told_by_blocks_not_by_counts():
    """Three unrelated pairs hold blocks of equal counts; the columns of the table tell that nothing is common."""
    manager = BlockManager(32, 4)
    ids = [filled(manager, [100 * group] * 9) for group in (1, 2, 1, 2)]
    tables = manager.get_block_tables_tensor(ids)

    assert len(set(tables[:, 0].tolist())) == 2
    assert tables[0, 0] == tables[2, 0]
    assert tables[1, 0] == tables[3, 0]


# 63. vllm#1584, #1930: blocks of a fork freed twice.
def test_forks_free_each_block_once():
    """Fork, cut both to other lengths, fork again, free all: every block is back, once."""
    manager = BlockManager(16, 4)
    parent = filled(manager, list(range(14)))
    child = manager.fork(parent)
    grandchild = manager.fork(child)
    manager.truncate(parent, 3)
    manager.append_tokens([parent, child, grandchild])
    for sequence in (parent, grandchild, child):
        manager.release_sequence(sequence)
        manager.check_invariants()

    assert manager.num_live_blocks == 0
    assert len(set(manager.free_blocks)) == manager.num_free_blocks


# 64. vllm#4761, #6849, nano-vllm#163: an evicted block is still in the map.
def test_an_evicted_block_is_not_found():
    """One block: X, then Y. X is gone, also when its number is in use."""
    manager = BlockManager(1, 4)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        manager.release_sequence(filled(manager, tokens))

    assert manager.num_cached_tokens(manager.create_sequence([1, 2, 3, 4, 9])) == 0
    assert manager.num_cached_tokens(manager.create_sequence([5, 6, 7, 8, 9])) == 4


# 65. vllm#11186, nano-vllm#144: a prompt that is found entirely leaves nothing to compute.
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_a_full_hit_computes_the_last_token_again(block_size):
    """One token is left, for its logits. Its keys and values are in a shared block already: it is written nowhere."""
    manager = BlockManager(16, block_size)
    tokens = list(range(2 * block_size))
    first = filled(manager, tokens)
    second = manager.create_sequence(tokens)

    assert manager.num_cached_tokens(second) == len(tokens) - 1
    slot = manager.append_token(second)
    assert manager.get_query_start_loc_tensor([second]).tolist() == [0, 1]
    assert manager.take_copies().size == 0
    if block_size > 1:
        assert slot == -1
        assert table(manager, second) == table(manager, first)
    manager.commit_tokens([second], tokens[-1:])
    assert table(manager, second) == table(manager, first)
    assert manager.append_token(second) // block_size not in table(manager, first)
    manager.check_invariants()


# 66. nano-vllm#211, #233: tokens to compute are counted before the prefix is found.
def test_after_preemption_only_what_is_not_found_is_computed():
    """Three blocks, two sequences of 16 and 17 tokens: preempt, resume, and every token is there once."""
    manager = BlockManager(3, 16)
    tokens = list(range(17))
    first, second = filled(manager, tokens), filled(manager, list(range(50, 66)))
    with pytest.raises(OutOfBlocks):
        manager.append_token(second)
    manager.preempt(first, "recompute")
    manager.append_token(second)
    manager.release_sequence(second)
    manager.resume(first)

    found = manager.num_cached_tokens(first)
    assert found == 16
    manager.append_tokens([first], [17 - found])
    manager.commit_tokens([first], tokens[found:])
    assert manager.sequences[first].sequence_length == 17
    manager.check_invariants()


# 67. MinivLLM#98: a hit on blocks of a sequence that is still alive.
def test_a_live_block_can_be_hit():
    """The same prompt of a block and a token, twice: the second shares the block and computes the token."""
    manager = BlockManager(8, 4)
    first, second = filled(manager, [1, 2, 3, 4, 5]), manager.create_sequence([1, 2, 3, 4, 5])

    assert manager.num_cached_tokens(second) == 4
    assert manager.append_token(second) != table(manager, first)[1] * 4
    assert table(manager, second)[0] == table(manager, first)[0]


# 68. vllm#46283, kvcached#362: blocks leak where a request is aborted.
def test_nothing_leaks_when_requests_are_aborted():
    """A thousand random additions, steps, aborts at any stage: in the end every block can be taken."""
    manager, rng = BlockManager(40, 4), random.Random(1)
    ids, away = [], []
    for _ in range(1000):
        action = rng.random()
        if action < 0.4 and len(ids) < 12:
            ids.append(manager.create_sequence([rng.randrange(2) for _ in range(rng.randrange(12))]))
        elif action < 0.6 and ids:
            manager.release_sequence(ids.pop(rng.randrange(len(ids))))  # appended, committed or neither
        elif action < 0.7 and ids:
            away.append(ids.pop(rng.randrange(len(ids))))
            manager.preempt(away[-1], "recompute")
        elif action < 0.8 and away:
            manager.release_sequence(away.pop())
        elif ids and manager.can_append(ids):
            manager.append_tokens(ids)
    for sequence in ids + away:
        manager.release_sequence(sequence)

    manager.check_invariants()
    assert manager.num_available_blocks == 40


# 69. sglang#27789, atlas#373: one of two holders releases twice.
def test_a_second_release_is_refused():
    """The other holder keeps its blocks."""
    manager = BlockManager(8, 4)
    first = filled(manager, [1, 2, 3, 4, 5])
    second = manager.fork(first)
    manager.release_sequence(first)

    with pytest.raises(UnknownSequence, match=f"sequence {first} is unknown"):
        manager.release_sequence(first)
    assert manager.sequences[second].sequence_length == 5
    manager.check_invariants()


# 70. vllm#5578, #8824: swap runs out of host blocks, or brings back another number of blocks.
def test_swapped_bytes_come_back_equal_in_any_order():
    """Two blocks to a host pool of two; their old places are overwritten; resumed last first. A third finds no room."""
    manager = BlockManager(4, 2, num_host_blocks=2)
    device, host = np.zeros((4, 2), np.int64), np.zeros((2, 2), np.int64)
    ids = [manager.create_sequence() for _ in range(3)]
    for value, sequence in enumerate(ids):
        slot = manager.append_token(sequence)
        device.reshape(-1)[slot] = 1 + value
    for sequence in ids[:2]:
        pairs = manager.preempt(sequence, "swap")
        host[pairs[:, 1]] = device[pairs[:, 0]]
        device[pairs[:, 0]] = -1
    with pytest.raises(OutOfBlocks, match="needs 1 host blocks, and 0 of 2 are free"):
        manager.preempt(ids[2], "swap")
    for sequence in (ids[1], ids[0]):
        pairs = manager.resume(sequence)
        assert len(pairs) == 1
        device[pairs[:, 1]] = host[pairs[:, 0]]

    assert [device[table(manager, sequence)[0], 0] for sequence in ids] == [1, 2, 3]
    manager.check_invariants()


# 71. TRT-LLM#8813, LMCache#1969: after offload and reuse, another prompt's tokens.
def test_what_was_swapped_out_is_not_what_took_its_blocks():
    """Swap out, fill the pool with another prompt, swap in: the index knows each under its own tokens."""
    manager = BlockManager(3, 2, num_host_blocks=3)
    tokens = [1, 2, 3, 4]
    first = filled(manager, tokens)
    manager.preempt(first, "swap")
    manager.release_sequence(filled(manager, [5, 6, 7, 8, 9]))
    pairs = manager.resume(first)

    assert pairs[:, 1].tolist() == table(manager, first)
    manager.release_sequence(first)
    assert manager.num_cached_tokens(manager.create_sequence([*tokens, 0])) == 4
    assert manager.num_cached_tokens(manager.create_sequence([7, 8, 3, 4])) == 0
    manager.check_invariants()


# 72. nano-vllm#150: not a fault. The token behind a full block takes exactly one new block.
def test_the_seventeenth_token_takes_one_block():
    """Negative control."""
    manager = BlockManager(4, 16)
    sequence = filled(manager, list(range(16)))
    before = manager.num_free_blocks
    manager.append_token(sequence)

    assert manager.num_free_blocks == before - 1

"""The block manager's corners, one by one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import (
    BlockManager,
    BrokenInvariant,
    ForeignBlock,
    InvalidId,
    InvalidLength,
    KVBlockManager,
    OutOfBlocks,
    SequenceExists,
    SequenceState,
    TokenMismatch,
    UnknownSequence,
)
from tests.runtime.test_faults import filled, table


def test_importing_the_runtime_imports_no_torch():
    """The pool is NumPy and the standard library; torch comes with the first tensor."""
    code = (
        "import sys, runtime; m = runtime.BlockManager(4, 2); s = m.create_sequence([1]); m.append_tokens([s]);"
        "m.commit_tokens([s], [1]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


def test_the_walk_of_the_article():
    """Logical block 0 to 2 of a sequence of ten tokens in blocks of four, one token at a time."""
    manager = KVBlockManager(8, 4)
    sequence = manager.create_sequence()
    slots = [manager.append_token(sequence) for _ in range(10)]
    state = manager.sequences[sequence]

    assert isinstance(state, SequenceState)
    assert (state.sequence_id, state.sequence_length, len(state.block_table)) == (sequence, 10, 3)
    assert slots == [state.block_table[position // 4] * 4 + position % 4 for position in range(10)]
    assert sorted(manager.free_blocks + state.block_table) == list(range(8))
    assert manager.invariants_ok()


def test_the_walk_of_the_documentation():
    """The first example of docs/memory.md comes to the picture above it."""
    page = Path(__file__).parents[2] / "docs" / "memory.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    seen = {}
    exec(code.replace("manager.take_copies()", "pairs = manager.take_copies().tolist()"), seen)
    ids = [seen[name] for name in "abc"]

    assert seen["pairs"] == [[1, 3]]
    assert seen["manager"].get_block_tables_tensor(ids).tolist() == [[0, 3], [0, 2], [0, 1]]
    assert seen["manager"].get_seq_lens_tensor(ids).tolist() == [7, 5, 7]
    assert seen["manager"].get_query_start_loc_tensor(ids).tolist() == [0, 1, 1, 2]


def test_blocks_are_found_after_commit_and_never_earlier():
    """Appended is not computed: a second prompt finds nothing until the first has gone through its forward pass."""
    manager = BlockManager(16, 4)
    tokens = list(range(9))
    first = manager.create_sequence(tokens)
    manager.append_tokens([first], [9])
    assert manager.num_cached_tokens(manager.create_sequence(tokens)) == 0
    manager.commit_tokens([first], tokens[:7], [7])
    assert manager.num_cached_tokens(manager.create_sequence(tokens)) == 4
    manager.commit_tokens([first], tokens[7:], [2])
    assert manager.num_cached_tokens(manager.create_sequence(tokens)) == 8


def test_twins_become_one():
    """Two equal prompts computed at once: the second takes the first one's blocks and frees its own."""
    manager = BlockManager(16, 4)
    tokens = list(range(10))
    ids = [manager.create_sequence(tokens) for _ in range(2)]
    manager.append_tokens(ids, 10)
    assert manager.num_live_blocks == 6
    manager.commit_tokens(ids, tokens * 2, 10)

    assert manager.num_live_blocks == 4
    assert table(manager, ids[0])[:2] == table(manager, ids[1])[:2]
    manager.check_invariants()


def test_two_forks_that_fill_their_common_block_at_once_are_both_found():
    """Neither's further blocks hide the other's: a tail of its own behind a block that both fill in the same call."""
    manager = BlockManager(16, 2)
    a = filled(manager, [1, 2])
    manager.append_tokens([a], [2])
    b = manager.fork(a)
    manager.append_tokens([a, b], 2)
    manager.commit_tokens([a, b], [3, 4, 5, 5, 3, 4, 6, 6], 4)
    manager.check_invariants()

    for tail in (5, 6):
        assert manager.num_cached_tokens(manager.create_sequence([1, 2, 3, 4, tail, tail, 9])) == 6


@pytest.mark.parametrize("together", [True, False])
def test_forks_say_the_same_of_a_slot_that_they_share(together):
    """A token is in flight when its sequence is forked: both may commit it, and neither may commit another."""
    manager = BlockManager(16, 4)
    a = filled(manager, [1, 2])
    slot = manager.append_token(a)
    b = manager.fork(a)
    c = manager.fork(b)
    manager.release_sequence(filled(manager, [7]))
    words = f"sequence {b} shares slot {slot} with sequence {a}, which says that it holds token 3, got token 5"
    if not together:
        manager.commit_tokens([a], [3])
    with pytest.raises(TokenMismatch, match=words):
        manager.commit_tokens([a, b] if together else [b], [3, 5] if together else [5])
    manager.check_invariants()

    manager.commit_tokens([c, b, a] if together else [c, b], [3, 3, 3] if together else [3, 3])
    assert manager.get_query_start_loc_tensor([a, b, c]).tolist() == [0, 0, 0, 0]
    manager.append_tokens([a, b])
    manager.commit_tokens([a, b], [8, 9])
    assert manager.num_cached_tokens(manager.create_sequence([1, 2, 3, 8, 0])) == 4
    assert manager.num_cached_tokens(manager.create_sequence([1, 2, 3, 9, 0])) == 4


def test_what_a_fork_cut_off_and_wrote_anew_is_its_own():
    """Cut before the token in flight, a fork gets a copy of the block, and the others' tokens are no concern of it."""
    manager = BlockManager(16, 4)
    a = filled(manager, [1, 2])
    manager.append_token(a)
    b = manager.fork(a)
    manager.truncate(b, 2)
    manager.append_token(b)
    manager.commit_tokens([a, b], [3, 5])
    manager.release_sequence(a)
    manager.check_invariants()

    assert len(manager._books.in_flight) == 0


def test_salts_keep_tenants_apart():
    """Equal tokens of another adapter have other keys and values."""
    manager = BlockManager(16, 4)
    filled(manager, list(range(8)), salt="adapter")

    assert manager.num_cached_tokens(manager.create_sequence(list(range(9)))) == 0
    assert manager.num_cached_tokens(manager.create_sequence(list(range(9)), salt="adapter")) == 8


def test_the_last_of_three_forks_writes_in_place():
    """Of k sequences in one block, k - 1 copy."""
    manager = BlockManager(16, 4)
    first = filled(manager, [1, 2])
    ids = [first, manager.fork(first), manager.fork(first)]
    source = table(manager, first)[0]
    manager.append_tokens(ids)

    pairs = manager.take_copies()
    assert pairs.dtype == np.int32
    assert pairs[:, 0].tolist() == [source, source]
    assert sorted(block for i in ids for block in table(manager, i)) == sorted([source, *pairs[:, 1].tolist()])
    assert manager.take_copies().shape == (0, 2)


def test_a_copy_of_a_copy_reads_the_origin():
    """Copies of one step do not depend on one another."""
    manager = BlockManager(16, 4)
    first = filled(manager, [1, 2])
    origin = table(manager, first)[0]
    second = manager.fork(first)
    manager.append_token(second)
    third = manager.fork(second)
    manager.append_token(third)

    assert set(manager.take_copies()[:, 0].tolist()) == {origin}
    manager.check_invariants()


def test_a_copy_nobody_needs_is_not_made():
    """The copy's owner ends before the copies are taken; the source is free again."""
    manager = BlockManager(16, 4)
    first = filled(manager, [1, 2])
    second = manager.fork(first)
    manager.append_token(second)
    manager.release_sequence(first)
    assert manager.num_live_blocks == 2  # the source is still to be read
    manager.release_sequence(second)

    assert manager.take_copies().size == 0
    assert manager.num_free_blocks == 16


def test_swapping_out_reads_what_is_still_to_be_copied_where_it_stands():
    """Preempted between fork and copy, a sequence takes the source's bytes with it."""
    manager = BlockManager(16, 4, num_host_blocks=4)
    first = filled(manager, [1, 2])
    second = manager.fork(first)
    manager.append_token(second)

    assert manager.preempt(second, "swap")[:, 0].tolist() == table(manager, first)
    assert manager.take_copies().size == 0
    manager.check_invariants()


def test_truncating_into_a_shared_prefix_copies():
    """A found block goes on being found; who goes on from its middle gets a copy."""
    manager = BlockManager(16, 4)
    first = filled(manager, list(range(12)))
    second = manager.create_sequence(list(range(13)))
    manager.truncate(second, 6)
    slot = manager.append_token(second)

    assert manager.take_copies().tolist() == [[table(manager, first)[1], slot // 4]]
    manager.check_invariants()


def test_truncating_before_cached_children_copies():
    """Alone in a block whose children are cached: writing into it would strand them."""
    manager = BlockManager(16, 4)
    sequence = filled(manager, list(range(12)))
    parent = table(manager, sequence)[0]
    manager.truncate(sequence, 2)
    slot = manager.append_token(sequence)
    manager.check_invariants()

    assert manager.take_copies().tolist() == [[parent, slot // 4]]
    assert manager.num_cached_tokens(manager.create_sequence(list(range(13)))) == 12


def test_truncating_the_last_block_writes_in_place():
    """Alone in a block without children: it is not found any more, and needs no copy."""
    manager = BlockManager(1, 4)
    sequence = filled(manager, [1, 2, 3, 4])
    manager.truncate(sequence, 2)

    assert manager.append_token(sequence) == 2
    assert manager.take_copies().size == 0
    manager.commit_tokens([sequence], [9])
    manager.append_token(sequence)
    manager.commit_tokens([sequence], [4])
    assert manager.num_cached_tokens(manager.create_sequence([1, 2, 3, 4])) == 0
    manager.check_invariants()


def test_a_holder_that_only_copies_does_not_count():
    """Of two forks the first copies; the second, in a later call of the same step, is alone and writes in place."""
    manager = BlockManager(16, 4)
    first = filled(manager, [1, 2])
    second = manager.fork(first)
    manager.append_token(first)
    slot = manager.append_token(second)

    assert len(manager.take_copies()) == 1
    assert slot // 4 == 0


def test_a_source_that_only_a_copy_holds_is_evicted_before_its_parent():
    """A copy is pending from an indexed block that no table names any more when the copy's owner ends."""
    manager = BlockManager(8, 2)
    first = filled(manager, [1, 2, 3, 4, 5, 6])
    manager.truncate(first, 3)
    manager.append_token(first)  # into a copy of [3, 4], which stands behind [1, 2] and before [5, 6]
    manager.release_sequence(first)
    manager.check_invariants()

    assert manager.take_copies().size == 0
    assert manager.num_cached_tokens(manager.create_sequence([1, 2, 3, 4, 5, 6, 7])) == 6


def test_asking_for_too_much_changes_nothing():
    """One clear error, and every table, length and free block as before; also with copies and found blocks at stake."""
    manager = BlockManager(6, 4)
    first = filled(manager, list(range(6)))
    second = manager.fork(first)
    manager.release_sequence(filled(manager, list(range(50, 57))))

    def books():
        return manager.free_blocks, manager.num_cached_blocks, dict(manager.sequences), manager.take_copies().tolist()

    before = books()
    with pytest.raises(OutOfBlocks, match=r"append_tokens needs 7 blocks, and 4 of 6 can be taken \(3 free, 1 cached\)"):
        manager.append_tokens([first, second], [12, 12])
    assert books() == before
    assert not manager.can_append([first, second], [12, 12])
    manager.append_tokens([first, second], [2, 10])
    manager.check_invariants()


@pytest.mark.parametrize("num_cut", [1, 2])
def test_who_ended_first_is_evicted_first(num_cut):
    """Also where the blocks of a sequence that ended have not been looked at when others become idle."""
    manager = BlockManager(16, 2)
    first = filled(manager, [1, 2, 3, 4])
    second = filled(manager, [5, 6, 7, 8, 9, 10])
    older, younger = table(manager, first)[::-1], table(manager, second)[::-1]
    manager.release_sequence(first)
    manager.truncate(second, 6 - 2 * num_cut)

    assert manager.cached_blocks == older + younger[:num_cut]
    manager.check_invariants()


def test_a_prefix_outlives_what_stands_behind_it():
    """One that had only the prefix ends, then one that went on from there is cut: the deeper block is evicted first."""
    manager = BlockManager(16, 2)
    longer = filled(manager, [1, 2, 3, 4])
    shorter = filled(manager, [1, 2, 9])
    wanted = table(manager, longer)[::-1]
    manager.release_sequence(shorter)
    manager.truncate(longer, 0)

    assert manager.cached_blocks == wanted
    manager.check_invariants()


def test_sequences_that_end_for_ever_are_booked():
    """A prompt that is always found and never needs a new block: what is still to be booked stays bounded."""
    manager = BlockManager(8, 2)
    filled(manager, list(range(8)))
    for _ in range(100):
        manager.release_sequence(manager.create_sequence(list(range(9))))

    assert 0 < manager._books.pool._num_unbooked <= 8
    manager.check_invariants()


def test_tensors_follow_a_batch_that_loses_its_first():
    """Thirty sequences, and at every step the first leaves and another joins: rows slide, and the tensors with them."""
    manager = BlockManager(200, 2)
    ids = [filled(manager, [9, 8, index]) for index in range(30)]
    for turn in range(70):
        manager.release_sequence(ids.pop(0))
        ids.append(filled(manager, [9, 7, turn]))
        tables = manager.get_block_tables_tensor(ids)
        assert tables.tolist() == [table(manager, sequence) for sequence in ids]
        assert manager.get_seq_lens_tensor(ids).tolist() == [3] * 30
    manager.check_invariants()


def test_errors_name_who_the_rule_and_what_was_got():
    """Each refused call says what to do, and changes nothing."""
    manager = BlockManager(8, 4)
    sequence = filled(manager, list(range(8)))
    again = manager.create_sequence(list(range(8)))
    manager.append_token(again)
    away = manager.create_sequence()
    manager.preempt(away)
    refused = [
        (UnknownSequence, "append_tokens: sequence 77 is unknown", lambda: manager.append_tokens([sequence, 77])),
        (UnknownSequence, f"truncate: sequence {away} is preempted: resume it first", lambda: manager.truncate(away, 0)),
        (UnknownSequence, f"resume: sequence {sequence} is not preempted", lambda: manager.resume(sequence)),
        (SequenceExists, f"create_sequence: sequence {away} exists", lambda: manager.create_sequence((), away)),
        (SequenceExists, f"fork: sequence {again} exists", lambda: manager.fork(sequence, again)),
        (InvalidLength, "the new length of sequence 0 must be 0 to 8, got 9", lambda: manager.truncate(sequence, 9)),
        (InvalidLength, "awaits 0 tokens, got 1", lambda: manager.commit_tokens([sequence], [1])),
        (InvalidLength, "1 tokens of 1 sequences were announced, got 2", lambda: manager.commit_tokens([sequence], [1, 2])),
        (InvalidLength, "counts must be at least 1, got 0", lambda: manager.append_tokens([sequence], [0])),
        (InvalidLength, "must be an integer, got 4.5", lambda: manager.truncate(sequence, 4.5)),
        (InvalidId, "append_tokens: a sequence's id is an integer, got None", lambda: BlockManager(4, 4).append_tokens([None])),
        (InvalidLength, "counts must be integers below", lambda: manager.append_tokens([sequence], [1.5])),
        (InvalidLength, "counts must be integers below", lambda: manager.append_tokens([sequence], [2**63 - 1])),
        (InvalidLength, "counts must be integers below", lambda: manager.append_tokens([sequence], [2**70])),
        (InvalidLength, "an id stands twice", lambda: manager.can_append([sequence, sequence], [1, 1])),
        (InvalidLength, "token ids must be integers", lambda: manager.create_sequence(np.array([0.5]))),
        (InvalidLength, "of 32 bits, got 1 to 4294967296", lambda: manager.create_sequence(np.array([1, 2**32]))),
        (InvalidLength, "of 32 bits", lambda: manager.create_sequence(np.array([2**31], np.uint32))),
        (InvalidLength, "token ids must be integers of 32 bits", lambda: manager.create_sequence("ab")),
        (InvalidLength, "token ids must be integers of 32 bits", lambda: manager.create_sequence([2**40])),
        (InvalidLength, "an id stands twice", lambda: manager.get_seq_lens_tensor([sequence, sequence])),
        (InvalidLength, 'by must be "swap" or "recompute"', lambda: manager.preempt(sequence, "paging")),
        (TokenMismatch, "holds keys and values of token 7, got token 5", lambda: manager.commit_tokens([again], [5])),
    ]
    for error, words, call in refused:
        with pytest.raises(error, match=words):
            call()
        manager.check_invariants()
    with pytest.raises(InvalidLength, match="num_physical_blocks must be 1 to"):
        BlockManager(0, 4)


def test_the_pool_refuses_what_it_did_not_give():
    """A double free names its block."""
    pool = BlockManager(4, 4)._books.pool
    blocks = pool.take(2, "test")
    pool.drop(blocks)

    with pytest.raises(ForeignBlock, match="block 0 1 has no holder"):
        pool.drop(blocks)
    assert pool.num_free == 4


def test_ids_may_stand_several_times():
    """The slots of a mixed batch come in the order asked for, each sequence's in order of position."""
    manager = BlockManager(16, 2)
    a, b = manager.create_sequence(), manager.create_sequence()
    slots = manager.append_tokens([a, b, a, a, b]).tolist()
    manager.commit_tokens([a, b, a, a, b], [10, 20, 11, 12, 21])
    manager.truncate(a, 2)

    ta, tb = table(manager, a), table(manager, b)
    assert slots[0] == ta[0] * 2
    assert [slots[1], slots[4]] == [tb[0] * 2, tb[0] * 2 + 1]
    assert slots[2] == ta[0] * 2 + 1
    assert manager.num_cached_tokens(manager.create_sequence([10, 11, 0])) == 2
    assert manager.num_cached_tokens(manager.create_sequence([20, 21, 0])) == 2


def test_what_is_missing_counts_an_id_as_often_as_it_stands():
    """can_append says what append_tokens then does, also where an id is repeated."""
    manager = BlockManager(2, 2)
    sequence = manager.create_sequence()

    assert manager.num_missing_blocks([sequence] * 3) == 2
    assert not manager.can_append([sequence] * 5)
    assert len(manager.append_tokens([sequence] * 4)) == 4


def test_tokens_may_come_as_anything_that_yields_integers():
    """A list, an array of any width, a tensor, a generator: all the same prompt."""
    manager = BlockManager(16, 2)
    filled(manager, [1, 2, 3, 4, 5])
    prompts = [
        (1, 2, 3, 4, 5),
        np.arange(1, 6, dtype=np.uint64),
        torch.arange(1, 6),
        range(1, 6),
        (i + 1 for i in range(5)),
        b"\1\2\3\4\5",
    ]

    assert [manager.num_cached_tokens(manager.create_sequence(prompt)) for prompt in prompts] == [4] * 6
    assert manager.num_cached_tokens(manager.create_sequence(i for i in ())) == 0


def test_tensors_are_views_in_the_order_of_ids():
    """int32 over the books' own memory, also while rows come, go and change places."""
    manager = BlockManager(4096, 2)
    ids = [manager.create_sequence(sequence_id=10 + i) for i in range(40)]
    manager.append_tokens(ids, [1 + i for i in range(40)])
    for order in (ids, ids[::-1], ids[5:9], ids[::3], [], np.array(ids[:7]), torch.tensor(ids[2:4])):
        wanted = [manager.sequences[int(i)] for i in order]
        tables, lengths = manager.get_block_tables_tensor(order), manager.get_seq_lens_tensor(order)
        assert lengths.tolist() == [state.sequence_length for state in wanted]
        for row, state in zip(tables.tolist(), wanted, strict=True):
            assert row == state.block_table + [0] * (len(row) - len(state.block_table))
        assert tables.dtype == lengths.dtype == torch.int32
    manager.release_sequence(12)
    manager.create_sequence(sequence_id=99)
    assert manager.get_seq_lens_tensor([99, 10, 13]).tolist() == [0, 1, 4]
    manager.check_invariants()


def test_changing_batches_for_ever_leaves_no_trace():
    """Two batches that take turns move empty rows about; what is noted of those stays bounded, and new rows are found."""
    manager = BlockManager(64, 4)
    ids = [manager.create_sequence() for _ in range(20)]
    for sequence in ids[5:10]:
        manager.release_sequence(sequence)
    few, many = ids[10:13], ids[:5] + ids[13:]
    for _ in range(500):
        manager.get_seq_lens_tensor(few)
        manager.get_seq_lens_tensor(many)

    assert len(manager._table._holes) <= 2 * len(manager._table.order)
    more = [manager.create_sequence() for _ in range(30)]
    assert sorted(manager.sequences) == sorted(ids[:5] + ids[10:] + more)
    manager.check_invariants()


def test_a_broken_book_is_told():
    """The checks can fail, and say what is broken."""
    manager = BlockManager(8, 4)
    first, second = filled(manager, list(range(6))), filled(manager, list(range(50, 56)))
    books = manager._books
    row = books.table.row_of[first]
    books.table.blocks[row, 1] = table(manager, second)[0]
    assert not manager.invariants_ok()
    with pytest.raises(
        BrokenInvariant, match=r"block 1 has 1 references and 0 holders; block 2 has 1 references and 2 holders"
    ):
        manager.check_invariants()


def test_reset_forgets_everything():
    """Sequences, cached blocks, ids: as new."""
    manager = BlockManager(8, 4, num_host_blocks=2)
    sequence = filled(manager, list(range(8)))
    manager.preempt(sequence, "swap")
    manager.reset()

    assert manager.num_free_blocks == 8
    assert manager.num_free_host_blocks == 2
    assert manager.create_sequence(list(range(8))) == 0
    assert manager.num_cached_tokens(0) == 0

"""The contiguous allocators: addresses, halves, moves, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import ForeignBlock, InvalidLength, OutOfBlocks, UnknownSequence
from runtime.arena import Buddy, FirstFit
from runtime.contiguous import grow_and_copy, oracle, reserve_max, reserve_power_of_two


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_runs_never_overlap_and_all_comes_back(kind, data):
    """Against a plain array of owners: a run is given only where it is free, and refused only where it fits nowhere."""
    num_slots = data.draw(st.integers(0, 70))
    arena, owner = kind(num_slots), np.zeros(num_slots, int)
    taken = {}
    for name in range(1, data.draw(st.integers(1, 40))):
        if taken and data.draw(st.booleans()):
            address = data.draw(st.sampled_from(sorted(taken)))
            owner[address : address + taken.pop(address)] = 0
            arena.give_back(address)
        wanted = data.draw(st.integers(1, 20))
        size, largest = arena.size_of(wanted), arena.largest_hole()
        address = arena.take(wanted)
        assert (address is None) == (size > largest)
        if address is not None:
            assert (owner[address : address + size] == 0).all()
            assert address + size <= num_slots
            owner[address : address + size] = name
            taken[address] = size
        assert arena.num_free == (owner == 0).sum()
        if kind is FirstFit:
            gaps = "".join("x" if slot else "." for slot in owner).split("x")
            assert arena.largest_hole() == max(map(len, gaps))
    whole = kind(num_slots).largest_hole()
    for address in taken:
        arena.give_back(address)
    assert arena.largest_hole() == whole


def test_a_run_is_given_back_once():
    """A double free names its address."""
    arena = FirstFit(10)
    arena.take(4)
    arena.give_back(0)

    with pytest.raises(ForeignBlock, match="no run begins at slot 0"):
        arena.give_back(0)


def test_halves_join_again():
    """Three runs of a quarter leave a quarter; freed, they make one whole."""
    arena = Buddy(16)
    addresses = [arena.take(3) for _ in range(3)]
    assert addresses == [0, 4, 8]
    assert arena.largest_hole() == 4
    for address in (4, 0, 8):
        arena.give_back(address)
    assert arena.take(16) == 0


def test_each_policy_reserves_what_it_says():
    """For a prompt of 5 that will come to 9 tokens, of 16 at most."""
    for make, slots in (
        (lambda: reserve_max(64, 16), 16),
        (lambda: reserve_power_of_two(64), 16),
        (lambda: grow_and_copy(64), 6),
        (lambda: oracle(64), 9),
    ):
        manager = make()
        sequence = manager.create_sequence([0] * 5, final_length=9)
        assert manager.num_reserved_slots == slots
        assert manager.append_tokens([sequence], [5]).tolist() == [0, 1, 2, 3, 4]
        manager.check_invariants()


def test_growing_moves_the_tokens():
    """A full run is left for one twice as long; the move is told, and the bytes are there."""
    manager = grow_and_copy(64)
    cache = np.zeros(64, int)
    a, b = manager.create_sequence([0] * 3), manager.create_sequence([0] * 3)
    written = {a: [], b: []}
    for value in range(1, 12):
        for name, slot in zip((a, b), manager.append_tokens([a, b]).tolist(), strict=True):
            for source, destination, count in manager.take_copies():
                cache[destination : destination + count] = cache[source : source + count].copy()
            cache[slot] = 100 * name + value
            written[name].append(cache[slot])
        manager.check_invariants()

    for name, values in written.items():
        run = manager.sequences[name]
        assert cache[run.address : run.address + run.length].tolist() == values


def test_a_refused_growth_changes_nothing():
    """Two sequences outgrow their runs and only one could move: none does."""
    manager = grow_and_copy(17)
    ids = [manager.create_sequence([0] * 3) for _ in range(2)]
    manager.append_tokens(ids, [4, 4])

    with pytest.raises(OutOfBlocks, match="needs 8 slots in one piece; 1 of 17 are free, the largest piece is 1"):
        manager.append_tokens(ids)
    assert [run.address for run in manager.sequences.values()] == [0, 4]
    assert manager.take_copies().size == 0
    manager.check_invariants()


def test_refusals_say_what_was_reserved():
    """Past its run, unknown, or without room."""
    manager = oracle(8)
    sequence = manager.create_sequence([0] * 2, final_length=4)

    with pytest.raises(InvalidLength, match="a run of 4 slots was reserved, got 5 tokens"):
        manager.append_tokens([sequence], [5])
    with pytest.raises(OutOfBlocks, match="needs 5 slots in one piece"):
        manager.create_sequence(final_length=5)
    with pytest.raises(UnknownSequence, match="sequence 9 is unknown"):
        manager.release_sequence(9)

"""What cannot be meant, at every door: one error of ours, and nothing has changed."""

import numpy as np
import pytest
import torch

from runtime import BlockManager, InvalidLength, MemoryPlaneError, PagedAttention
from runtime.contiguous import oracle, reserve_max, reserve_power_of_two

NAN = float("nan")
NO_INTEGER = [NAN, float("inf"), True, 1.0, 2.5, "1", [1], {}, object(), np.float32(1), np.bool_(True), np.array([1.0]), 1j]
NO_NUMBER = [*NO_INTEGER, -1, 0, 2**70, None]  # nor a size
NO_ID = [*NO_INTEGER, np.zeros((2, 2), int), torch.tensor([1.0]), [[0], [1]]]
NO_IDS = [
    *(value for value in NO_INTEGER if type(value) is not list),
    *(0, None, [True, False], [0.0, 1.0], [0, [1]], [0, None], [0, NAN], np.array([True, False]), np.zeros((1, 2), int)),
    *(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64, device="meta"), {0, 1}, {0: 1}, "01", b"\0\1"),
]
NO_TOKENS = [
    *(NAN, 2.5, None, "text", {1}, {1: 2}, object(), [1, 2.0], [NAN], [None], [[1, 2]], [[1], [2, 3]], [True], [2**40], ["1"]),
    *(np.array([[1, 2]]), np.array([1.0]), np.array([True]), np.array([2**40]), np.array([None]), torch.zeros(2, 2).int()),
]
NO_COUNTS = [
    *(NAN, 1.0, True, -1, 0, 2**31, 2**70, "1", {1: 2}, (i for i in (1, 1)), [], [1], [1, 0], [1, -1], [1, 1, 1], [1, NAN]),
    *([True, True], [1.0, 1.0], [[1, 1]], [[1], [1, 1]], [None, 1], np.ones((2, 1), int), np.ones(2), np.ones(1, int)),
    torch.ones(2),
]
DOORS = {
    "BlockManager(x, 4)": NO_NUMBER,
    "BlockManager(4, x)": NO_NUMBER,
    "BlockManager(4, 4, num_host_blocks=x)": [*NO_INTEGER, -1, 2**70, None],
    "m.create_sequence(x)": NO_TOKENS,
    "m.create_sequence((), x)": NO_ID,
    "m.create_sequence((), salt=x)": [[1], {}, np.zeros(2)],
    "m.num_cached_tokens(x)": NO_ID,
    "m.fork(x)": NO_ID,
    "m.fork(0, x)": NO_ID,
    "m.truncate(x, 0)": NO_ID,
    "m.truncate(0, x)": [*NO_INTEGER, -1, 6, 2**70, None],
    "m.preempt(x)": NO_ID,
    "m.preempt(0, x)": [*NO_INTEGER, None],
    "m.resume(x)": NO_ID,
    "m.release_sequence(x)": NO_ID,
    "m.append_token(x)": NO_ID,
    "m.append_tokens(x)": NO_IDS,
    "m.append_tokens([0, 1], x)": NO_COUNTS,
    "m.num_missing_blocks(x)": NO_IDS,
    "m.num_missing_blocks([0, 1], x)": NO_COUNTS,
    "m.can_append(x)": NO_IDS,
    "m.commit_tokens(x, [1, 2])": NO_IDS,
    "m.commit_tokens([1], x)": NO_TOKENS,
    "m.commit_tokens([0, 1], [1, 2], x)": NO_COUNTS,
    "m.get_block_tables_tensor(x)": NO_IDS,
    "m.get_seq_lens_tensor(x)": NO_IDS,
    "m.get_query_start_loc_tensor(x)": NO_IDS,
    "m.sequences[x]": NO_ID,
    "oracle(x)": [*NO_INTEGER, -1, None],
    "reserve_power_of_two(x)": [*NO_INTEGER, -1, None],
    "reserve_max(64, x)": NO_NUMBER,
    "c.create_sequence((), x)": NO_ID,
    "c.create_sequence((), final_length=x)": [*NO_INTEGER, -1, 2**70],
    "c.append_tokens(x)": NO_IDS,
    "c.append_tokens([0, 1], x)": NO_COUNTS,
    "c.release_sequence(x)": NO_ID,
    "PagedAttention(x, 16, 4, 4)": NO_NUMBER,
    "PagedAttention(2, x, 4, 4)": NO_NUMBER,
    "PagedAttention(2, 16, x, 4)": NO_NUMBER,
    "PagedAttention(2, 16, 4, x)": NO_NUMBER,
    "PagedAttention(2, 16, 4, 4, window=x)": [*NO_INTEGER, -1, 0],
    "PagedAttention(2, 16, 4, 4, softcap=x)": [NAN, float("inf"), True, "1", [1], {}, object(), np.float32(1), 1j, 0, -1.0],
    "PagedAttention(2, 16, 4, 4, sinks=x)": [1.0, "1", [1.0, 2.0], np.ones(2), torch.ones(1), torch.ones(2).int()],
    "PagedAttention(2, 16, 4, 4, kv_dtype=x)": ["e4m3", "f8", 1, torch.float8_e5m2, [1]],
    "PagedAttention(2, 16, 4, 4, k_scale=x)": [1.0, torch.ones(1), "1"],
    "p.allocate(9, x)": NO_NUMBER,
    "p.allocate(x, 2)": [[1], {}, np.zeros(2)],
    "p.free(x)": [[1], {}, np.zeros(2)],
    "p.forward(t, t, t, x)": NO_IDS,
    "p.forward(x, t, t, [0])": [None, 1, [1.0], np.zeros((1, 2, 16)), torch.zeros(()), torch.zeros(0, 2, 16)],
    "p.forward(t, x, t, [0])": [None, 1, [1.0], np.zeros((1, 2, 16)), torch.zeros(()), torch.zeros(1, 2, 16).int()],
}


def managers():
    """A block manager with a committed sequence, one in flight and one in host memory; a contiguous one; a facade."""
    manager = BlockManager(16, 4, num_host_blocks=4)
    for tokens in ([1, 2, 3, 4, 5], [7], [9]):
        sequence = manager.create_sequence(tokens)
        manager.append_tokens([sequence], [len(tokens)])
        if len(tokens) > 1:
            manager.commit_tokens([sequence], tokens, len(tokens))
    manager.preempt(2, "swap")
    contiguous = oracle(64)
    for _ in range(2):
        contiguous.create_sequence([1], final_length=9)
    attention = PagedAttention(2, 16, 4, 4)
    attention.allocate(1, 4)
    classes = {"BlockManager": BlockManager, "PagedAttention": PagedAttention, "oracle": oracle}
    policies = {"reserve_max": reserve_max, "reserve_power_of_two": reserve_power_of_two}
    return {"m": manager, "c": contiguous, "p": attention, "t": torch.zeros(1, 2, 16), **classes, **policies}


def books(manager):
    return manager.free_blocks, manager.cached_blocks, dict(manager.sequences), manager.preempted, manager.num_free_host_blocks


@pytest.mark.parametrize("door", DOORS)
def test_what_cannot_be_meant_is_refused(door):
    """NaN, booleans, floats, text, the wrong shape, sets, what has no hash: never a guess, never somebody else's error."""
    names = managers()
    before = books(names["m"])
    for value in DOORS[door]:
        with pytest.raises(MemoryPlaneError) as caught:
            eval(door, names, {"x": value})
        assert len(str(caught.value)) < 400
        assert books(names["m"]) == before, f"{door} with x = {value!r}"
    names["m"].check_invariants()
    names["c"].check_invariants()


def test_a_count_of_one_is_not_spread_over_two():
    """One number is that of each; a list of one is of one."""
    manager = BlockManager(16, 4)
    ids = [manager.create_sequence(), manager.create_sequence()]

    with pytest.raises(InvalidLength, match=r"one number or one for each of 2 ids, got \[2\] \(shape \(1,\)\)"):
        manager.append_tokens(ids, counts=[2])
    assert manager.append_tokens(ids, counts=2).tolist() == [0, 1, 4, 5]
    assert manager.append_tokens(ids, counts=np.int64(1)).tolist() == [2, 6]


def test_what_is_empty_is_no_error():
    """An empty batch, however it is given, is a batch; an empty prompt is a prompt."""
    manager = BlockManager(4, 4)
    for ids in ([], (), np.array([]), np.zeros(0, int), torch.zeros(0, dtype=torch.int64), (i for i in ())):
        assert manager.append_tokens(ids).shape == (0,)
    manager.commit_tokens([], [])
    assert manager.append_tokens([], []).shape == manager.append_tokens([], 3).shape == (0,)
    assert manager.get_block_tables_tensor([]).shape == (0, 0)
    assert manager.get_query_start_loc_tensor([]).tolist() == [0]
    assert manager.can_append([])
    for index, prompt in enumerate(([], (), np.array([]), torch.zeros(0))):
        assert manager.create_sequence(prompt) == index


def test_a_repeated_id_with_counts_is_refused_by_the_contiguous_too():
    """Two runs of one sequence would each fit, and not both."""
    manager = oracle(64)
    sequence = manager.create_sequence(final_length=4)

    with pytest.raises(InvalidLength, match="an id stands twice"):
        manager.append_tokens([sequence, sequence], [3, 3])
    assert manager.append_tokens([sequence] * 2).tolist() == [0, 1]

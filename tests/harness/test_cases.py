"""What a problem is: rules that speak, digests that guard names, and bytes and FLOPs counted by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from harness.ops import OP_NAMES, case_from_json, case_type, operator
from harness.ops.attention import AttentionCase
from harness.ops.block_copy import BlockCopyCase, waves
from harness.ops.cache_write import CacheWriteCase
from harness.ops.case import CaseError

ATTENTION = AttentionCase(name="some.attention", num_q_heads=4, num_kv_heads=2, head_dim=8, block_size=4, seq_lens=(5, 9))
WRITE = CacheWriteCase(name="some.write", num_kv_heads=2, head_dim=8, block_size=4, num_tokens=5, num_padding=2, num_blocks=8)
COPY = BlockCopyCase(name="some.copy", num_kv_heads=2, head_dim=8, block_size=4, num_copies=3, num_layers=2, num_blocks=8)
CASES = (ATTENTION, WRITE, COPY)

NAME = "name must be lower-case words, digits, '.', '_' or '-'"
LENS = "must be a tuple of whole numbers of at least 0"


@pytest.mark.parametrize(
    ("case", "field", "value", "rule"),
    [
        *((case, "name", name, NAME) for case in CASES for name in ("", "Upper", "a b", "-first", "a\n", "ä", 7, None)),
        *(
            (ATTENTION, field, value, f"{field} must be a whole number of at least 1")
            for field in ("num_q_heads", "num_kv_heads", "head_dim", "block_size")
            for value in (0, -1, 2.0, True, "8", None)
        ),
        (ATTENTION, "num_kv_heads", 3, "num_q_heads must be a multiple of num_kv_heads"),
        (ATTENTION, "dtype", "f64", "dtype must be one of f32, f16, bf16"),
        *((ATTENTION, field, value, f"{field} {LENS}") for field in ("seq_lens", "q_lens")
          for value in ((-1, 4), (1.0, 4), (True, 4), [1, 2], 7, None)),
        (ATTENTION, "q_lens", (1,), "q_lens must have one entry a sequence"),
        *((ATTENTION, "pool_slack", value, "pool_slack must be at least 1") for value in
          (0.99, -1.0, float("nan"), float("inf"), "2", None)),
        *((ATTENTION, "scale", value, "scale must be None or a finite number other than 0") for value in
          (float("nan"), float("inf"), 0.0, "1", True, 10**400)),
        *((ATTENTION, "window", value, "window must be None or a whole number of at least 1") for value in
          (0, -1, 2.0, True, "8")),
        *((ATTENTION, "softcap", value, "softcap must be None or a finite number above 0") for value in
          (0.0, -50.0, float("nan"), float("inf"), "50", True)),
        *((ATTENTION, field, 1, f"{field} must be true or false") for field in ("alibi", "sinks")),
        (ATTENTION, "kv_dtype", "bf16", "kv_dtype must be None or one of e4m3, e5m2"),
        (ATTENTION, "kv_scales", "token", "kv_scales must be one of tensor, head"),
        (ATTENTION, "kv_scales", "head", "kv_scales are for a cache with a kv_dtype"),
        *((ATTENTION, "prefix", value, "prefix must be a tuple of (leader, tokens)") for value in
          ([(0, 0), (0, 4)], ((0, 0), (0,)), ((0, 0), (0, -4)), ((0, 0), (0, 4.0)), ((0, 0), [0, 4]), None)),
        (ATTENTION, "prefix", ((0, 0),), "prefix must have one (leader, tokens) a sequence"),
        (ATTENTION, "prefix", ((0, 0), (1, 4)), "the leader of sequence 1's prefix must stand before it"),
        *((ATTENTION, "prefix", ((0, 0), (0, tokens)), "must be whole blocks of 4 that it and its leader 0 fill")
          for tokens in (3, 8)),
        *(
            (WRITE, field, value, f"{field} must be a whole number of at least 1")
            for field in ("num_kv_heads", "head_dim", "block_size", "num_blocks")
            for value in (0, 2.0)
        ),
        (WRITE, "dtype", "fp8", "dtype must be one of f32, f16, bf16"),
        (WRITE, "order", "sorted", "order must be 'scattered' or 'runs'"),
        *((WRITE, field, value, f"{field} must be a whole number of at least 0") for field in ("num_tokens", "num_padding")
          for value in (-1, 2.5, "3", None)),
        (WRITE, "num_padding", 6, "num_padding must be 0 to num_tokens"),
        (WRITE, "num_tokens", 35, "num_tokens must fit the pool's slots"),
        *(
            (COPY, field, value, f"{field} must be a whole number of at least 1")
            for field in ("num_kv_heads", "head_dim", "block_size", "num_blocks", "num_layers")
            for value in (0, 2.0)
        ),
        (COPY, "dtype", "int8", "dtype must be one of f32, f16, bf16, e4m3, e5m2"),
        (WRITE, "kv_dtype", "f16", "kv_dtype must be None or one of e4m3, e5m2"),
        (WRITE, "kv_scales", "head", "kv_scales are for a cache with a kv_dtype"),
        *((COPY, "num_copies", value, "num_copies must be a whole number of at least 0") for value in (-1, 1.5, "3")),
        (COPY, "num_copies", 5, "num_copies must be at most half of num_blocks"),
        (COPY, "chained", "no", "chained must be true or false"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value)[:30],
)  # fmt: skip
def test_a_case_that_cannot_be_says_which_rule_it_broke(case, field, value, rule):
    """The error names the case, the rule and what was got."""
    with pytest.raises(CaseError) as caught:
        dataclasses.replace(case, **{field: value})

    said = str(caught.value)
    assert rule in said
    assert said.startswith(f"{value if field == 'name' else case.name}: ")
    assert "(got " in said


@pytest.mark.parametrize("name", ["blocks_per_seq", "first_keys", "query_starts", "shared_blocks", "digest"])
def test_what_is_of_all_sequences_is_made_once(name):
    """Who asks for it sequence by sequence, of tens of thousands, does not wait for its square."""
    case = dataclasses.replace(ATTENTION, window=3)

    assert getattr(case, name) is getattr(case, name)


def test_left_out_query_lengths_are_decode():
    """One query token a sequence, said or not: the same case."""
    said = dataclasses.replace(ATTENTION, q_lens=(1, 1))

    assert ATTENTION.q_lens == (1, 1)
    assert said == ATTENTION
    assert said.digest == ATTENTION.digest


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_digest_ignores_the_name_and_nothing_else(case):
    """Every other field changes it; the name does not."""
    other = {
        "num_q_heads": 8, "num_kv_heads": 1, "head_dim": 16, "block_size": 8, "seq_lens": (5, 10), "q_lens": (1, 2),
        "dtype": "f16", "pool_slack": 2.0, "scale": 0.5, "num_tokens": 6, "num_padding": 1, "num_blocks": 9, "order": "runs",
        "num_copies": 2, "num_layers": 1, "chained": True, "window": 3, "softcap": 50.0, "alibi": True, "sinks": True,
        "kv_dtype": "e4m3", "kv_scales": "head", "prefix": ((0, 0), (0, 4)),
    }  # fmt: skip
    needs = {"kv_scales": {"kv_dtype": "e5m2"}}
    fields = [field.name for field in dataclasses.fields(case) if field.name != "name"]
    digests = [dataclasses.replace(case, **{field: other[field]}, **needs.get(field, {})).digest for field in fields]

    assert dataclasses.replace(case, name="renamed").digest == case.digest
    assert len({case.digest, *digests}) == len(fields) + 1


def test_sharing_nothing_is_no_question_of_its_own():
    """A prefix of no tokens, said or not: the same case, and one digest."""
    said = dataclasses.replace(ATTENTION, prefix=((0, 0), (0, 0)))

    assert said == ATTENTION
    assert said.digest == ATTENTION.digest


@pytest.mark.parametrize("case", [
    dataclasses.replace(ATTENTION, window=3, softcap=50.0, alibi=True, sinks=True, kv_dtype="e5m2", kv_scales="head"),
    dataclasses.replace(ATTENTION, prefix=((0, 0), (0, 4))),
])  # fmt: skip
def test_a_case_comes_back_from_its_json(case):
    """Records and workers carry cases as JSON, pairs in tuples included."""
    assert case_from_json(json.loads(json.dumps(case.to_json()))) == case


def test_a_record_of_before_has_the_case_of_today():
    """A shape written before a field was added is the case that asks for nothing of it."""
    old = {name: value for name, value in ATTENTION.to_json().items() if name not in (
        "window", "softcap", "alibi", "sinks", "kv_dtype", "kv_scales", "prefix")}  # fmt: skip

    assert case_from_json(old) == ATTENTION


def _count_seen(case):
    """Slots that some row sees, by a walk over all rows and keys; and the keys that rows see, all together."""
    slots, keys = set(), 0
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        for position in range(seq_len - q_len, seq_len):
            for t in range(max(0, position - (case.window or seq_len) + 1), position + 1):
                owner = seq
                while case.prefix and t < case.prefix[owner][1]:
                    owner = case.prefix[owner][0]
                slots.add((owner, t))
                keys += 1
    return len(slots), keys


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 100])
@pytest.mark.parametrize("prefix", [(), ((0, 0), (0, 8), (1, 12), (0, 0)), ((0, 0), (0, 8), (0, 8), (2, 4))])
@pytest.mark.parametrize("q_lens", [(1,) * 4, (2, 3, 9, 1)])
def test_bytes_and_flops_are_those_of_the_keys_that_are_seen(window, prefix, q_lens):
    """A key behind every window costs nothing, one that several sequences share is read once, and worked on by each."""
    case = dataclasses.replace(
        ATTENTION, seq_lens=(9, 13, 20, 4), q_lens=q_lens, window=window, prefix=prefix, kv_dtype="e4m3"
    )
    slots, keys = _count_seen(case)
    rows = 4 * sum(q_lens)

    assert case.flops == 4 * 4 * 8 * keys
    assert case.traffic_bytes == 2 * slots * 2 * 8 + rows * (2 * 8 * 2 + 4) + 4 * case.seen_blocks


def test_digests_never_change():
    """They key committed results, so they are the same in every process and for ever."""
    assert [case.digest for case in CASES] == ["eed31d3bc134", "ee64940fdcbd", "25fd2d60b30d"]


@pytest.mark.parametrize("change", [{"pool_slack": 2}, {"scale": 1}], ids=str)
def test_equal_cases_have_equal_digests(change):
    """A whole number where a fraction may stand is the same case: the digest seeds its tensors."""
    whole = dataclasses.replace(ATTENTION, **change)
    fraction = dataclasses.replace(ATTENTION, **{field: float(value) for field, value in change.items()})

    assert whole == fraction
    assert whole.digest == fraction.digest


def test_operators_do_not_share_digests():
    """Two operators' cases with the same fields differ."""
    assert len({case.digest for case in CASES}) == len(CASES)
    assert {case.op for case in CASES} == set(OP_NAMES)


@pytest.mark.parametrize(
    "case",
    [*CASES, dataclasses.replace(ATTENTION, seq_lens=(), q_lens=()), dataclasses.replace(ATTENTION, scale=0.3, q_lens=(2, 3))],
    ids=repr,
)
def test_a_case_survives_json(case):
    """What a worker or a reader of records gets is the same case, digest and all."""
    back = case_from_json(json.loads(json.dumps(case.to_json())))

    assert back == case
    assert type(back) is case_type(case.op)
    assert back.digest == case.digest


def test_an_unknown_operator_names_the_known_ones():
    """A KeyError that helps."""
    with pytest.raises(KeyError, match="no operator 'atention'; there are: attention, cache_write, block_copy"):
        operator("atention")


def visible_pairs(case):
    """(query token, key) pairs that causal attention multiplies, counted one by one."""
    return sum(
        sum(key <= seq_len - q_len + token for key in range(seq_len))
        for seq_len, q_len in zip(case.seq_lens, case.q_lens, strict=True)
        for token in range(q_len)
    )


@pytest.mark.parametrize(
    ("seq_lens", "q_lens", "pairs"),
    [
        ((5, 9), (1, 1), 14),
        ((4,), (4,), 10),
        ((4,), (2,), 7),
        ((3,), (5,), 6),
        ((0,), (1,), 0),
        ((0, 7), (3, 0), 0),
        ((), (), 0),
        ((20, 1, 6), (20, 1, 9), 210 + 1 + 21),
    ],
    ids=str,
)
def test_flops_count_what_is_seen(seq_lens, q_lens, pairs):
    """Two products of head_dim multiplications and additions a visible key and query head: 4 * head_dim."""
    case = dataclasses.replace(ATTENTION, seq_lens=seq_lens, q_lens=q_lens)

    assert visible_pairs(case) == pairs
    assert case.flops == 4 * pairs * 4 * 8


def test_attention_traffic_counts_every_byte_once():
    """14 tokens of K and V; two rows of 4 heads in and out, with their LSE; the entries of 2 and 3 blocks."""
    kv = 2 * 14 * 2 * 8 * 2
    rows = 2 * 4 * (8 * 2 + 8 * 2 + 4)

    assert ATTENTION.traffic_bytes == kv + rows + 4 * (2 + 3)
    assert dataclasses.replace(ATTENTION, dtype="f32").traffic_bytes == 2 * kv + 2 * 4 * (32 + 32 + 4) + 4 * 5
    assert dataclasses.replace(ATTENTION, pool_slack=9.0).traffic_bytes == ATTENTION.traffic_bytes


def test_attention_knows_its_shapes():
    """Blocks, group, pool and query starts of a small batch with an empty and a ragged sequence."""
    case = dataclasses.replace(ATTENTION, seq_lens=(0, 4, 5), q_lens=(2, 1, 3), pool_slack=1.5)

    assert (case.group, case.num_seqs, case.num_tokens, case.max_q_len, case.max_seq_len) == (2, 3, 6, 3, 5)
    assert case.blocks_per_seq == (0, 1, 2)
    assert case.query_starts == (0, 2, 3, 6)
    assert case.num_blocks == 5 + 2  # 4.5 rounded up, and two that nobody owns
    assert case.cache_bytes == 2 * 7 * 4 * 2 * 8 * 2
    assert case.softmax_scale == 8**-0.5
    assert dataclasses.replace(case, scale=0.7).softmax_scale == 0.7


def test_cache_write_traffic():
    """Three of five tokens are written: read and written, K and V; every slot is read."""
    assert WRITE.traffic_bytes == 3 * (2 * 8 * 2) * 2 * 2 + 5 * 8
    assert WRITE.cache_bytes == 2 * 8 * 4 * 2 * 8 * 2
    assert WRITE.flops == 0


def test_block_copy_traffic():
    """Three blocks read and written, K and V, in two layers; the list once."""
    assert COPY.block_bytes == 4 * 2 * 8 * 2
    assert COPY.traffic_bytes == 3 * 128 * 2 * 2 * 2 + 3 * 8
    assert COPY.cache_bytes == 2 * 2 * 8 * 128
    assert COPY.flops == 0


@pytest.mark.parametrize(
    ("copies", "ranges"),
    [
        ([], []),
        ([(0, 1), (2, 3)], [(0, 2)]),
        ([(0, 1), (0, 2)], [(0, 2)]),  # read twice: no matter
        ([(0, 1), (1, 2)], [(0, 1), (1, 2)]),  # reads what was written
        ([(0, 1), (2, 0)], [(0, 1), (1, 2)]),  # writes what was read
        ([(0, 1), (2, 1)], [(0, 1), (1, 2)]),  # writes twice
        ([(0, 1), (1, 2), (3, 4), (2, 5)], [(0, 1), (1, 3), (3, 4)]),
        ([(3, 3), (1, 2)], [(0, 2)]),
    ],
    ids=str,
)
def test_waves_may_run_in_any_order(copies, ranges):
    """A wave ends before a pair that depends on one in it."""
    array = np.array(copies, dtype=np.int32).reshape(-1, 2)

    assert waves(array) == ranges


def test_waves_equal_the_list_in_order():
    """Each wave done at once, from a copy, gives what the list gives one by one."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        copies = rng.integers(0, 6, (rng.integers(0, 9), 2)).astype(np.int32)
        one_by_one, at_once = np.arange(6), np.arange(6)
        for source, destination in copies:
            one_by_one[destination] = one_by_one[source]
        for begin, end in waves(copies):
            backwards = copies[begin:end][::-1]
            at_once[backwards[:, 1]] = at_once[backwards[:, 0]]

        assert at_once.tolist() == one_by_one.tolist()

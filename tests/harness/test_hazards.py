"""Inputs that make faults show: shuffled blocks, poison in whatever must not be read, needles where kernels err."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from cases import SUITES
from harness import hazards as hz
from harness.hazards import NEEDLES, PLAIN, TIMED, Hazards
from harness.ops import operator
from harness.ops.attention import AttentionCase
from harness.ops.block_copy import BlockCopyCase, waves
from harness.ops.cache_write import CacheWriteCase
from harness.ops.layouts import CONTIGUOUS, HND
from harness.ops.needles import needle_positions
from impls import torch_cache_write

FAMILIES = (PLAIN, NEEDLES, TIMED)
DECODE = AttentionCase(
    name="some.decode", num_q_heads=8, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(1, 16, 17, 150, 0, 32)
)
CHUNKED = dataclasses.replace(DECODE, name="some.chunked", seq_lens=(150, 40, 5), q_lens=(6, 40, 9))
WRITE = CacheWriteCase(name="some.write", num_kv_heads=2, head_dim=8, block_size=4, num_tokens=40, num_padding=7, num_blocks=16)
COPY = BlockCopyCase(name="some.copy", num_kv_heads=2, head_dim=8, block_size=4, num_copies=6, num_layers=2, num_blocks=16)


def build(case, family=PLAIN, layers=1):
    return operator(case.op).build(case, family, layers=layers, device="cpu")


def tensors(inputs):
    """Every tensor of some inputs, a list a layer."""
    if hasattr(inputs, "sets"):
        return [[caches, inputs.step.copies] for caches in inputs.sets]
    if hasattr(inputs.step, "slot_mapping"):
        return [[*layer, inputs.step.slot_mapping] for layer in inputs.layers]
    return [[layer.query, layer.key, layer.value, inputs.step.block_tables] for layer in inputs.layers]


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(one, other):
    return torch.equal(bits(one), bits(other))


def slots_in_use(case, step):
    """[num_blocks, block_size] bool, filled token by token."""
    used = torch.zeros(case.num_blocks, case.block_size, dtype=torch.bool)
    for seq, seq_len in enumerate(case.seq_lens):
        for token in range(seq_len):
            used[step.host_block_tables[seq, token // case.block_size], token % case.block_size] = True
    return used


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("case", [DECODE, CHUNKED, WRITE, COPY], ids=str)
def test_equal_cases_give_equal_bytes(case, family):
    """A record can be made again: whoever builds the case gets the same tensors, whatever its name."""
    one, other = build(case, family, layers=2), build(dataclasses.replace(case, name="renamed"), family, layers=2)

    for left, right in zip(tensors(one), tensors(other), strict=True):
        assert all(same(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("case", [DECODE, CHUNKED, WRITE, COPY], ids=str)
def test_layers_and_families_differ(case):
    """Nothing that a launch remembers of one set is right for another."""
    sets = [layer[:-1] for family in FAMILIES for layer in tensors(build(case, family, layers=2))]

    for index, one in enumerate(sets):
        for other in sets[:index]:
            assert not any(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("case", [DECODE, CHUNKED, WRITE, COPY], ids=str)
def test_families_differ_in_their_tables(case):
    """A plan that is kept from one batch to the next reads the wrong blocks."""
    tables = [tensors(build(case, family))[0][-1] for family in FAMILIES]

    assert not any(same(one, other) for one, other in [(tables[0], tables[1]), (tables[0], tables[2]), (tables[1], tables[2])])


@pytest.mark.parametrize("blocks_per_seq", [(3, 1, 0, 5), (0,), (), (1,) * 50, (40,)], ids=str)
def test_blocks_are_dealt_disjoint(blocks_per_seq):
    """No block has two owners; every row has an entry past its end, and unused ones name a block that nobody owns."""
    num_blocks = sum(blocks_per_seq) + 2
    tables = hz.deal_blocks(blocks_per_seq, num_blocks, np.random.default_rng(3))
    owned = [block for row, count in zip(tables, blocks_per_seq, strict=True) for block in row[:count].tolist()]
    unused = {block for row, count in zip(tables, blocks_per_seq, strict=True) for block in row[count:].tolist()}

    assert tables.dtype == np.int32
    assert tables.shape == (len(blocks_per_seq), max(blocks_per_seq, default=0) + 1)
    assert len(set(owned)) == len(owned) == sum(blocks_per_seq)
    assert all(0 <= block < num_blocks for block in [*owned, *unused])
    assert not unused & set(owned)


def test_blocks_are_dealt_shuffled():
    """Neighbours in a sequence are not neighbours in the pool."""
    row = hz.deal_blocks((1000,), 1300, np.random.default_rng(0))[0, :1000].astype(int)

    assert np.count_nonzero(np.diff(row) == 1) < 10
    assert abs(np.corrcoef(row, np.arange(1000))[0, 1]) < 0.15


@pytest.mark.parametrize("case", [DECODE, CHUNKED], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_slot_that_must_not_be_read_is_poisoned(case, family):
    """NaN in K and V, or no V of an ordinary size, each kind somewhere; every slot in use holds an ordinary number."""
    inputs = build(case, family)
    used = slots_in_use(case, inputs.step)
    key, value = (pool.transpose(1, 2)[~used] for pool in (inputs.layers[0].key, inputs.layers[0].value))
    ordinary = [pool.transpose(1, 2)[used] for pool in (inputs.layers[0].key, inputs.layers[0].value)]

    assert key.numel() > 0
    if family.fill == "nan":
        assert key.isnan().all()
        assert value.isnan().all()
    else:
        largest = torch.finfo(key.dtype).max
        assert not key.isnan().any()
        assert (value.abs() >= 29000).all()
        for pool in (key, value):
            kinds = set(pool[pool.abs() > 1000].tolist())
            assert {math.inf, -math.inf, float(torch.tensor(65504.0).to(key.dtype))} <= kinds
            assert kinds & {largest, -largest}
        assert (key.abs() < 300).all(-1).any()
    assert all(part.isfinite().all() for part in ordinary)
    assert all((part.abs() < (8000 if family.outlier else 100)).all() for part in ordinary)
    assert inputs.layers[0].query.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_unpaged_cache_holds_the_same_tokens_and_poison(family):
    """CONTIGUOUS is gathered from the blocks, one token after the other; past a sequence's end lies what lies in the pool."""
    inputs = build(DECODE, family)
    staged = inputs.stage(CONTIGUOUS)
    tables = inputs.step.host_block_tables

    for pool, cache in zip((inputs.layers[0].key, inputs.layers[0].value), staged.caches[0], strict=True):
        assert cache.shape == (6, 150, 2, 64)
        for seq, seq_len in enumerate(DECODE.seq_lens):
            in_blocks = min(-(-seq_len // 16) * 16, 150)
            for token in range(in_blocks):
                assert same(cache[seq, token], pool[tables[seq, token // 16], :, token % 16].contiguous())
            rest = cache[seq, in_blocks:]
            assert rest.isnan().all() if family.fill == "nan" else (rest > 29000).all()


def weights_of(case, layer, step, seq, token, head, extra=0):
    """Softmax of one row over its visible keys, and over `extra` keys past them."""
    num_visible = case.seq_lens[seq] - case.q_lens[seq] + token + 1 + extra
    positions = np.arange(num_visible)
    blocks = step.host_block_tables[seq, positions // case.block_size]
    keys = layer.key[blocks.tolist(), head // case.group, (positions % case.block_size).tolist()]
    query = layer.query[case.query_starts[seq] + token, head]
    return torch.softmax(case.softmax_scale * (keys.double() @ query.double()), 0)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("seq_lens", [(1, 2, 16, 17, 150, 3000), (1000,) * 8], ids=["ragged", "alike"])
def test_needles_carry_most_of_the_weight(seq_lens, dtype):
    """In most rows one key outweighs all others, and no needle makes a score overflow."""
    case = dataclasses.replace(DECODE, seq_lens=seq_lens, q_lens=(), dtype=dtype)
    inputs = build(case, NEEDLES)
    largest = np.array(
        [
            [float(weights_of(case, inputs.layers[0], inputs.step, seq, 0, head).max()) for head in range(8)]
            for seq in range(len(seq_lens))
        ]
    )

    assert (largest[np.array(seq_lens) > 200] > 0.9).mean() > 0.6
    assert (largest > 0.5).mean() > 0.6
    assert np.isfinite(largest).all()


def test_plain_inputs_let_every_token_count():
    """No key of a plain row carries more than a few times its share."""
    case = dataclasses.replace(DECODE, seq_lens=(2000,) * 4, q_lens=())
    inputs = build(case, PLAIN)
    largest = [weights_of(case, inputs.layers[0], inputs.step, seq, 0, head).max() for seq in range(4) for head in range(8)]

    assert max(largest) < 0.1


@pytest.mark.parametrize("num_visible", [1, 2, 15, 16, 17, 24, 100, 1000])
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_needles_reach_every_edge(num_visible, block_size):
    """Over enough rows: first and last token, both sides of the first and last block edge, and of cuts in 2, 4 and 8."""
    rows = 2 * (12 + -(-num_visible // block_size))
    positions = needle_positions(num_visible, block_size, rows, start=0)
    last_edge = (num_visible - 1) // block_size * block_size
    edges = {0, num_visible - 1, block_size - 1, block_size, last_edge, last_edge - 1}
    edges |= {num_visible // splits - below for splits in (2, 4, 8) for below in (0, 1)}

    assert positions.min() >= 0
    assert positions.max() < num_visible
    assert {edge for edge in edges if 0 <= edge < num_visible} <= set(positions.tolist())
    assert set((positions // block_size).tolist()) == set(range(-(-num_visible // block_size)))


def test_needles_rotate_between_sequences():
    """A batch of short heads still meets edges that one sequence alone would not."""
    one = needle_positions(1000, 16, 8, start=0)
    next_one = needle_positions(1000, 16, 8, start=8)

    assert set(one.tolist()) != set(next_one.tolist())


def test_a_decoy_lies_just_past_the_end():
    """Whoever reads one token too many gives most of some row's weight to a value of thirty thousand."""
    case = dataclasses.replace(DECODE, seq_lens=(150, 33, 7), q_lens=())
    inputs = build(case, NEEDLES)

    for seq in range(3):
        for kv_head in range(2):
            weight = weights_of(case, inputs.layers[0], inputs.step, seq, 0, kv_head * case.group, extra=1)[-1]
            assert weight * hz.DECOY_VALUE > 100


def test_a_chunk_of_queries_keeps_most_keys_plain():
    """Needles take one key in eight at most, but for the decoys, or the needle family would test needles alone."""
    case = dataclasses.replace(DECODE, seq_lens=(512,), q_lens=(512,))
    plain_keys = dataclasses.replace(NEEDLES, name="no needles", needles=False)
    with_needles, without = (build(case, family).layers[0].key for family in (NEEDLES, plain_keys))
    changed = (bits(with_needles) != bits(without)).any(-1)

    assert 0.01 < changed.sum() / (512 * 2) < 1 / 8 + 0.01


def test_needles_only_touch_slots_of_their_own_sequence():
    """A needle never lands in a foreign block, nor past the one slot behind the end."""
    plain_keys = dataclasses.replace(NEEDLES, name="no needles", needles=False)
    inputs = build(DECODE, NEEDLES)
    changed = (bits(inputs.layers[0].key) != bits(build(DECODE, plain_keys).layers[0].key)).any(-1).any(1)
    past_end = {
        (int(inputs.step.host_block_tables[seq, n // 16]), n % 16) for seq, n in enumerate(DECODE.seq_lens) if n % 16
    }

    outside = {tuple(slot) for slot in (changed & ~slots_in_use(DECODE, inputs.step)).nonzero().tolist()}
    assert outside == past_end


@pytest.mark.parametrize("family", [PLAIN, NEEDLES], ids=lambda family: family.name)
@pytest.mark.parametrize("case", SUITES["edges"], ids=str)
def test_every_edge_can_be_built_and_judged(case, family):
    """Its tensors can be made, soiled and judged; outputs that nobody wrote are found, unless there are none."""
    inputs = build(case, family)
    staged = inputs.stage(HND)
    staged.soil(0)
    verdict = staged.judge(0, frozenset())
    to_do = {
        "attention": lambda: case.num_tokens,
        "cache_write": lambda: case.num_tokens - case.num_padding,
        "block_copy": lambda: case.num_copies,
    }[case.op]()

    assert verdict.passed == (to_do == 0)
    assert verdict.passed or "never written" in verdict.reason or "differ" in verdict.reason


def test_a_checksum_counts_every_word_in_use():
    """The sum over the tokens, as 32-bit words, one by one; a single changed bit changes it."""
    inputs = build(DECODE)
    layer, tables = inputs.layers[0], inputs.step.host_block_tables
    total = 0
    for pool in (layer.key, layer.value):
        for seq, seq_len in enumerate(DECODE.seq_lens):
            for token in range(seq_len):
                words = pool[tables[seq, token // 16], :, token % 16].contiguous().view(torch.int32)
                total += int(words.sum(dtype=torch.int64))

    assert inputs.checksum(0) == total % 2**32
    changed = build(DECODE)
    bits(changed.layers[0].key)[tables[3, 2], 1, 5, 7] ^= 1
    assert changed.checksum(0) != inputs.checksum(0)


def test_scattered_writes_go_anywhere_and_runs_in_order():
    """Slots are distinct; padding lies among the tokens; a run fills one block after the other."""
    scattered = build(WRITE).step.host_slot_mapping
    runs = build(dataclasses.replace(WRITE, order="runs")).step.host_slot_mapping

    for slots in (scattered, runs):
        assert slots.dtype == np.int64
        assert np.count_nonzero(slots == -1) == 7
        written = slots[slots >= 0]
        assert len(set(written.tolist())) == 33
        assert written.max() < 16 * 4
        assert (slots == -1).nonzero()[0].tolist() != list(range(33, 40))
    in_order = runs[runs >= 0]
    assert all(b == a + 1 for a, b in itertools.pairwise(in_order) if a % 4 != 3)
    assert not all(b == a + 1 for a, b in itertools.pairwise(scattered))


ARITHMETIC = {
    "nothing": lambda new: new,
    "clamped": lambda new: new.clamp(-1000, 1000),
    "not NaN": lambda new: new.nan_to_num(0.0, math.inf, -math.inf),
    "another NaN": lambda new: new.where(~new.isnan(), math.nan),
    "no subnormals": lambda new: new.where(new.abs() >= torch.finfo(new.dtype).smallest_normal, new * 0),
    "no -0": lambda new: new + 0.0,
}


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("what", ARITHMETIC)
def test_a_write_is_a_copy(what, dtype):
    """Arithmetic that ordinary numbers pass unharmed changes some bit of what is written."""
    case = dataclasses.replace(WRITE, dtype=dtype)
    staged = build(case).stage(HND)
    prepared = torch_cache_write.prepare(operator(case.op).spec(case, HND, "cpu", {}))
    prepared.plan(staged.step)
    key, value, *caches = staged.arguments(0)
    prepared.launch(key, ARITHMETIC[what](value), *caches)

    assert staged.judge(0, frozenset()).passed == (what == "nothing")


def test_copies_are_disjoint_unless_chained():
    """Distinct blocks make one wave; chained lists need another for every other pair."""
    plain = build(COPY).step.host_copies
    chained = build(dataclasses.replace(COPY, chained=True)).step.host_copies

    assert plain.shape == chained.shape == (6, 2)
    assert len(set(plain.flatten().tolist())) == 12
    assert waves(plain) == [(0, 6)]
    assert [int(chained[i + 1, 0]) for i in (0, 2, 4)] == [int(chained[i, 1]) for i in (0, 2, 4)]
    assert len(waves(chained)) > 1


@pytest.mark.parametrize("case", [WRITE, COPY], ids=str)
def test_a_launch_changes_the_staged_copy_only(case):
    """What is there to be compared with stays as it was, and soiling puts everything back."""
    inputs = build(case)
    before = [tensor.clone() for tensor in tensors(inputs)[0]]
    staged = inputs.stage(HND)
    caches = staged.arguments(0)[2:] if case is WRITE else [c for part in staged.arguments(0) for c in part]
    for cache in caches:
        cache.fill_(math.pi)

    assert all(same(a, b) for a, b in zip(tensors(inputs)[0], before, strict=True))
    staged.soil(0)
    staged.judge(0, frozenset())
    assert not any((cache == torch.tensor(math.pi).to(cache.dtype)).any() for cache in caches)


def test_a_family_of_hazards_has_a_known_fill():
    """A typing slip in a fill is told."""
    with pytest.raises(ValueError, match="fill must be 'nan', 'mixed' or 'stale' \\(got 'zero'\\)"):
        Hazards(name="typo", fill="zero", needles=False, seed=9)


def test_seeds_are_all_different():
    """Of layers, families and cases: 300 layers of one never meet the next one's."""
    seeds = [
        hz.seed_of(case.digest, family, layer) for case in (DECODE, CHUNKED) for family in FAMILIES for layer in range(300)
    ]

    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_unused_entries_name_a_live_block_of_another_sequence():
    """In the needle family; where a sequence is alone they name what nobody owns, as in the others."""
    blocks_per_seq = (3, 0, 1, 5)
    tables = hz.deal_blocks(blocks_per_seq, 12, np.random.default_rng(3))
    foreign = hz.foreign_entries(tables, blocks_per_seq)
    alone = hz.deal_blocks((0, 4), 12, np.random.default_rng(3))

    for seq, count in enumerate(blocks_per_seq):
        assert (foreign[seq, :count] == tables[seq, :count]).all()
        others = {int(b) for other, n in enumerate(blocks_per_seq) if other != seq for b in tables[other, :n]}
        assert set(foreign[seq, count:].tolist()) <= others
    assert (hz.foreign_entries(alone, (0, 4))[1] == alone[1]).all()


def test_wild_entries_name_no_block():
    """-1, one past the last, and the largest int32, in unused entries and nowhere else."""
    blocks_per_seq = (3, 0, 1)
    tables = hz.deal_blocks(blocks_per_seq, 9, np.random.default_rng(3))
    wild = hz.wild_entries(tables, blocks_per_seq, 9)

    unused = np.arange(4)[None, :] >= np.array(blocks_per_seq)[:, None]
    assert wild.dtype == np.int32
    assert set(wild[unused].tolist()) == {-1, 9, 2**31 - 1}
    assert (wild[~unused] == tables[~unused]).all()


def test_the_first_slot_past_the_last_block_holds_a_decoy():
    """Whoever reads a block too many gives a key of another sequence much of some row's weight."""
    case = dataclasses.replace(DECODE, seq_lens=(150, 32, 64), q_lens=())
    inputs = build(case, NEEDLES)
    query = inputs.layers[0].query.double()
    scores = [keys_up_to(case, inputs, seq, head) @ query[seq, head] for seq in range(3) for head in (0, 4)]
    weights = [torch.softmax(case.softmax_scale * score, 0) for score in scores]

    assert sum(bool(weight[-1] > 0.5) for weight in weights) >= 3


def keys_up_to(case, inputs, seq, head):
    """Keys of a sequence as its row sees them, and the first one of the block that its first unused entry names."""
    positions = np.append(np.arange(case.seq_lens[seq]), case.blocks_per_seq[seq] * case.block_size)
    blocks = inputs.step.host_block_tables[seq, positions // case.block_size]
    return inputs.layers[0].key[blocks.tolist(), head // case.group, (positions % case.block_size).tolist()].double()


LONG = dataclasses.replace(DECODE, name="some.long", seq_lens=(700, 3), q_lens=())


@pytest.mark.parametrize("case", [DECODE, CHUNKED, LONG], ids=str)
def test_rounds_of_needles_reach_every_block(case):
    """As many sets as are asked for, and no more: together they have a needle in every block of every sequence."""
    rounds = operator("attention").rounds(case, NEEDLES)
    inputs = build(case, NEEDLES, layers=rounds)

    assert inputs.needles == {(seq, block) for seq, count in enumerate(case.blocks_per_seq) for block in range(count)}
    assert rounds == 1 or len(build(case, NEEDLES, layers=rounds - 1).needles) < len(inputs.needles)
    assert operator("attention").rounds(case, PLAIN) == 1


def test_poison_in_parts_is_the_same(monkeypatch):
    """A pool larger than what is poisoned at a time gets the same bytes."""
    whole = build(DECODE, NEEDLES).layers[0]
    monkeypatch.setattr(hz, "POISON_BYTES", 1000)
    parts = build(DECODE, NEEDLES).layers[0]

    assert same(whole.key, parts.key)
    assert same(whole.value, parts.value)


@pytest.mark.parametrize("scale", [None, -0.3, 2.0])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_one_head_lies_far_from_all_others(dtype, scale):
    """Without a maximum subtracted its weights are 0 in float32; with it every token still counts as in any other head."""
    case = AttentionCase(
        name="some.far", num_q_heads=6, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(40, 200, 0), dtype=dtype,
        scale=scale,
    )
    inputs = build(case, PLAIN)
    truth = inputs.truth(0)
    far = truth.lse[1, 3:]

    assert (far < -130).all()
    assert (far.float().exp() == 0).all()
    assert (truth.lse[0].abs() < 100).all()
    assert (truth.out[1, 3:].norm(dim=-1) > 100 * truth.out[1, :3].norm(dim=-1)).all()
    assert inputs.layers[0].value[inputs.step.block_tables[1, 0], 1].abs().max() < 8000


def test_a_single_head_stays_as_it_is():
    """Where there is one pair of sequence and KV head, it is the one on which every token counts."""
    case = AttentionCase(name="some.one", num_q_heads=4, num_kv_heads=1, head_dim=64, block_size=16, seq_lens=(0, 40))

    assert build(case, PLAIN).truth(0).lse[1].abs().max() < 20

"""Which prefixes cuda.tensor_core finds worth sharing, and what it tells its kernels; no GPU is needed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from harness.ops.layouts import HND
from impls.cuda import prefix
from impls.cuda.attention import Shape
from impls.cuda.builds import SHARED_LIMIT
from impls.cuda.prefix import may_share
from impls.cuda.runs import Cut, Run, find_runs, list_pieces
from tests.cuda.test_tensor_core import SMS, SPEC, spec_of

BLOCK = 16


def tables_of(*rows):
    """Tables of these block ids, filled up with ids that nobody else has."""
    longest = max(map(len, rows)) + 1
    made = np.arange(len(rows) * longest, dtype=np.int32).reshape(len(rows), longest) + 10_000
    for table, row in zip(made, rows, strict=True):
        table[: len(row)] = row
    return made


def runs_of(tables, most=None, unit=BLOCK):
    return find_runs(tables, most or [tables.shape[1] * BLOCK] * len(tables), BLOCK, unit)


def test_the_same_first_blocks_are_one_run():
    """Of all sequences that have them, up to the first that differs."""
    (run,) = runs_of(tables_of(*[[1, 2, 3, 4, 90 + seq] for seq in range(4)]))

    assert run == Run(seqs=(0, 1, 2, 3), begin=0, end=4 * BLOCK, depth=0)


def test_the_same_blocks_at_another_place_are_none():
    """A position is part of a key in models that rotate it, and of the mask."""
    assert runs_of(tables_of([1, 2, 3], [9, 1, 2], [8, 1, 2], [7, 1, 2])) == []


def test_groups_and_levels():
    """Two groups; in one of them, most go on together."""
    system, long = [1, 2], [3, 4, 5]
    tables = tables_of(*[system] * 2, *[system + long] * 4, *[[6, 7, 8]] * 3)
    runs = runs_of(tables)

    assert runs == [
        Run(seqs=(0, 1, 2, 3, 4, 5), begin=0, end=2 * BLOCK, depth=0),
        Run(seqs=(2, 3, 4, 5), begin=2 * BLOCK, end=5 * BLOCK, depth=1),
        Run(seqs=(6, 7, 8), begin=0, end=3 * BLOCK, depth=0),
    ]


def test_no_run_goes_past_what_all_query_tokens_see():
    """The last tokens of a sequence are its own, the first query token among them."""
    tables = tables_of(*[[1, 2, 3, 4]] * 4)

    assert [run.end for run in runs_of(tables, most=[64, 50, 64, 64])] == [48, 64]  # three go on
    assert runs_of(tables, most=[64, 15, 0, 3]) == []


def test_runs_are_whole_units():
    """Of tiles and blocks."""
    assert [run.end for run in runs_of(tables_of(*[[1, 2, 3, 4, 5]] * 4), unit=2 * BLOCK)] == [4 * BLOCK]


def test_two_sequences_are_not_worth_a_launch():
    """Unless it is asked for."""
    tables = tables_of([1, 2, 3], [1, 2, 3])

    assert runs_of(tables) == []
    assert find_runs(tables, [64, 64], BLOCK, BLOCK, always=True) == [Run(seqs=(0, 1), begin=0, end=3 * BLOCK, depth=0)]


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_a_sequence_follow_one_another(seed):
    """From its first token on, at depths 0, 1, ..., over blocks that its run's first sequence has at the same place."""
    rng = np.random.default_rng(seed)
    tables = np.arange(24 * 12, dtype=np.int32).reshape(24, 12)
    for seq in range(1, 24):
        shared = rng.integers(0, 12)
        tables[seq, :shared] = tables[rng.integers(0, seq), :shared]
    reached, depths = [0] * 24, [0] * 24
    for run in runs_of(tables, most=rng.integers(1, 12 * BLOCK, 24).tolist()):
        blocks = slice(run.begin // BLOCK, run.end // BLOCK)
        for seq in run.seqs:
            assert (reached[seq], depths[seq]) == (run.begin, run.depth)
            assert (tables[seq, blocks] == tables[run.seqs[0], blocks]).all()
            reached[seq], depths[seq] = run.end, run.depth + 1


@pytest.mark.parametrize(
    ("spec", "pays"),
    [
        pytest.param(spec_of(64, 8192), True, id="many long sequences"),
        pytest.param(spec_of(1, 131072), False, id="one"),
        pytest.param(spec_of(16, 64), False, id="short ones"),
        pytest.param(spec_of(64, 8192, window=1024), False, id="a window"),
        pytest.param(spec_of(64, 8192, alibi=True), False, id="distances"),
        pytest.param(spec_of(64, 8192, softcap=30.0, sinks=True), True, id="what is the same for all rows"),
        pytest.param(spec_of(2, 64, params={"prefix": "always"}), True, id="as asked"),
        pytest.param(spec_of(64, 8192, params={"prefix": "always"}, alibi=True), False, id="asked where it cannot be"),
        pytest.param(spec_of(64, 8192, params={"prefix": "never"}), False, id="not as asked"),
    ],
)
def test_sharing_is_looked_for_where_it_could_pay(spec, pays):
    """And where all rows see a run alike."""
    assert may_share(spec) is pays


class Step:
    """What `plan` looks at; one query token a sequence unless said otherwise."""

    def __init__(self, tables, seq_lens, q_lens=None):
        self.host_block_tables, self.host_seq_lens = tables, np.array(seq_lens, np.int32)
        self.host_query_start_loc = np.cumsum([0, *(q_lens or [1] * len(seq_lens))]).astype(np.int32)


@pytest.fixture
def prefixes(monkeypatch):
    """Of up to 24 sequences of 8 blocks, any run worth a launch; nothing is compiled, nothing told."""
    for name in ("_prepare", "_tell"):
        monkeypatch.setattr(prefix.Prefixes, name, lambda *_: None)
    return prefix.Prefixes(spec_of(24, 8 * BLOCK, params={"prefix": "always"}), SMS, "sm_90")


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_looked_at_whatever_the_one_before_was(prefixes, seed):
    """Tables and lengths that change in place: what is found is what a look at all of them finds."""
    rng = np.random.default_rng(seed)
    tables = np.arange(12 * 8, dtype=np.int32).reshape(12, 8)
    for _ in range(30):
        change, seq = rng.integers(4), rng.integers(12)
        if change == 0:
            tables[seq] = np.arange(8) + 8 * seq
        elif change == 1:
            tables[seq, : rng.integers(9)] = tables[rng.integers(12), 0]
        elif change == 2:
            tables[seq] = tables[rng.integers(12)]
        step = Step(tables[: rng.integers(1, 13)], [])
        step = Step(step.host_block_tables, rng.integers(0, 8 * BLOCK + 1, len(step.host_block_tables)).tolist())
        prefixes.plan(step)

        most = np.maximum(step.host_seq_lens - 1, 0).tolist()
        assert prefixes.runs == find_runs(step.host_block_tables, most, BLOCK, prefixes._unit, always=True)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([Step(tables_of([1, 2], [3, 2]), [40, 40])], id="other first blocks"),
        pytest.param([Step(tables_of([1, 2], [3, 2]), [40, 40]), Step(tables_of([1, 2], [3, 9]), [41, 41])], id="a step later"),
        pytest.param([Step(tables_of([7, 1], [3, 2], [7, 1]), [0, 40, 40])], id="an empty sequence's unused entry"),
        pytest.param([Step(tables_of([5, 2], [0, 0], [0, 0]), [40, 1, 1])], id="padding of a batch"),
        pytest.param([Step(tables_of([1, 2], [1, 3]), [17, 16], [2, 1])], id="a block that not all query tokens see"),
        pytest.param([Step(tables_of([1]), [40])], id="one sequence"),
        pytest.param([Step(np.zeros((2, 0), np.int32), [0, 0]), Step(np.zeros((0, 3), np.int32), [])], id="no tables"),
    ],
)
def test_what_cannot_be_shared_is_not_searched(prefixes, monkeypatch, steps):
    """First blocks say so."""
    monkeypatch.setattr(prefix, "find_runs", lambda *_: pytest.fail("tables are searched"))
    for step in steps:
        assert prefixes.plan(step) is False


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, ""),
        ({"opening": "planned", "closing": "fences", "team": 0, "tile": 16}, ""),
        ({"opening": "quick"}, ", by two launches not told of opening=quick"),
        ({"closing": "release", "opening": "quick", "team": 4},
         ", by two launches not told of team=4, opening=quick, closing=release"),
    ],
    ids=["nothing", "what is so anyway", "an opening", "several"],
)  # fmt: skip
def test_what_is_set_and_does_nothing_is_in_the_ledger(monkeypatch, params, says):
    """Two launches with an opening of their own would pass for the one that was asked for."""
    for name in ("_prepare", "_tell"):
        monkeypatch.setattr(prefix.Prefixes, name, lambda *_: None)
    made = prefix.Prefixes(spec_of(24, 8 * BLOCK, params={"prefix": "always", **params}), SMS, "sm_90")

    assert made.plan(Step(tables_of(*[[1, 2, 3]] * 3), [50] * 3))
    assert made.remark == f"1 runs of blocks read once{says}"


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("arch", "changes"), [("sm_80", {}), ("sm_90", {"softcap": 30.0})], ids=["sm_80", "softcap"])
def test_as_many_query_tokens_as_a_crew_holds(heads, head_dim, arch, changes):
    """128 rows of up to 128 elements, half as many of longer ones, in what a CTA has; shares are cut on the device."""
    spec = spec_of(64, 8192, num_q_heads=heads, head_dim=head_dim, layout=HND, **changes)
    found = prefix.Prefixes(spec, SMS, arch)

    assert found._crews.rows == (128 if head_dim <= 128 else 64)
    assert found._cut == Cut(at_once=found._crews.rows // spec.group)
    assert prefix.general.cta_bytes(Shape.of(spec), found._crews) < SHARED_LIMIT[arch]


def test_few_sequences_make_small_parts():
    """A warp's rows, where all query tokens together have no more."""
    found = prefix.Prefixes(dataclasses.replace(SPEC, max_num_seqs=8, max_num_tokens=8), SMS, "sm_80")

    assert (found._crews.rows, found._crews.crew) == (32, 1)


@pytest.mark.parametrize(
    ("changes", "arch", "able"),
    [
        pytest.param({}, "sm_90", True, id="Hopper"),
        pytest.param({"sinks": True}, "sm_90", True, id="sinks, which are the second launch's"),
        pytest.param({"head_dim": 256}, "sm_90", True, id="long rows"),
        pytest.param({"num_q_heads": 568}, "sm_90", True, id="a group of 71"),
        pytest.param({"head_dim": 96}, "sm_90", False, id="rows of another length"),
        pytest.param({"kv_dtype": "e4m3"}, "sm_90", False, id="an 8-bit cache"),
        pytest.param({"softcap": 30.0}, "sm_90", False, id="softcap"),
        pytest.param({"num_q_heads": 1032}, "sm_90", False, id="a group of 129"),
        pytest.param({}, "sm_80", False, id="older"),
        pytest.param({}, "sm_100", False, id="newer"),
    ],
)
def test_warpgroups_take_runs_where_they_can(changes, arch, able):
    """As cuda.prefill; the others are left to warps."""
    assert (prefix.plan_pieces(Shape.of(spec_of(64, 8192, **changes)), arch) is not None) is able


# How runs are cut

CUT = Cut(at_once=32, tile=128, columns=16)


@pytest.mark.parametrize(
    ("tokens", "queries", "lengths"),
    [
        pytest.param([32768], [64], [4096], id="two parts, eight pieces each: as many as there are CTAs"),
        pytest.param([8192] * 8, [8] * 8, [4096] * 8, id="eight groups"),
        pytest.param([2048], [256], [1024], id="eight parts"),
        pytest.param([100], [3], [128], id="less than a tile"),
        pytest.param([8192], [16], [512], id="one part"),
        pytest.param([2048, *[6144] * 8], [64, *[8] * 8], [2048, *[2048] * 8], id="levels"),
        pytest.param([], [], [], id="nothing"),
    ],
)
def test_pieces_fill_the_device_evenly(tokens, queries, lengths):
    """For 16 CTAs a KV head and 32 query tokens a piece, in tiles of 128."""
    assert CUT.lengths(tokens, queries) == lengths


def runs_at_random(seed):
    """Runs of sequences of 0 to 3 query tokens, and where these begin."""
    rng = np.random.default_rng(seed)
    tables = np.arange(24 * 80, dtype=np.int32).reshape(24, 80)
    for seq in range(1, 24):
        shared = rng.integers(0, 80)
        tables[seq, :shared] = tables[rng.integers(0, seq), :shared]
    q_lens = rng.integers(0, 4, 24)
    most = np.where(q_lens > 0, rng.integers(1, 80 * BLOCK, 24), 0)
    return find_runs(tables, most.tolist(), BLOCK, BLOCK, always=True), np.concatenate([[0], q_lens.cumsum()])


@pytest.mark.parametrize("cut", [CUT, Cut(at_once=5), Cut(at_once=3, tile=64, columns=1)], ids=["fine", "uncut", "coarse"])
@pytest.mark.parametrize("seed", range(10))
def test_every_query_token_meets_every_shared_token_once(cut, seed):
    """Following a sequence's part of the list, its pieces are its runs, each once; and there is room for all of them."""
    runs, starts = runs_at_random(seed)
    made = list_pieces(runs, starts, cut)
    num_tokens = int(starts[-1])

    assert (np.diff(made.starts) <= cut.at_once).all()
    assert made.starts[-1] == len(made.tokens) <= cut.most_places(num_tokens)
    assert len(made.left) <= cut.most_places(num_tokens)
    assert len(made.ends) <= cut.most_pieces(num_tokens, 24)
    for seq in range(24):
        left = made.left[made.lists[seq] : made.lists[seq + 1]]
        for i, token in enumerate(range(*starts[seq : seq + 2])):
            pieces = np.searchsorted(made.starts, left + i, side="right") - 1
            seen = sorted((made.firsts[piece], made.ends[piece]) for piece in pieces)
            assert (made.tokens[left + i] == token).all()
            assert [first for first, _ in seen] == [0, *(end for _, end in seen)][: len(seen)]
            assert (seen[-1][1] if seen else 0) == made.own_firsts[seq]

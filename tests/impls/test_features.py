"""Windows, soft caps, ALiBi, sinks, quantised caches and shared prefixes: every implementation on a CPU that declares them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from harness import hazards as hz
from harness.guards import changed
from harness.hazards import NEEDLES, PLAIN
from harness.ops import operator
from harness.ops.attention import AttentionCase
from harness.ops.features import FEATURES
from harness.ops.layer_tensors import slopes
from harness.ops.layouts import HND, NHD
from harness.registry import Limits, Registry
from impls import IMPLS

ENTRIES = Registry(IMPLS).entries(("numpy.dense", "numpy.online", "torch.gather", "torch.blocked"))
CASE = AttentionCase(
    name="some.features", num_q_heads=8, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(150, 40, 5, 0, 33, 200),
    q_lens=(6, 1, 9, 1, 2, 3), dtype="f16",
)  # fmt: skip
PREFIX = ((0, 0), (0, 32), (0, 0), (3, 0), (1, 32), (0, 144))
ASKED = {
    "window 1": {"window": 1},
    "window 16, decode": {"window": 16, "q_lens": ()},
    "window 33": {"window": 33},
    "window, batches of three and four blocks": {"window": 40, "seq_lens": (100, 64, 100, 64, 33, 41), "q_lens": ()},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True, "num_kv_heads": 8},
    "sinks": {"sinks": True},
    "e4m3": {"kv_dtype": "e4m3"},
    "e4m3 by head": {"kv_dtype": "e4m3", "kv_scales": "head", "num_kv_heads": 4},
    "e5m2": {"kv_dtype": "e5m2", "dtype": "bf16"},
    "prefix": {"prefix": PREFIX},
    "prefix and window": {"prefix": PREFIX, "window": 40},
    "all": {
        "window": 31, "softcap": 30.0, "alibi": True, "sinks": True, "kv_dtype": "e4m3", "kv_scales": "head",
        "prefix": PREFIX, "dtype": "bf16",
    },
}  # fmt: skip


def build(asked, family=PLAIN, layers=1):
    case = dataclasses.replace(CASE, **asked)
    return operator("attention").build(case, family, layers=layers, device="cpu")


def answered(entry, inputs, layer=0):
    """Prepare, launch on one set and judge."""
    op, case = operator("attention"), inputs.case
    staged = inputs.stage(entry.layout)
    prepared = entry.impl.load()(op.spec(case, entry.layout, "cpu", entry.impl.resolve_params({})))
    prepared.plan(staged.step)
    staged.soil(layer)
    prepared.launch(*staged.arguments(layer), **staged.keywords(layer))
    return staged.judge(layer, entry.impl.quantises)


@pytest.mark.parametrize("family", [PLAIN, NEEDLES], ids=lambda family: family.name)
@pytest.mark.parametrize("asked", ASKED)
def test_every_implementation_is_right(asked, family):
    """In every layout, on plain inputs and on needles; poison lies behind windows and ends."""
    inputs = build(ASKED[asked], family)

    verdicts = {str(entry): answered(entry, inputs) for entry in ENTRIES}

    assert {name: verdict.reason for name, verdict in verdicts.items() if not verdict.passed} == {}


@pytest.mark.parametrize("layout", [HND, NHD], ids=str)
def test_what_a_layer_adds_is_guarded_and_hashed(layout):
    """As every tensor that a launch is given: a kernel that scales a sink in place has changed its input."""
    staged = build(ASKED["all"]).stage(layout)
    names = {guarded.name for guarded in staged.read}

    assert {"query", "key_cache", "value_cache", "alibi_slopes", "sinks", "k_scale", "v_scale"} <= names
    assert changed(staged.read) == []
    staged.keywords(0)["sinks"].mul_(2)
    assert changed(staged.read) == ["sinks"]


def test_sets_differ_in_what_their_layer_adds():
    """Sinks and scales remembered from the set before are wrong; slopes are those of the heads, in every layer."""
    one, other = build(ASKED["all"], layers=2).layers

    assert torch.equal(one.named["alibi_slopes"], other.named["alibi_slopes"])
    assert not any(torch.equal(one.named[name], other.named[name]) for name in ("sinks", "k_scale", "v_scale"))


@pytest.mark.parametrize("asked", ["window 16, decode", "prefix and window", "all"])
def test_slots_behind_every_window_are_poisoned(asked):
    """A slot that no row of any sequence sees holds no ordinary value; one that some row sees does."""
    inputs = build(ASKED[asked])
    case, used = inputs.case, torch.zeros(inputs.case.num_blocks, inputs.case.block_size, dtype=torch.bool)
    for table, seq_len, q_len in zip(inputs.step.host_block_tables, case.seq_lens, case.q_lens, strict=True):
        for t in range(max(seq_len - q_len - case.window + 1, 0), seq_len):
            used[table[t // 16], t % 16] = True

    for pool in (inputs.layers[0].key, inputs.layers[0].value):
        finite = pool.float().isfinite().all(-1).all(1)
        assert torch.equal(finite, used)
        assert not (~used).all()


def test_a_decoy_lies_just_before_the_window():
    """Whoever sees one key too many gives most of some row's weight to a value of thirty thousand."""
    inputs = build({"window": 33, "q_lens": ()}, NEEDLES)
    table, layer = inputs.step.host_block_tables[0], inputs.layers[0]
    before = 150 - 33 - 1

    key, value = (pool[table[before // 16], :, before % 16] for pool in (layer.key, layer.value))

    assert bool((value == hz.DECOY_VALUE).all())
    for kv_head in range(2):
        score = inputs.case.softmax_scale * float(key[kv_head].double() @ layer.query[0, kv_head * 4].double())
        assert score == pytest.approx(103.0, rel=0.01)


@pytest.mark.parametrize("family", [PLAIN, NEEDLES], ids=lambda family: family.name)
def test_shared_blocks_stand_in_several_tables(family):
    """Sequence i begins with the leader's own blocks, and every other block has one owner."""
    inputs = build(ASKED["prefix"], family)
    tables, case = inputs.step.host_block_tables, inputs.case
    owned = [block for seq, row in enumerate(tables) for block in row[case.shared_blocks[seq] : case.blocks_per_seq[seq]]]

    for seq, (leader, tokens) in enumerate(PREFIX):
        assert tables[seq, : tokens // 16].tolist() == tables[leader, : tokens // 16].tolist()
        unused = set(tables[seq, case.blocks_per_seq[seq] :].tolist())
        assert not unused & set(tables[seq, : case.blocks_per_seq[seq]].tolist())
    assert len(set(owned)) == len(owned) == sum(case.blocks_per_seq) - sum(case.shared_blocks)


@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
def test_a_quantised_pool_holds_poison_of_both_signs(kv_dtype):
    """Every NaN of the format that kernels test for: 0x7f and 0xff; where numbers are large, infinity if it has one."""
    plain, needles = (build({"kv_dtype": kv_dtype}, family).layers[0] for family in (PLAIN, NEEDLES))
    largest = torch.finfo(plain.key.dtype).max

    for pool in (plain.key, plain.value):
        assert set(pool.view(torch.uint8)[pool.isnan()].tolist()) == {0x7F, 0xFF}
    found = set(needles.value.double().flatten().tolist())
    assert {largest, -largest} <= found
    assert ({math.inf, -math.inf} <= found) == (kv_dtype == "e5m2")
    assert not needles.value.isnan().any()


@pytest.mark.parametrize("kv_scales", ["tensor", "head"])
def test_no_two_scales_are_alike(kv_scales):
    """Scales that are lost, exchanged or another head's change every answer by more than a tenth."""
    named = build({"kv_dtype": "e4m3", "kv_scales": kv_scales}).layers[0].named
    every = torch.cat([named["k_scale"], named["v_scale"]]).sort().values

    assert [len(named[name]) for name in ("k_scale", "v_scale")] == [{"tensor": 1, "head": 2}[kv_scales]] * 2
    assert bool((every[1:] / every[:-1] > 1.1).all())
    assert bool(((every - 1).abs() > 0.1).all())


def test_the_format_has_an_error_of_its_own():
    """Two to four per cent of a row in e4m3, twice that in e5m2, none where nothing is quantised."""
    errors = {kv_dtype: build({"kv_dtype": kv_dtype}).format_error for kv_dtype in (None, "e4m3", "e5m2")}

    assert errors[None] is None
    assert 0.015 < errors["e4m3"] < 0.05
    assert 1.5 < errors["e5m2"] / errors["e4m3"] < 3


def test_sinks_weigh_about_as_much_as_the_keys():
    """A sink that is forgotten, or counted twice, changes most rows by more than any tolerance."""
    inputs = build({"sinks": True})
    truth, sink = inputs.truth(0), inputs.layers[0].named["sinks"].double()
    share = (sink - truth.lse).exp()[truth.num_visible > 0]

    assert ((share > 0.05) & (share < 0.95)).double().mean() > 0.4


@pytest.mark.parametrize(
    ("num_heads", "exponents"), [(8, [1, 2, 3, 4, 5, 6, 7, 8]), (1, [8]), (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5])]
)
def test_slopes_are_those_of_the_paper(num_heads, exponents):
    """Powers of two, and for other numbers of heads those in between."""
    assert slopes(num_heads).tolist() == pytest.approx([2.0**-exponent for exponent in exponents])


@pytest.mark.parametrize("feature", FEATURES)
def test_what_an_entry_does_not_declare_it_is_not_asked(feature):
    """The first feature it lacks is the reason, and what it has is said."""
    number = {"window": 9, "softcap": 9.0}
    asked = {"kv_dtype": feature} if feature in ("e4m3", "e5m2") else {feature: number.get(feature, True)}
    case = dataclasses.replace(CASE, **asked)

    assert Limits().why_not(case) == f"{feature} is not implemented (implements: none)"
    assert Limits(features={feature}).why_not(case) is None
    assert Limits(features={feature}).why_not(dataclasses.replace(CASE)) is None

"""The user's own cases: what is read, and that every mistake is one line that says where and which rule."""

from __future__ import annotations

import json

import pytest

from cases import ALL
from cases.parse import load_case_file, parse_shape, select
from harness.names import UsageError

SHAPE = "q=32,kv=8,d=128,bs=16,lens=8192x64"
ENTRY = {
    "name": "mine.one", "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "seq_lens": [5, 17],
}


def test_a_shape_is_the_case_it_spells():
    """Every key lands in its field."""
    case = parse_shape("q=64, kv=8, d=64, bs=32, lens=4096x2+17, qlens=4x2+1, dtype=f16, name=mine")

    assert (case.num_q_heads, case.num_kv_heads, case.head_dim, case.block_size) == (64, 8, 64, 32)
    assert (case.seq_lens, case.q_lens) == ((4096, 4096, 17), (4, 4, 1))
    assert (case.dtype, case.name) == ("f16", "mine")


def test_a_shape_spells_what_a_layer_adds():
    """Masks, a quantised cache and a prefix that all share with the first sequence."""
    case = parse_shape(
        "q=4,kv=2,d=64,lens=64x3,window=9,softcap=50,alibi=1,sinks=1,kv_dtype=e4m3,kv_scales=head,prefix=32"
    )

    assert (case.window, case.softcap, case.alibi, case.sinks) == (9, 50.0, True, True)
    assert (case.kv_dtype, case.kv_scales, case.prefix) == ("e4m3", "head", ((0, 0), (0, 32), (0, 32)))
    assert parse_shape("q=4,kv=2,d=64,lens=64x3,alibi=0,sinks=0").features == ()


def test_a_shape_is_decode_of_block_size_16_in_bf16_unless_it_says_otherwise():
    """The defaults, and the same digest as the named case of the same shape."""
    case = parse_shape("q=32,kv=8,d=128,lens=8192x64")

    assert case.digest == ALL["facts.a"].digest


def test_shapes_of_one_run_have_names_of_their_own():
    """Records name the case: two shapes must not share one."""
    names = {parse_shape(SHAPE + more).name for more in ("", "+17", ",dtype=f16", ",qlens=1x64")}

    assert len(names) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q=32,kv=8,d=128,lens=8,heads=3", "unknown key 'heads'; the keys are q, kv, d, bs, lens"),
        ("", "unknown key ''"),
        ("q=32,kv=8,d=128", "lacks lens"),
        ("q=32,q=32,kv=8,d=128,lens=8", "q is given twice"),
        ("q=,kv=8,d=128,lens=8", "q needs a value"),
        ("q=32,kv=5,d=128,lens=8", r"num_q_heads must be a multiple of num_kv_heads \(got \(32, 5\)\)"),
        ("q=32,kv=8,d=128,bs=0,lens=8", r"block_size must be a whole number of at least 1 \(got 0\)"),
        ("q=32,kv=8,d=128,lens=-8", r"lens must be a whole number.*got '-8'"),
        ("q=32,kv=8,d=128,lens=8y3", "lens must be a whole number.*got '8y3'"),
        ("q=32,kv=8,d=128,lens=5x0", "lens must spell at least one sequence in each LENxCOUNT .got '5x0'"),
        ("q=32,kv=8,d=128,lens=8+5x0", "lens must spell at least one sequence in each LENxCOUNT .got '5x0'"),
        ("q=32,kv=8,d=128,lens=8+", "lens must be a whole number.*got ''"),
        ("q=3.5,kv=8,d=128,lens=8", "q must be a whole number.*got '3.5'"),
        ("q=32,kv=8,d=128,lens=8x99999999999", "at most 1048576 sequences"),
        ("q=32,kv=8,d=128,lens=8x2,qlens=1", "q_lens must have one entry a sequence"),
        ("q=32,kv=8,d=128,lens=8,dtype=f8*", "dtype must be one of f32, f16, bf16"),
        ("q=32,kv=8,d=128,lens=8,name=A b", "name must be lower-case"),
        ("q=32,kv=8,d=128,lens=8,window=0", r"window must be None or a whole number of at least 1.*\(got 0\)"),
        ("q=32,kv=8,d=128,lens=8,softcap=x", "softcap must be a number .got 'x'"),
        ("q=32,kv=8,d=128,lens=8,sinks=yes", "sinks must be 1 or 0 .got 'yes'"),
        ("q=32,kv=8,d=128,lens=8,kv_dtype=fp8", "kv_dtype must be None or one of e4m3, e5m2"),
        ("q=32,kv=8,d=128,lens=32x2,prefix=8", "the prefix of sequence 1 must be whole blocks of 16"),
    ],
)
def test_a_malformed_shape_names_the_rule(text, message):
    """One line: the shape, the key, the rule, what was got."""
    with pytest.raises(UsageError, match=message) as caught:
        parse_shape(text)

    assert "\n" not in str(caught.value)


def test_a_case_file_holds_cases_of_every_operator(tmp_path):
    """JSON and TOML give the same cases; lengths may be spelled as in --shape."""
    entries = [
        ENTRY,
        {**ENTRY, "op": "attention", "name": "mine.two", "seq_lens": "4096x2+17", "scale": 0.5, "pool_slack": 2,
         "window": 7, "sinks": True, "kv_dtype": "e5m2", "prefix": [[0, 0], [0, 4096], [0, 16]]},
        {"op": "cache_write", "name": "mine.three", "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "num_tokens": 9},
        {
            "op": "block_copy", "name": "mine.four", "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "num_copies": 2,
            "chained": True,
        },
    ]
    as_json, as_toml = tmp_path / "cases.json", tmp_path / "cases.toml"
    as_json.write_text(json.dumps(entries))
    as_toml.write_text("\n".join(
        "[[case]]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in entry.items()) for entry in entries
    ))

    cases = load_case_file(str(as_json))

    assert [case.op for case in cases] == ["attention", "attention", "cache_write", "block_copy"]
    assert cases[1].seq_lens == (4096, 4096, 17)
    assert cases[1].prefix == ((0, 0), (0, 4096), (0, 16))
    assert (cases[1].window, cases[1].sinks, cases[1].kv_dtype) == (7, True, "e5m2")
    assert load_case_file(str(as_toml)) == cases


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('[{"name": "x", "head_dim": 64, "head_dim": 128}]', "head_dim is given twice in one object"),
        ("[]", "must hold a list of at least one case"),
        ('{"name": "x"}', r"must hold a list of at least one case \(got dict\)"),
        ("[3]", r"entry 1: must be an object of fields \(got int\)"),
        (json.dumps([ENTRY, ENTRY]), "entry 2: a case named 'mine.one' stands in the file already"),
        (json.dumps([{**ENTRY, "op": "conv"}]), "entry 1: op must be one of attention, cache_write, block_copy"),
        (json.dumps([{**ENTRY, "op": []}]), "entry 1: op must be one of"),
        (json.dumps([{**ENTRY, "heads": 3}]), "entry 1: attention has no field 'heads'; the fields are name, num_q_heads"),
        (json.dumps([{"name": "x"}]), "entry 1: lacks num_q_heads, num_kv_heads, head_dim, block_size, seq_lens"),
        (json.dumps([{**ENTRY, "num_kv_heads": 3}]), "entry 1: mine.one: num_q_heads must be a multiple"),
        (json.dumps([{**ENTRY, "num_kv_heads": "3"}]), "entry 1: num_kv_heads must be of type int"),
        (json.dumps([{**ENTRY, "block_size": True}]), "entry 1: block_size must be of type int"),
        (json.dumps([{**ENTRY, "seq_lens": [5, -1]}]), "entry 1: mine.one: seq_lens must be a tuple of whole numbers"),
        (json.dumps([{**ENTRY, "seq_lens": 5}]), "entry 1: mine.one: seq_lens must be a tuple"),
        (json.dumps([{**ENTRY, "seq_lens": [[5]]}]), "entry 1: mine.one: seq_lens must be a tuple"),
        (json.dumps([{**ENTRY, "scale": float("nan")}]), "entry 1: scale must be finite"),
        (json.dumps([{**ENTRY, "name": None}]), "entry 1: name must be of type str"),
    ],
)
def test_a_malformed_case_file_names_the_entry_and_the_rule(tmp_path, text, message):
    """One line: the file, the entry, the rule, what was got."""
    file = tmp_path / "cases.json"
    file.write_text(text)

    with pytest.raises(UsageError, match=message) as caught:
        load_case_file(str(file))

    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_case_file_that_cannot_be_read_says_why(tmp_path):
    """Missing, a folder, not text, not TOML."""
    binary, toml = tmp_path / "binary.json", tmp_path / "bad.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    toml.write_text("[[case\n")

    with pytest.raises(UsageError, match="No such file"):
        load_case_file(str(tmp_path / "nothing.json"))
    with pytest.raises(UsageError, match="directory"):
        load_case_file(str(tmp_path))
    with pytest.raises(UsageError, match="not JSON"):
        load_case_file(str(binary))
    with pytest.raises(UsageError, match="not TOML"):
        load_case_file(str(toml))


def test_patterns_choose_cases_in_their_own_order():
    """Globs add up; none given is everything."""
    cases = ALL.values()

    assert [case.name for case in select(cases, ["facts.b", "facts.[ab]"])] == ["facts.a", "facts.b"]
    assert select(cases, []) == list(cases)


def test_a_pattern_that_matches_nothing_names_the_nearest():
    """A slip of the finger is answered with what was meant."""
    with pytest.raises(UsageError, match=r"no case matches 'facts.aa'; did you mean facts\.a"):
        select(ALL.values(), ["facts.a", "facts.aa"])

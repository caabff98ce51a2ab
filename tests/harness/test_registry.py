"""The table of implementations: how it is asked, and what it says to those who fill it wrongly."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest

from harness.names import UsageError
from harness.ops.attention import AttentionCase
from harness.ops.block_copy import BlockCopyCase
from harness.ops.layouts import HND, KV_NHD, NHD
from harness.registry import Entry, Impl, Limits, Registry, default_registry, load_file, matches

CASE = AttentionCase(name="some.case", num_q_heads=8, num_kv_heads=2, head_dim=80, block_size=16, seq_lens=(100,), q_lens=(3,))
COPY = BlockCopyCase(name="some.copy", num_kv_heads=2, head_dim=8, block_size=4, num_copies=2)


def impl(name="toy.a", **fields):
    return Impl(**{"name": name, "op": "attention", "prepare": "toy:prepare", **fields})


REGISTRY = Registry([
    impl("cuda.split_kv", layouts=(HND, NHD)),
    impl("cuda.per_token", layouts=(HND, NHD, KV_NHD)),
    impl("control.no_rescale", role="control"),
    impl("torch.read", role="reader"),
])  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "rows"),
    [
        (["cuda.*"], [*(f"cuda.split_kv[{name}]" for name in ("HND", "NHD")),
                      *(f"cuda.per_token[{name}]" for name in ("HND", "NHD", "KV_NHD"))]),
        (["cuda.split_kv"], ["cuda.split_kv[HND]", "cuda.split_kv[NHD]"]),
        (["cuda.*[NHD]"], ["cuda.split_kv[NHD]", "cuda.per_token[NHD]"]),
        (["*[KV_NHD]"], ["cuda.per_token[KV_NHD]"]),
        (["*.per_?oken[[]HND]"], None),
        (["cuda.per_token[HND]", "cuda.*[HND]"], ["cuda.per_token[HND]", "cuda.split_kv[HND]"]),
        (["control.no_rescale"], ["control.no_rescale[HND]"]),
        (["control.no_rescale[HND]"], ["control.no_rescale[HND]"]),
        (["control.*"], []),
        (["torch.read", "cuda.split_kv[HND]"], ["torch.read[HND]", "cuda.split_kv[HND]"]),
    ],
    ids=str,
)  # fmt: skip
def test_rows_are_chosen_by_globs(patterns, rows):
    """Over names and over rows with their layout; each row once; naming an entry overrides its role."""
    if rows is None:
        with pytest.raises(UsageError):
            REGISTRY.entries(patterns)
    else:
        assert [str(row) for row in REGISTRY.entries(patterns)] == rows


def test_no_pattern_is_every_implementation():
    """Neither controls nor readers, which are there for something else."""
    assert REGISTRY.entries() == REGISTRY.entries(["cuda.*"])


def test_what_is_on_request_comes_only_when_it_is_named():
    """A glob over its name names it."""
    registry = Registry([impl("toy.quick"), impl("toy.slow", on_request=True)])

    assert [str(row) for row in registry.entries()] == ["toy.quick[HND]"]
    assert [str(row) for row in registry.entries(["toy.slow"])] == ["toy.slow[HND]"]
    assert len(registry.entries(["toy.*"])) == 2


def test_roles_are_chosen():
    """Readers and controls come when they are asked for."""
    assert [str(row) for row in REGISTRY.entries(roles=("reader", "control"))] == ["control.no_rescale[HND]", "torch.read[HND]"]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("cuda.split_vk", r"no implementation matches 'cuda.split_vk'; did you mean cuda.split_kv"),
        ("cuda.split_kv[HDN]", r"no implementation matches 'cuda.split_kv\[HDN\]'; did you mean cuda.split_kv"),
        ("zzz", "no implementation matches 'zzz'; `pagedbench list` shows what there is"),
        ("", "no implementation matches ''"),
    ],
)
def test_an_unknown_name_prints_the_nearest(pattern, says):
    """A typing slip is answered with what was meant."""
    with pytest.raises(UsageError, match=says):
        REGISTRY.entries(["cuda.split_kv", pattern])


def test_brackets_stand_for_themselves():
    """Row names carry them, so they are no character class."""
    assert matches("a[HND]", "a[HND]")
    assert matches("a[HND]", "*[?ND]")
    assert not matches("aH", "a[HND]")


def test_a_name_taken_is_refused():
    """Names key results: two of one name are told apart by nobody."""
    with pytest.raises(UsageError, match=r"two implementations are named 'toy\.a'; rename one"):
        Registry([impl(), impl()])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": ""}, "name must hold no spaces, commas or brackets (got '')"),
        *(({"name": name}, "name must hold no spaces, commas or brackets")
          for name in ("a b", "a,b", "a[HND]", "a*", "a?", "a\n")),
        ({"op": "atention"}, "op must be one of attention, cache_write, block_copy (got 'atention')"),
        ({"role": "toy"}, "role must be one of implementation, control, reader, floor (got 'toy')"),
        ({"name": 5}, "name must hold no spaces, commas or brackets (got 5)"),
        ({"prepare": "toy.prepare"}, "prepare must read 'module:function' (got 'toy.prepare')"),
        ({"prepare": print}, "prepare must read 'module:function' (got <built-in function print>)"),
        ({"limits": {"max_q_len": 1}}, "limits must be Limits (got {'max_q_len': 1})"),
        ({"quantises": "query"}, "quantises must be a set of names (got 'query')"),
        ({"timed": "cuda"}, "timed must be a tuple of 'cpu', 'cuda' (got 'cuda')"),
        ({"claims": ("repeat",)}, "claims must say 'bitwise' or 'tolerance' of repeat, two_plans,"),
        ({"layouts": ()}, "layouts must be a tuple of at least one Layout (got ())"),
        pytest.param({"layouts": HND}, "layouts must be a tuple of at least one Layout", id="a layout"),
        ({"layouts": ("HND",)}, "layouts must be a tuple of at least one Layout (got ('HND',))"),
        ({"devices": ()}, "devices must be a tuple of 'cpu', 'cuda' (got ())"),
        ({"devices": "cpu"}, "devices must be a tuple of 'cpu', 'cuda' (got 'cpu')"),
        ({"devices": ("gpu",)}, "devices must be a tuple of 'cpu', 'cuda' (got ('gpu',))"),
        *(
            ({"max_work": limit}, "max_work must give numbers by device kind")
            for limit in ({"cpu": "1e9"}, {"cpu": None}, {"cpu": True}, 1e9)
        ),
        *(
            ({"params": params}, "params must name tuples of numbers or words, the default first")
            for params in ({"tile": ()}, {"tile": 16}, {"tile": (print,)}, {"tile": "16"}, ["tile"], {3: (1,)})
        ),
    ],
    ids=str,
)  # fmt: skip
def test_an_entry_that_cannot_be_says_which_rule_it_broke(fields, says):
    """The error names the implementation, the rule and what was got."""
    with pytest.raises(UsageError) as caught:
        impl(**fields)

    assert says in str(caught.value)
    assert str(caught.value).startswith(f"implementation {fields.get('name', 'toy.a')!r}: ")


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({}, None),
        pytest.param({"dtypes": {"f16", "bf16"}}, None, id="a dtype"),
        pytest.param({"dtypes": {"f16", "f32"}}, "dtype must be one of f16, f32 (got bf16)", id="no dtype"),
        ({"head_dims": {128, 64}}, "head_dim must be one of 64, 128 (got 80)"),
        ({"head_dim_multiple": 16}, None),
        ({"head_dim_multiple": 32}, "head_dim must be a multiple of 32 (got 80)"),
        ({"max_head_dim": 64}, "head_dim must be at most 64 (got 80)"),
        ({"max_head_dim": 80}, None),
        ({"block_sizes": {8}}, "block_size must be one of 8 (got 16)"),
        ({"max_block_size": 8}, "block_size must be at most 8 (got 16)"),
        ({"groups": {1, 8}}, "group must be one of 1, 8 (got 4)"),
        ({"max_group": 2}, "group must be at most 2 (got 4)"),
        ({"max_q_len": 1}, "max_q_len must be at most 1 (got 3)"),
        ({"max_seq_len": 99}, "max_seq_len must be at most 99 (got 100)"),
        ({"max_seq_len": 100, "max_q_len": 3, "max_group": 4, "groups": {4}}, None),
        ({"head_dims": {64}, "max_q_len": 1}, "head_dim must be one of 64 (got 80)"),
    ],
    ids=str,
)
def test_limits_answer_with_a_sentence(limits, says):
    """The first rule broken, what it allows and what it got; None where the case is taken."""
    assert Limits(**limits).why_not(CASE) == says


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"features": "window"}, """features must be a set such as {"window"} (got 'window')"""),
        ({"features": None}, """features must be a set such as {"window"} (got None)"""),
        ({"features": {"windo"}}, "features must be of window, softcap, alibi, sinks, e4m3, e5m2 (got windo)"),
        ({"dtypes": "f16"}, """dtypes must be a set such as {"bf16"} (got 'f16')"""),
        ({"head_dims": 128}, "head_dims must be a set such as {128} (got 128)"),
        ({"max_q_len": "1"}, "max_q_len must be a number above 0 (got '1')"),
        ({"head_dim_multiple": 0}, "head_dim_multiple must be a number above 0 (got 0)"),
    ],
    ids=str,
)
def test_limits_that_cannot_be_meant_are_refused(limits, says):
    """Which field, the rule, what was got; a word is not taken for its letters."""
    with pytest.raises(UsageError) as caught:
        Limits(**limits)

    assert str(caught.value) == f"Limits: {says}"


def test_limits_ask_only_for_what_a_case_has():
    """A block copy has no queries, groups or lengths to be too long."""
    assert Limits(groups={1}, max_q_len=1, max_seq_len=1).why_not(COPY) is None


@pytest.mark.parametrize(
    ("case", "kind", "fields", "says"),
    [
        (CASE, "cpu", {}, None),
        (COPY, "cpu", {}, "it implements attention (got a case of block_copy)"),
        (CASE, "cpu", {"devices": ("cuda",)}, "runs on cuda only (got cpu)"),
        (CASE, "cpu", {"limits": Limits(max_q_len=1)}, "max_q_len must be at most 1 (got 3)"),
        (CASE, "cpu", {"available": f"{__name__}:missing"}, "there is no cpu here"),
        (CASE, "cpu", {"available": "not_there:missing", "limits": Limits(max_q_len=1)}, "max_q_len must be at most 1 (got 3)"),
        (CASE, "cuda", {"available": f"{__name__}:missing"}, None),
    ],
    ids=str,
)
def test_an_entry_says_why_it_does_not_run(monkeypatch, case, kind, fields, says):
    """Operator, device, limits, and only then what the machine lacks."""
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(missing=missing))

    assert impl(**fields).why_not(case, kind) == says


def missing(kind):
    return "there is no cpu here" if kind == "cpu" else None


def test_parameters_have_defaults_and_no_strangers():
    """The first value of each is the default; an unknown name is told what there is."""
    tuned = impl(params={"splits": (0, 1, 2), "mode": ("fast", "slow")})

    assert tuned.resolve_params({}) == {"splits": 0, "mode": "fast"}
    assert tuned.resolve_params({"splits": 7}) == {"splits": 7, "mode": "fast"}
    with pytest.raises(UsageError, match=r"toy\.a has no parameter 'warps'; it has: splits, mode"):
        tuned.resolve_params({"warps": 4})
    with pytest.raises(UsageError, match=r"toy\.a has no parameter 'warps'; it has: none"):
        impl().resolve_params({"warps": 4})


def test_variants_are_every_combination():
    """What `tune` sweeps: the defaults first, each once."""
    variants = Entry(impl(params={"a": (1, 2), "b": ("x", "y")}), HND).variants()

    assert [tuple(row.params.values()) for row in variants] == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]
    assert Entry(impl(), HND).variants() == [Entry(impl(), HND)]


GOOD = """
from harness.registry import Impl
IMPLS = (Impl(name="mine.one", op="attention", prepare="my_kernels:prepare"),)
def prepare(spec):
    return spec
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file of the user's; modules it leaves behind are forgotten."""
    for name in ("my_kernels", "my.kernels"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)

    def write(text, name="my_kernels.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


UNSPEAKABLE = """
class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")
    __repr__ = __str__

raise Unspeakable()
"""


@pytest.mark.parametrize("name", ["my_kernels.py", "my.kernels.py"])
def test_a_file_of_the_users_own_is_taken(write, name):
    """Its table joins ours, and "FILE:function" finds its functions."""
    (entry,) = load_file(write(GOOD.replace("my_kernels", name.removesuffix(".py")), name))

    assert entry.name == "mine.one"
    assert entry.load()(7) == 7


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("1 +", "my_kernels.py", "SyntaxError: invalid syntax (my_kernels.py, line 1)"),
        ("import not_there", "my_kernels.py", "ModuleNotFoundError: No module named 'not_there'"),
        ("raise ValueError('no such luck')", "my_kernels.py", "ValueError: no such luck"),
        (UNSPEAKABLE, "my_kernels.py", "Unspeakable: its message cannot be shown"),
        ("import sys; sys.exit(3)", "my_kernels.py", "SystemExit: 3"),
        ("", "my_kernels.py", "must define IMPLS, a tuple of harness.registry.Impl (got None)"),
        ("IMPLS = 7", "my_kernels.py", "must define IMPLS, a tuple of harness.registry.Impl (got 7)"),
        ("IMPLS = ('cuda.mine',)", "my_kernels.py", "must define IMPLS, a tuple of harness.registry.Impl"),
        (GOOD.replace("attention", "atention"), "my_kernels.py", "implementation 'mine.one': op must be one of"),
        (GOOD, "my_kernels.txt", "not a Python file (it must end in .py)"),
        (GOOD, "json.py", "a module named 'json' is loaded already; rename the file"),
        (GOOD, "wave.py", "Python has another module named 'wave'"),
        (GOOD.replace("my_kernels:", "other:"), "my_kernels.py", "names its prepare 'other:prepare'"),
    ],
)
def test_a_file_that_cannot_be_taken_says_why(write, text, name, says):
    """One line: the option, the file, the reason."""
    path = write(text, name)
    with pytest.raises(UsageError) as caught:
        load_file(path)

    assert says in str(caught.value)
    assert str(caught.value).startswith(f"--impl-file {path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/nowhere/kernels.py", ""])
def test_a_file_that_is_not_there_is_named(path):
    """Nothing is no file either."""
    with pytest.raises(UsageError, match=f"--impl-file {path}: no such file"):
        load_file(path)


def test_a_folder_of_files_is_told_apart_from_none(tmp_path):
    """It is there, and what is wrong is that it is no file."""
    with pytest.raises(UsageError, match=f"--impl-file {tmp_path}: is a folder; name the file in it that holds"):
        load_file(str(tmp_path))


def points(monkeypatch, *loads):
    """Pretend that packages are installed whose entry points load so."""
    found = [SimpleNamespace(name=f"point{i}", value="pkg:IMPLS", load=load) for i, load in enumerate(loads)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found if group == "pagedbench.impls" else [])


def test_installed_packages_bring_their_tables(monkeypatch):
    """The entry-point group "pagedbench.impls" names tables, which come behind ours."""
    points(monkeypatch, lambda: (impl("theirs.one"),))

    names = [entry.name for entry in default_registry()]
    assert names[-1] == "theirs.one"
    assert "torch.gather" in names


def fails():
    raise ImportError("no libtheirs.so")


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (fails, "entry point 'point0' (pkg:IMPLS) of the group pagedbench.impls: ImportError: no libtheirs.so"),
        (lambda: 7, "entry point 'point0' (pkg:IMPLS) of the group pagedbench.impls: must name a tuple of"),
    ],
)
def test_an_installed_table_that_fails_is_named(monkeypatch, load, says):
    """Somebody else's package breaks with its name on it."""
    points(monkeypatch, load)

    with pytest.raises(UsageError) as caught:
        default_registry()
    assert says in str(caught.value)

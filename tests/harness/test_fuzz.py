"""Random cases: right implementations pass them, and a wrong one is found, shrunk, and printed so that it can be pasted."""

from __future__ import annotations

import dataclasses
import json
import shlex
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings

from cases.parse import load_case_file, parse_shape
from harness.cli import main
from harness.commands.fuzz import Checker
from harness.fuzz import Finding, Fuzz, command_of, entry_of, shape_of
from harness.ops import OP_NAMES
from harness.ops.layouts import CONTIGUOUS, HND
from harness.options import Options
from harness.record import Record
from harness.registry import Entry, Impl, default_registry, load_file
from harness.session import Session
from harness.store import latest_run, load
from harness.strategies import attention_cases, cases
from harness.workers import Spare

WRONG = """
from harness.registry import Impl
from impls import torch_gather

IMPLS = (
    Impl(name="mine.wrong_but_at_64", op="attention", prepare="{stem}:prepare_wrong", devices=("cpu",)),
    Impl(name="mine.crashes", op="attention", prepare="{stem}:prepare_crash", devices=("cpu",)),
)

def prepare_wrong(spec):
    right = torch_gather.prepare(spec)
    launch = right.launch
    def wrong(query, key_cache, value_cache, out, lse):
        launch(query, key_cache, value_cache, out, lse)
        if spec.head_dim != 64:
            out += 1
    right.launch = wrong
    return right

def prepare_crash(spec):
    import os
    if spec.block_size == 24:
        os.abort()
    return torch_gather.prepare(spec)
"""


@pytest.fixture
def impl_file(tmp_path, request):
    path = tmp_path / f"{request.node.name.split('[')[0]}.py"  # each test a module of its own name
    path.write_text(WRONG.replace("{stem}", path.stem))
    return str(path)


@pytest.fixture(scope="module")
def session():
    return Session(Options(suite="fuzz", bench=False), default_registry(), "cpu")


@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(case=cases(OP_NAMES, max_seq_len=150))
def test_right_implementations_are_right_on_random_cases(session, case):
    """Always the same ones in tests; `pagedbench fuzz` goes on. The interpreter of Triton is left out: it is slow."""
    entries = default_registry().entries(["numpy.*", "torch.*"])
    entries = [entry for entry in entries if entry.impl.op == case.op and entry.layout in (HND, CONTIGUOUS)]
    records = list(session.measure([case], entries))

    assert [record.status for record in records if record.status not in ("ok", "unsupported")] == []
    assert any(record.status == "ok" for record in records)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(case=cases(OP_NAMES))
def test_every_case_can_be_pasted(tmp_path_factory, case):
    """The entry of a case file and, where there is one, the shape, give the question back: the same digest."""
    path = tmp_path_factory.mktemp("cases") / "cases.json"
    path.write_text(json.dumps([entry_of(case)]))
    shape = shape_of(case)

    assert load_case_file(str(path)) == (case,)
    assert shape is None or parse_shape(shape).digest == case.digest


def test_strategies_reach_what_breaks_kernels():
    """Empty rows, full blocks, rows that see no key, batches without a row: each is drawn, not hoped for."""
    seen: set[str] = set()

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(case=attention_cases())
    def draw(case):
        lens = list(zip(case.seq_lens, case.q_lens, strict=True))
        seen.update(name for name, holds in {
            "no sequences": not lens, "empty sequence": any(n == 0 < q for n, q in lens), "decode": case.max_q_len == 1,
            "full block": any(n and n % case.block_size == 0 for n, _ in lens), "no queries": any(q == 0 for _, q in lens),
            "row sees no key": any(q > n > 0 for n, q in lens), "chunk": any(1 < q < n for n, q in lens),
            "several splits": case.max_seq_len > 1024, "group over 8": case.group > 8, "block size 1": case.block_size == 1,
            "odd head_dim": case.head_dim % 32 > 0, "several rows": len(lens) > 4, "negative scale": (case.scale or 1) < 0,
        }.items() if holds)  # fmt: skip

    draw()
    assert len(seen) == 13, seen


def entry(name="any", op="attention"):
    return Entry(Impl(name=name, op=op, prepare="nowhere:prepare"), HND)


def record_of(case, entry, status="ok"):
    return Record(
        run="r", suite="fuzz", started_at="", op=case.op, case=case.name, case_digest=case.digest, shape={},
        impl=entry.impl.name, layout=entry.layout.name, status=status, reason="as told", device="d", device_kind="cpu",
        toolchain={},
    )  # fmt: skip


def checks(bad):
    """A check in which `bad(name, case)` says what fails."""

    def check(case, entries):
        return [record_of(case, entry, "wrong" if bad(entry.impl.name, case) else "ok") for entry in entries]

    return check


def test_a_failure_is_shrunk_to_the_smallest_case():
    """One sequence, the first length that fails, and everything else as simple as it can be."""
    fuzz = Fuzz([entry()], checks(lambda _, case: case.max_seq_len > 100), seed=3, max_cases=1000)
    (finding,) = fuzz.findings()

    assert (finding.case.seq_lens, finding.case.num_q_heads, finding.case.head_dim) == ((101,), 1, 64)
    assert finding.case.name == finding.record.case == f"fuzz.{finding.case.digest}"
    assert finding.again


def test_one_fault_does_not_hide_another():
    """What has failed is left out, the others go on; each is found once."""
    bad = {"a": lambda case: case.block_size == 24, "b": lambda case: case.num_kv_heads == 3, "c": lambda _: False}
    fuzz = Fuzz([entry(name) for name in bad], checks(lambda name, case: bad[name](case)), seed=1, max_cases=500)

    found = {finding.entry.impl.name: finding.case for finding in fuzz.findings()}
    assert found.keys() == {"a", "b"}
    assert found["a"].block_size == 24
    assert found["b"].num_kv_heads == 3
    assert fuzz.num_cases >= 500


def test_what_fails_only_once_is_still_told():
    """A race that does not come again is a finding, and said to be one of that kind."""
    calls = iter([False, True])
    fuzz = Fuzz([entry()], checks(lambda *_: next(calls, False)), seed=1, max_cases=100)

    assert [finding.again for finding in fuzz.findings()] == [False]


def test_the_same_seed_draws_the_same_cases():
    drawn: list[list[str]] = [[], []]
    for cases_drawn in drawn:
        fuzz = Fuzz([entry()], checks(lambda _, case, into=cases_drawn: into.append(case.digest)), seed=7, max_cases=60)
        assert not list(fuzz.findings())

    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 40


def test_time_is_kept():
    """After its time no new case is taken."""
    fuzz = Fuzz([entry()], checks(lambda *_: False), seed=1, seconds=0.3)

    assert not list(fuzz.findings())
    assert 0 < fuzz.num_cases < 10_000


def test_a_finding_is_printed_so_that_it_can_be_pasted(impl_file, tmp_path, capsys):
    """The command as printed fails in the same way; the finding is a record, and the exit code 1."""
    words = ["fuzz", "--impl", "mine.wrong_but_at_64", "--impl-file", impl_file, "--device", "cpu", "--seed", "1"]
    assert main([*words, "--minutes", "5", "--out", str(tmp_path / "runs")]) == 1
    lines = capsys.readouterr().out.splitlines()
    ((record,), problems) = load(latest_run(tmp_path / "runs"))
    said = json.loads((latest_run(tmp_path / "runs") / "run.json").read_text())

    assert lines[0].startswith(f"mine.wrong_but_at_64[HND] wrong on {record.case}: plain inputs: ")
    assert json.loads(lines[1])["head_dim"] == 128
    assert (record.suite, record.status, problems) == ("fuzz", "wrong", [])
    assert (said["seed"], said["findings"]) == (1, 1)
    command = shlex.split(lines[2])
    assert command[0] == "pagedbench"
    assert main([*command[1:], "--in-process", "--out", str(tmp_path / "again")]) == 1
    again = load(latest_run(tmp_path / "again"))[0][0]
    assert (again.case_digest, again.reason) == (record.case_digest, record.reason)


def test_a_worker_is_kept_and_one_that_dies_is_replaced(impl_file, monkeypatch):
    """Start-up is paid once; a crash is a record of its case, and the next case finds another worker."""
    arguments = SimpleNamespace(device="cpu", impl_file=[impl_file], stall=60.0, json=True)
    impls = {impl.name: Entry(impl, impl.layouts[0]) for impl in load_file(impl_file)}
    checker = Checker(arguments, "r")
    case = parse_shape("q=1,kv=1,d=16,lens=5,name=right")
    bad = dataclasses.replace(case, name="bad", block_size=24)
    try:
        entries = [impls["mine.crashes"]]
        (first,) = checker.check(case, entries)
        worker = checker.spare.take()
        checker.spare.keep(worker)
        (second,) = checker.check(dataclasses.replace(case, name="second"), entries)
        assert checker.spare.take() is worker
        checker.spare.keep(worker)
        (crash,) = checker.check(bad, entries)
        (after,) = checker.check(case, entries)
    finally:
        checker.spare.close()

    assert [first.status, second.status, crash.status, after.status] == ["ok", "ok", "failed", "ok"]
    assert "killed by SIGABRT" in crash.reason


def test_a_spare_worker_is_ended_once():
    """Closing twice, or nothing at all, is no error; what is kept in place of another ends it."""
    spare = Spare()
    spare.close()
    first, second = spare.take(), spare.take()
    spare.keep(first)
    spare.keep(second)
    spare.close()
    spare.close()

    assert first._child.process.poll() is not None
    assert second._child.process.poll() is not None


def test_without_hypothesis_it_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "hypothesis" else object())

    assert main(["fuzz", "--out", str(tmp_path)]) == 2
    assert "fuzz needs the package hypothesis: pip install 'pagedbench[test]'" in capsys.readouterr().err


def test_to_judge_nothing_is_no_success(tmp_path, capsys):
    """A fuzz of GPU kernels on a machine without one would be green for ever."""
    words = ["fuzz", "--impl", "cuda.per_token", "--device", "cpu", "--minutes", "0.05", "--seed", "1"]

    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "nothing was judged" in capsys.readouterr().err


def test_a_case_that_a_shape_cannot_say_stands_in_a_file():
    """The pool's slack and the scale have no word there."""
    case = dataclasses.replace(parse_shape("q=2,kv=1,d=16,lens=5x2+7"), pool_slack=8.0)
    finding = Finding(entry=entry("mine.one"), case=case, record=record_of(case, entry("mine.one")))

    assert shape_of(case) is None
    assert command_of(finding, "a b.json", ["k.py"], "cuda:1") == (
        "pagedbench check --impl 'mine.one[HND]' --case-file 'a b.json' --impl-file k.py --device cuda:1"
    )


def test_a_run_that_is_interrupted_is_no_success(tmp_path, monkeypatch, capsys):
    """What was found so far is kept, and the exit code does not say that all is well."""
    monkeypatch.setattr(Fuzz, "findings", interrupt)

    assert main(["fuzz", "--out", str(tmp_path)]) == 2
    assert "interrupted; 0 findings are kept in" in capsys.readouterr().err


def interrupt(fuzz):
    raise KeyboardInterrupt

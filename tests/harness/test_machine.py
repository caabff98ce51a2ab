"""Several devices of one machine make the run that one would make, and end as it would."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from harness import machine
from harness.cli import main
from harness.machine import devices_of
from harness.names import UsageError
from harness.store import load
from tests.harness.interruptible import started

HOUSE = Path(machine.__file__).parent.parent

TOYS = """
import os, time
from pathlib import Path
from harness.registry import Impl

MARKS = Path(os.environ["TOY_MARKS"])
(MARKS / f"import.{os.getpid()}.{time.monotonic_ns()}").touch()

def prepare(spec):
    from impls.torch_block_copy import prepare
    return prepare(spec)

def prepare_crash(spec):
    os.abort()

def prepare_sleep(spec):
    (MARKS / f"sleep.{os.getpid()}").touch()
    time.sleep(60)

def toy(name, prepare):
    return Impl(name=f"toy.{name}", op="block_copy", prepare=prepare)

IMPLS = (toy("right", "toys:prepare"), toy("crash", "toys:prepare_crash"), toy("sleep", "toys:prepare_sleep"))
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    """The command without its devices: two implementations on four cases."""
    (tmp_path / "toys.py").write_text(TOYS)
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv("TOY_MARKS", str(tmp_path / "marks"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(sys.modules, "toys", None)
    monkeypatch.delitem(sys.modules, "toys")
    shape = {"op": "block_copy", "num_kv_heads": 1, "head_dim": 16, "block_size": 4, "num_blocks": 16}
    (tmp_path / "cases.json").write_text(json.dumps([{**shape, "name": f"copy.{i}", "num_copies": i + 1} for i in range(4)]))
    mine = ["--impl-file", str(tmp_path / "toys.py"), "--case-file", str(tmp_path / "cases.json")]
    return ["check", *mine, "--out", str(tmp_path / "runs")]


def marks(folder, kind):
    return [path.name for path in (folder / "marks").iterdir() if path.name.startswith(kind)]


def outcomes(folder):
    records, problems = load(folder)
    assert not problems
    return [(r.case, r.impl, r.status, (r.reason or "").partition(";")[0], r.flags) for r in records]


def test_two_devices_make_the_run_of_one(words, tmp_path, capsys):
    """The same records in the same order, a crash of a worker in each case among them."""
    words += ["--impl", "toy.right,toy.crash", "--case", "copy.0,copy.1"]
    codes = [main([*words, *how]) for how in (["--device", "cpu"], ["--devices", "cpu,cpu"])]
    one, two = sorted((tmp_path / "runs").iterdir())

    assert codes == [1, 1]
    assert outcomes(one) == outcomes(two)
    assert [outcome[2] for outcome in outcomes(two)] == ["failed", "ok"] * 2
    assert {record.unit["name"] for record in load(two)[0]} == {"cpu"}
    facts = [json.loads((run / "run.json").read_text()) for run in (one, two)]
    assert {*facts[1]} - {*facts[0]} == {"devices"}
    assert [own["lane"] for own in facts[1]["devices"]] == ["cpu", "cpu"]


def test_a_worker_is_kept_from_case_to_case(words, tmp_path):
    """Its session, too: the user's file is run once in each, and not again for every case."""
    assert main([*words, "--impl", "toy.right", "--devices", "cpu,cpu"]) == 0

    assert len(marks(tmp_path, "import")) == 4  # in the rehearsal, in this process, and in two workers


def test_a_broken_run_goes_on_with_several_devices(words, tmp_path):
    """What has a record is not measured again; the run ends in the order of one that never broke."""
    words += ["--impl", "toy.right"]
    assert main([*words, "--device", "cpu"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    whole, lines = outcomes(folder), (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text(lines[2])

    assert main([*words, "--devices", "cpu,cpu", "--resume", str(folder)]) == 0
    assert outcomes(folder) == whole
    assert (folder / "records.jsonl").read_text().splitlines(keepends=True)[2] == lines[2]


def test_an_interrupt_keeps_what_there_is_and_leaves_no_worker(words, tmp_path):
    """Ctrl-C while every device is at work: one line, exit code 2, records of whole cases."""
    with started([*words, "--impl", "toy.sleep", "--devices", "cpu,cpu"], cwd=HOUSE) as parent:
        end = time.monotonic() + 60
        while len(marks(tmp_path, "sleep")) < 2:
            assert parent.poll() is None, parent.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.02)
        parent.send_signal(signal.SIGINT)
        _, said = parent.communicate(timeout=30)

    assert parent.returncode == 2
    assert said.startswith("pagedbench: interrupted; 0 records are kept in ")
    assert not any(Path(f"/proc/{mark.partition('.')[2]}").exists() for mark in marks(tmp_path, "sleep"))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--devices", "cpu,cpu", "--device", "cpu"], "--device and --devices: each says which devices work; leave out one"),
        (["--devices", "cpu", "--in-process"], "--in-process and --devices: each says how rows are run; leave out one"),
        (["--devices", "cpu", "--engine", "ray"], "--devices and --engine ray: each says how rows are run; leave out one"),
        (["--engine", "ray", "--in-process"], "--in-process and --engine ray: each says how rows are run"),
        (["--sanitize", "memcheck", "--devices", "all"], "--sanitize memcheck and --devices: each says how rows are run"),
        (["--devices", "cpu,"], "--devices: names nothing between its commas"),
    ],
)
def test_what_cannot_be_meant_begins_no_run(words, tmp_path, capsys, more, says):
    assert main([*words, "--impl", "toy.right", *more]) == 2

    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["run", "bench"])
def test_cpus_that_would_time_each_other_are_refused(tmp_path, capsys, command):
    words = [command, "--devices", "cpu,cpu", "--suite", "smoke", "--impl", "torch.*", "--out", str(tmp_path / "runs")]
    assert main(words) == 2

    assert "workers that share cores would time each other; several CPUs can only `check`" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "is_timed", "names"),
    [
        ("cpu", True, ["cpu"]),
        ("cpu,cpu,cpu", False, ["cpu", "cpu", "cpu"]),
        ("cuda:1, cuda:0", True, ["cuda:1", "cuda:0"]),
        ("cuda", True, ["cuda:0"]),
        ("cuda,cuda:0", False, "cuda:0 is named twice"),
        ("cuda:1,cuda:1,cpu,cpu", False, "cuda:1 is named twice"),
    ],
)
def test_devices_are_named_once(text, is_timed, names):
    """But CPUs, which have no name of their own."""
    if isinstance(names, list):
        assert devices_of(text, is_timed) == names
    else:
        with pytest.raises(UsageError, match=names):
            devices_of(text, is_timed)


@pytest.mark.parametrize(("count", "names"), [(3, ["cuda:0", "cuda:1", "cuda:2"]), (0, None)])
def test_all_is_every_gpu_that_there_is(monkeypatch, count, names):
    """And not the CPU where there is none: who asks for all GPUs is told."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    if names:
        assert devices_of("all", is_timed=True) == names
    else:
        with pytest.raises(UsageError, match=r"--devices all: torch .* sees no CUDA device; --device cpu runs on the CPU"):
            devices_of("all", is_timed=True)


def test_a_device_that_is_not_there_ends_the_run_in_one_line(words, capsys):
    """With the worker's own words."""
    assert main([*words, "--impl", "toy.right", "--devices", "cpu,cuda:99"]) == 2

    assert "--device cuda:99: torch" in capsys.readouterr().err


def test_an_audit_is_spread_as_well(tmp_path, monkeypatch):
    """Its matrix is that of one device."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["audit", "--impl", "control.*copy*,torch.block_copy", "--suite", "smoke", "--out", str(tmp_path / "runs")]
    codes = [main([*words, *how]) for how in (["--device", "cpu"], ["--devices", "cpu,cpu"])]
    one, two = sorted((tmp_path / "runs").iterdir())

    assert codes[0] == codes[1]
    assert (one / "audit.json").read_text() == (two / "audit.json").read_text()
    assert outcomes(one) == outcomes(two)

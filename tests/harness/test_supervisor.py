"""The parent never dies: whatever becomes of a worker is a record of its row, and all other rows are measured."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import child, messages, workers
from harness.names import UsageError
from harness.ops.block_copy import BlockCopyCase
from harness.ops.layouts import HND
from harness.options import Options
from harness.registry import Entry, Impl, load_file
from harness.supervisor import Supervisor
from harness.work import Work
from harness.workers import Spare

HOUSE = Path(workers.__file__).parent.parent
TINY = BlockCopyCase(name="copy.tiny", num_kv_heads=1, head_dim=16, block_size=4, num_copies=4, num_blocks=16)
OTHER = BlockCopyCase(name="copy.other", num_kv_heads=1, head_dim=16, block_size=4, num_copies=2, num_blocks=16)

#: A worker that speaks as ours does and loads nothing; what it does at a row is that row's name.
STAND_IN = """
import ctypes, json, os, signal, sys, threading, time

channel = os.fdopen(int(sys.argv[2]), "w", buffering=1)
asked = json.loads(sys.stdin.readline())

def tell(**message):
    channel.write(json.dumps(message) + "\\n")

def record(row):
    return json.dumps({
        "schema": 1, "run": asked["run"], "suite": "s", "started_at": "t", "op": "block_copy", "case": row["case"],
        "case_digest": "d", "shape": {}, "impl": row["entry"].split("[")[0], "layout": "HND", "status": "ok",
        "device": "toy", "device_kind": "cpu", "toolchain": {}, "params": row["params"], **failure,
    })

def words(text, then):
    print(text, file=sys.stderr, flush=True)
    then()

def hold_on():  # a child that keeps every descriptor
    if os.fork() == 0:
        time.sleep(60)
    os._exit(4)

def fail(reason):
    global failure
    failure = {"status": "failed", "reason": reason}

ACTS = {
    "chats": lambda: print("not my words", flush=True),
    "dies_spoilt": lambda: os.environ.get("SPOILT") and os._exit(9),
    "hangs_spoilt": lambda: os.environ.get("SPOILT") and time.sleep(60),
    "fails_spoilt": lambda: os.environ.get("SPOILT") and fail("check: OSError: no standard output"),
    "fails": lambda: fail("check: ValueError: no luck"),
    "lacks": lambda: fail("prepare: ModuleNotFoundError: no such"),
    "right": lambda: None,
    "spoils": lambda: os.environ.update(SPOILT="1"),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "reads_nothing": lambda: ctypes.string_at(0),
    "exit3": lambda: os._exit(3),
    "exit0": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "real_time": lambda: os.kill(os.getpid(), 40),
    "words": lambda: words("CUDA error: an illegal memory access\\nat row 7", lambda: os._exit(1)),
    "binary": lambda: (os.write(2, b"\\xff\\xfe broken " * 1000), os._exit(1)),
    "chatter": lambda: print("x" * (10 << 20), flush=True),
    "hang": lambda: words("waiting for a lock", lambda: time.sleep(60)),
    "closes": lambda: (os.close(channel.fileno()), time.sleep(60)),
    "holds_on": hold_on,
    "chats_there": lambda: os.write(channel.fileno(), b"debug\\n"),
    "begins_there": lambda: os.write(channel.fileno(), b'{"doing":'),
    "floods": lambda: os.write(channel.fileno(), b"x" * (2 << 20)),
    "forges_done": lambda: tell(done={}),
    "forges_list": lambda: tell(done=[]),
    "forges_kind": lambda: tell(finished=True),
    "forges_hello": lambda: tell(hello={}),
    "forges_doing": lambda: tell(doing="check", row=99, words=0),
    "forges_row": lambda: tell(record=record(asked["rows"][0]), row=99),
    "forges_record": lambda: tell(record="{}", row=row["number"]),
    "leaves": lambda: threading.Timer(0.3, os._exit, [1]).start(),
    "lost": lambda: (tell(lost="an illegal access"), os._exit(1)),
    "gives_up": lambda: tell(error="--device cuda: there is none"),
    "sleeps": lambda: time.sleep(60),
}
STARTS = {"exit5": lambda: words("no libtorch", lambda: os._exit(5)), "error": lambda: tell(error="no such device")}

if asked["run"] in STARTS:
    STARTS[asked["run"]]()
tell(hello={"device": {"slug": "toy", "kind": "cpu", "name": "toy:1", "uuid": "TOY-1"}, "toolchain": {"pid": os.getpid()}})
if asked["run"] == "mute":
    os._exit(6)
while True:
    for row in asked["rows"]:
        tell(doing=f"check {row['case']} {row['entry']}", row=row["number"], words=os.fstat(2).st_size)
        failure = {}
        act = row["entry"].split("[")[0].removeprefix("toy.")
        if act == "late":
            tell(record=record(row), row=row["number"])
            os._exit(7)
        ACTS[act.rstrip("2")]()
        tell(record=record(row), row=row["number"])
    tell(done={"check": 1.5})
    line = sys.stdin.readline()
    if not line:
        break
    asked = json.loads(line)
    tell(hello={"device": {"slug": "toy", "kind": "cpu", "name": "toy:1", "uuid": "TOY-1"}, "toolchain": {"pid": os.getpid()}})
"""


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(workers, "_START", STAND_IN)


def entry(name, **fields):
    return Entry(Impl(name=f"toy.{name}", op="block_copy", prepare="toys:prepare", **fields), HND)


def work(*names, cases=(TINY,), run="r", stall_s=30.0):
    rows = [(case, entry(name)) for case in cases for name in names]
    return Work(options=Options(bench=False), device="cpu", run=run, impl_files=(), rows=rows, stall_s=stall_s)


def outcomes(records):
    return {(record.case, record.impl.removeprefix("toy.")): (record.status, record.reason) for record in records}


def is_alive(pid):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(holds, seconds=20.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("segv", "failed", "killed by SIGSEGV"),
        ("reads_nothing", "failed", "killed by SIGSEGV"),
        ("exit3", "failed", "ended with exit code 3; it left no last words"),
        ("exit0", "failed", "ended with exit code 0; it left no last words"),
        ("kill", "failed", "killed by SIGKILL"),
        ("real_time", "failed", "killed by signal 40"),
        ("words", "failed", "ended with exit code 1; last words: CUDA error: an illegal memory access\nat row 7"),
        ("binary", "failed", "ended with exit code 1; last words: "),
        ("lost", "failed", "ended with exit code 1"),
        ("hang", "timeout", "silent for 1 s in 'check copy.tiny toy.hang[HND]', killed; last words: waiting for a lock"),
        ("closes", "failed", "closed its channel"),
        ("holds_on", "failed", "ended with exit code 4"),
        ("chats_there", "failed", "killed: no message of ours: b'debug'; it left no last words"),
        ("begins_there", "failed", "killed: no message of ours: b'{\"doing\":{"),
        ("floods", "failed", "killed: a line of more than 1048576 bytes: b'xxx"),
        ("forges_done", "failed", "killed: is done, and "),
        ("forges_list", "failed", "killed: no message of ours"),
        ("forges_kind", "failed", "killed: no message of ours"),
        ("forges_hello", "failed", "killed: hello in the middle of its work"),
        ("forges_doing", "failed", "killed: names row 99, which was not asked for"),
        ("forges_row", "failed", "killed: names row 99, which was not asked for"),
        ("forges_record", "failed", " by no record: schema must be 1 (got None)"),
    ],
)
def test_a_worker_that_dies_takes_one_row_with_it(stand_in, monkeypatch, name, status, says):
    """The record says how it died, or what was in its channel, and at what; rows before and after are measured."""
    monkeypatch.setattr(messages, "LONGEST", 1 << 20)
    begin = time.monotonic()
    boss = Supervisor(work("right", name, "right2", cases=(TINY, OTHER), stall_s=1.0))
    records = list(boss.records())
    found = outcomes(records)

    assert len(records) == len(found) == 6
    for case in ("copy.tiny", "copy.other"):
        assert found[case, "right"] == found[case, "right2"] == ("ok", None)
        died, reason = found[case, name]
        assert died == status
        assert says.replace("copy.tiny", case) in reason
        assert f"check {case} toy.{name}[HND]" in reason
        assert len(reason) < 2 * child.LAST_WORDS
    assert boss.facts["spent_s"] == {"check": 1.5}
    assert time.monotonic() - begin < 30


@pytest.fixture
def starts(monkeypatch):
    """Counts the workers that are started."""
    pids, start = [], workers.Worker.__init__
    monkeypatch.setattr(workers.Worker, "__init__", lambda self: (start(self), pids.append(self._child.process.pid))[0])
    return pids


@pytest.mark.parametrize(
    ("name", "was"),
    [
        ("dies_spoilt", "failed after other rows in one worker (died in 'check copy.tiny toy.dies_spoilt[HND]': ended with"),
        ("fails_spoilt", "failed after other rows in one worker (check: OSError: no standard output)"),
        ("hangs_spoilt", "timeout after other rows in one worker (silent for 1 s in"),
    ],
)
def test_a_row_that_fails_for_what_another_one_did_is_right_alone(stand_in, starts, name, was):
    """It dies, fails or hangs behind a row that has spoilt their worker: alone it is right, and a flag says so."""
    records = list(Supervisor(work("right", "spoils", name, "right2", stall_s=1.0)).records())
    (flag,) = next(record for record in records if record.impl == f"toy.{name}").flags

    assert {record.status for record in records} == {"ok"}
    assert [record.impl for record in records if record.flags] == [f"toy.{name}"]
    assert flag.startswith(was)
    assert flag.endswith("; alone it ended ok")
    assert len(starts) == 2  # who was right alone goes on with the rest


@pytest.mark.parametrize(("name", "num_workers"), [("fails", 2), ("lacks", 1), ("exit3", 4)])
def test_an_implementation_that_fails_alone_is_believed(stand_in, starts, name, num_workers):
    """It is tried once more for one of its rows; what fails to compile or to be found is not tried again at all."""
    cases = [dataclasses.replace(TINY, name=f"copy.{i}") for i in range(3)]
    records = list(Supervisor(work("right", name, cases=cases)).records())

    assert [record.status for record in records if record.impl == f"toy.{name}"] == ["failed"] * 3
    assert {record.status for record in records if record.impl == "toy.right"} == {"ok"}
    assert not any(record.flags for record in records)
    assert len(records) == 6
    assert len(starts) == num_workers


def test_last_words_are_the_rows_own(stand_in):
    """What rows before it have said is not quoted."""
    found = outcomes(Supervisor(work("exit3", "chats", "exit32")).records())

    assert found["copy.tiny", "exit32"][1].endswith("ended with exit code 3; it left no last words")


def test_a_lost_record_is_as_full_as_can_be(stand_in):
    """Case, shape, parameters, device and traffic are known without the worker."""
    (record,) = Supervisor(work("exit3")).records()

    assert (record.case, record.case_digest, record.shape) == (TINY.name, TINY.digest, TINY.to_json())
    assert (record.device, record.device_kind, record.layout, record.role) == ("toy", "cpu", "HND", "implementation")
    assert (record.traffic_bytes, record.flops, record.launch_s) == (TINY.traffic_bytes, 0, None)
    assert record.unit == {"name": "toy:1", "uuid": "TOY-1"}


def test_a_death_after_a_record_loses_nothing(stand_in):
    """A row that was recorded stays so; the next worker takes up the rest."""
    found = outcomes(Supervisor(work("late", "right")).records())

    assert found == {("copy.tiny", "late"): ("ok", None), ("copy.tiny", "right"): ("ok", None)}


def test_a_worker_that_names_no_row_takes_its_case(stand_in):
    """It dies after its start, before any row, each time: every case is told so, none is tried for ever."""
    found = outcomes(Supervisor(work("right", "right2", cases=(TINY, OTHER), run="mute")).records())

    assert {status for status, _ in found.values()} == {"failed"}
    assert len(found) == 4
    assert all("died in 'starting': ended with exit code 6" in reason for _, reason in found.values())


@pytest.mark.parametrize(
    ("run", "says"),
    [("exit5", "the worker died in 'starting': ended with exit code 5; last words: no libtorch"), ("error", "no such device")],
)
def test_a_worker_that_cannot_start_ends_the_run(stand_in, run, says):
    """There is no device to make records for: one line."""
    with pytest.raises(UsageError) as caught:
        list(Supervisor(work("right", run=run)).records())

    assert str(caught.value) == says


def test_wrong_usage_found_late_ends_the_run(stand_in):
    """What the worker calls wrong usage is not tried again; records so far have been handed over."""
    coming = Supervisor(work("right", "gives_up", "right2")).records()

    assert next(coming).impl == "toy.right"
    with pytest.raises(UsageError, match="--device cuda: there is none"):
        next(coming)


def test_much_output_is_no_obstacle(stand_in):
    """Ten megabytes on standard output neither block the worker nor reach ours."""
    assert outcomes(Supervisor(work("chatter", "right")).records())["copy.tiny", "chatter"] == ("ok", None)


def test_parameters_reach_the_worker_and_come_back(stand_in):
    """Rows that differ in parameters only are told apart."""
    rows = [(TINY, variant) for variant in entry("right", params={"width": (1, 2, 4)}).variants()]
    asked = Work(options=Options(), device=None, run="r", impl_files=(), rows=rows)

    assert [record.params for record in Supervisor(asked).records()] == [{"width": 1}, {"width": 2}, {"width": 4}]


def test_a_worker_killed_from_outside_is_replaced(stand_in):
    """Say, by the system when memory is short."""
    killed = []

    def kill(doing):
        if "sleeps" in doing:
            killed.append(boss.facts["toolchain"]["pid"])
            os.kill(killed[-1], signal.SIGKILL)

    boss = Supervisor(work("right", "sleeps", "right2"), kill)
    found = outcomes(boss.records())

    assert found["copy.tiny", "sleeps"][1].startswith("died in 'check copy.tiny toy.sleeps[HND]': killed by SIGKILL")
    assert found["copy.tiny", "right2"] == ("ok", None)


@pytest.mark.parametrize("how", ["interrupt", "close"])
def test_whoever_stops_listening_leaves_no_worker(stand_in, how):
    """Ctrl-C, or a caller that takes no more records: the worker and what it started are killed."""

    def interrupt(doing):
        if how == "interrupt" and "sleeps" in doing:
            raise KeyboardInterrupt

    boss = Supervisor(work("right", "sleeps"), interrupt)
    coming = boss.records()
    next(coming)
    pid = boss.facts["toolchain"]["pid"]
    assert is_alive(pid)
    if how == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            next(coming)
    else:
        coming.close()

    assert not is_alive(pid)


TOYS = """
import ctypes, os, sys, time
from harness.registry import Impl

def prepare(spec):
    from impls.torch_block_copy import prepare
    return prepare(spec)

def prepare_crash(spec):
    print("about to read nothing", flush=True)
    ctypes.string_at(0)

def prepare_exit(spec):
    sys.exit("no licence found")

def prepare_closes(spec):
    os.close(1)
    return prepare(spec)

def prepare_prints(spec):
    os.write(1, b"hello")
    print("about to run")
    return prepare(spec)

class Closing:
    # right, and closes what is not its own
    def __init__(self, right, files):
        self._right, self._files = right, files
    def __getattr__(self, name):
        return getattr(self._right, name)
    def launch(self, *tensors):
        self._right.launch(*tensors)
        for file in self._files:
            try: os.close(file)
            except OSError: pass

def prepare_shuts(spec):
    return Closing(prepare(spec), [0])

def prepare_shuts_all(spec):
    return Closing(prepare(spec), range(100))

def prepare_shuts_stdin(spec):
    sys.stdin.close()
    return prepare(spec)

class Chatting:
    # right, and writes to files that it has not opened
    def __init__(self, right, words):
        self._right, self._words = right, words
    def __getattr__(self, name):
        return getattr(self._right, name)
    def launch(self, *tensors):
        self._right.launch(*tensors)
        for file in map(int, os.listdir("/dev/fd")):
            try: file > 2 and os.write(file, self._words)
            except OSError: pass

def prepare_chats(spec):
    return Chatting(prepare(spec), b"debug\\n")

def prepare_forges(spec):
    return Chatting(prepare(spec), b'{"done": {}}\\n')

def prepare_breaks(spec):
    os.fstat = None
    return prepare(spec)

def prepare_lacks(spec):
    import not_there

def prepare_sleep(spec):
    with open(os.environ["TOY_PID"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)

def toy(name, prepare):
    return Impl(name=f"toy.{name}", op="block_copy", prepare=prepare)

IMPLS = (
    toy("right", "toys:prepare"), toy("crash", "toys:prepare_crash"), toy("exit", "toys:prepare_exit"),
    toy("closes", "toys:prepare_closes"), toy("prints", "toys:prepare_prints"),
    toy("chats", "toys:prepare_chats"), toy("forges", "toys:prepare_forges"), toy("breaks", "toys:prepare_breaks"),
    toy("shuts", "toys:prepare_shuts"), toy("shuts_all", "toys:prepare_shuts_all"),
    toy("shuts_stdin", "toys:prepare_shuts_stdin"),
    toy("lacks", "toys:prepare_lacks"), toy("sleep", "toys:prepare_sleep"),
)
"""


@pytest.fixture
def toys(tmp_path, monkeypatch):
    path = tmp_path / "toys.py"
    path.write_text(TOYS)
    monkeypatch.setitem(sys.modules, "toys", None)
    monkeypatch.delitem(sys.modules, "toys")
    return str(path)


def test_the_real_worker_dies_as_told(toys):
    """A crash and an exit inside an implementation, an import that fails, and right rows around them."""
    table = {impl.name: impl for impl in load_file(toys)}
    rows = [(TINY, Entry(table[f"toy.{name}"], HND)) for name in ("lacks", "crash", "right", "exit")]
    asked = Work(options=Options(bench=False), device="cpu", run="r", impl_files=[toys], rows=rows)
    boss = Supervisor(asked)
    found = outcomes(boss.records())

    assert found["copy.tiny", "right"] == ("ok", None)
    assert found["copy.tiny", "lacks"] == ("failed", "prepare: ModuleNotFoundError: No module named 'not_there'")
    status, reason = found["copy.tiny", "crash"]
    assert status == "failed"
    assert "killed by SIGSEGV; last words: about to read nothing\nFatal Python error: Segmentation fault" in reason
    assert "toys.py" in reason
    assert found["copy.tiny", "exit"][0] == "failed"
    assert "no licence found" in found["copy.tiny", "exit"][1]
    assert boss.facts["device"]["kind"] == "cpu"


def test_the_real_worker_condemns_no_innocent(toys):
    """One closes standard output; the next one writes there, and is right alone. A third is not quoted with its words."""
    table = {impl.name: impl for impl in load_file(toys)}
    rows = [(TINY, Entry(table[f"toy.{name}"], HND)) for name in ("closes", "prints", "exit")]
    asked = Work(options=Options(bench=False), device="cpu", run="r", impl_files=[toys], rows=rows)
    records = {record.impl: record for record in Supervisor(asked).records()}

    assert records["toy.closes"].status == "ok"
    assert records["toy.prints"].status == "ok"
    assert records["toy.prints"].flags[0].startswith("failed after other rows in one worker (prepare: OSError: [Errno 9]")
    assert records["toy.exit"].reason.endswith("last words: no licence found")


def test_a_row_that_closes_the_harness_descriptors_costs_itself(toys):
    """Standard input is nobody's; without its channel the worker is replaced, and every other row is right."""
    table = {impl.name: impl for impl in load_file(toys)}
    chosen = [(TINY, "shuts"), (TINY, "shuts_stdin"), (TINY, "right"), (OTHER, "shuts_all"), (OTHER, "right")]
    rows = [(case, Entry(table[f"toy.{name}"], HND)) for case, name in chosen]
    asked = Work(options=Options(bench=False), device="cpu", run="r", impl_files=[toys], rows=rows)
    found = outcomes(Supervisor(asked).records())

    status, reason = found.pop((OTHER.name, "shuts_all"))
    assert status == "failed"
    assert "lost its channel, by a descriptor closed or replaced that was not the row's own" in reason
    assert set(found.values()) == {("ok", None)}
    assert len(found) == 4


@pytest.mark.parametrize(
    ("name", "says"), [("chats", "no message of ours: b'debug'"), ("forges", "is done, and 1 of 1 rows have no record")]
)
def test_a_row_that_writes_into_the_channel_costs_itself(toys, name, says):
    """Whatever it writes there, its worker is killed, and every other row is right; whatever numbers descriptors have."""
    table = {impl.name: impl for impl in load_file(toys)}
    with contextlib.ExitStack() as many:
        for _ in range(20):
            many.enter_context(open(os.devnull))
        found = _channel_found(table, toys, name)

    for case in (TINY.name, OTHER.name):
        assert found[case, "right"] == ("ok", None)
        assert found[case, name][0] == "failed"
    assert says in found[TINY.name, name][1]


def _channel_found(table, toys, name):
    rows = [(case, Entry(table[f"toy.{toy}"], HND)) for case in (TINY, OTHER) for toy in ("right", name)]
    asked = Work(options=Options(bench=False), device="cpu", run="r", impl_files=[toys], rows=rows)
    return outcomes(Supervisor(asked).records())


def test_what_goes_wrong_in_the_worker_costs_a_row(toys):
    """It ends with a traceback for last words; only wrong usage ends the run."""
    table = {impl.name: impl for impl in load_file(toys)}
    rows = [(case, Entry(table[f"toy.{name}"], HND)) for case in (TINY, OTHER) for name in ("right", "breaks")]
    asked = Work(options=Options(bench=False), device="cpu", run="r", impl_files=[toys], rows=rows)
    found = outcomes(Supervisor(asked).records())

    for case in (TINY.name, OTHER.name):
        assert found[case, "right"] == ("ok", None)
        assert found[case, "breaks"][0] == "failed"
        assert found[case, "breaks"][1].endswith("TypeError: 'NoneType' object is not callable")


def test_a_kept_worker_that_dies_before_its_next_work_costs_no_row(stand_in, starts):
    """What was left in it is no row's own: a new one takes all."""
    spare = Spare()
    assert outcomes(Supervisor(work("leaves"), spare=spare).records()) == {("copy.tiny", "leaves"): ("ok", None)}
    wait_until(lambda: not is_alive(starts[0]))
    found = outcomes(Supervisor(work("right", "right2", cases=(OTHER,)), spare=spare).records())
    spare.close()

    assert found == {("copy.other", "right"): ("ok", None), ("copy.other", "right2"): ("ok", None)}
    assert len(starts) == 2


PARENT = """
import sys
from harness.cli import main
main(["check", "--impl-file", sys.argv[1], "--impl", "toy.sleep", "--shape", "q=1,kv=1,d=8,lens=4", "--out", sys.argv[2]])
"""


def test_a_worker_dies_with_its_parent(toys, tmp_path):
    """Killed with -9, the parent can tell nobody; the system does."""
    toys_path = Path(toys)
    toys_path.write_text(TOYS.replace('op="block_copy"', 'op="attention"'))
    pid_file = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, toys, str(tmp_path / "runs")],
        cwd=HOUSE, env={**os.environ, "TOY_PID": str(pid_file), "OMP_NUM_THREADS": "1"},
    )
    try:
        wait_until(lambda: parent.poll() is not None or (pid_file.exists() and pid_file.read_text()), 60)
        worker = int(pid_file.read_text())
        assert is_alive(worker)
    finally:
        parent.kill()
        parent.wait()

    wait_until(lambda: not is_alive(worker))

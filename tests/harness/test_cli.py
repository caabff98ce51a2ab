"""People's door: an exit code for each situation, one line for each mistake, and nothing kept is lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import cli
from harness.cli import COMMANDS, main
from harness.store import Appender, load
from tests.harness.interruptible import started

HOUSE = Path(cli.__file__).parent.parent
SHAPE = ("--shape", "name=tiny,q=1,kv=1,d=8,bs=4,lens=5,dtype=f32")

TOYS = """
import os, time
from harness.registry import Impl, Limits, Prepared

def prepare(spec):
    from impls.torch_gather import prepare
    return prepare(spec)

class Idle(Prepared):
    def launch(self, *tensors):
        pass

def prepare_idle(spec):
    return Idle()

def prepare_broken(spec):
    raise RuntimeError("no such luck")

def prepare_sleep(spec):
    with open(os.environ["TOY_PID"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)

def toy(name, prepare="prepare", **fields):
    return Impl(name=name, op="attention", prepare=f"toys:{prepare}", **fields)

IMPLS = (
    toy("toy.right", params={"width": (1, 2)}), toy("toy.wrong", "prepare_idle"), toy("toy.broken", "prepare_broken"),
    toy("toy.picky", limits=Limits(max_head_dim=4)), toy("peer.wrong", "prepare_idle"), toy("toy.sleep", "prepare_sleep"),
    toy("control.wrong", "prepare_idle", role="control"),
)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of one's own to stand in, with toys in a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "toys", None)
    monkeypatch.delitem(sys.modules, "toys")
    (tmp_path / "toys.py").write_text(TOYS)
    return tmp_path


def run(*words):
    """The exit code, also where argparse leaves by itself."""
    try:
        return main(words)
    except SystemExit as left:
        return left.code


def check(impls, *words, command="check"):
    return run(command, "--in-process", "--impl-file", "toys.py", "--impl", impls, *SHAPE, "--device", "cpu", *words)


@pytest.mark.parametrize(
    ("impls", "words", "code"),
    [
        ("toy.right", (), 0),
        ("toy.right,toy.wrong", (), 1),
        ("toy.broken", (), 1),
        ("toy.picky,toy.right", (), 0),
        ("toy.picky", (), 2),
        ("peer.wrong", (), 0),
        ("peer.wrong", ("--strict-peers",), 1),
        ("control.wrong,toy.right", ("--strict-peers",), 0),
        ("toy.right", ("--set", "width=2"), 0),
    ],
    ids=str,
)
def test_the_exit_code_tells_whether_ours_is_right(here, capsys, impls, words, code):
    """Wrong or failed counts; unsupported does not unless all is, a control never does, a peer only when told so."""
    assert check(impls, *words) == code
    (records,) = here.glob("results/runs/*/records.jsonl")
    assert len(load(records)[0]) == len(impls.split(","))
    assert str(records.relative_to(here)) in capsys.readouterr().out


def test_where_nothing_runs_one_line_says_why(here, capsys):
    """A gate that looks at nothing is not green: exit code 2, and the reason that most rows have."""
    assert check("toy.picky") == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pagedbench: nothing ran: 0 ok, 0 wrong, 1 unsupported, 0 skipped, 0 failed; 1 of 1 rows: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("chek",), "no command 'chek'; did you mean check"),
        (("list", "--impl", "torch.gathr"), "no implementation matches 'torch.gathr'; did you mean torch.gather"),
        (("list", "--impl", "torch.gather[HDN]"), "no implementation matches 'torch.gather[HDN]'; did you mean torch.gather["),
        (("list", "--suite", "smok"), "no suite 'smok'; did you mean smoke"),
        (("list", "--case", "facts.zz"), "no case matches 'facts.zz'; did you mean facts."),
        (("list", "--resources", "--impl", "cuda.*"), "--resources shows every kernel of this repository; leave --impl out"),
        (("list", "--resources", "--impl-file", "toys.py"), "every kernel of this repository; leave --impl-file out"),
        (("list", "--layouts", "HDN"), "--layouts HDN: no such layout; there are: HND, NHD"),
        (("check", "--shape", "q=3,kv=2,d=8,lens=4"), "num_q_heads must be a multiple of num_kv_heads (got (3, 2))"),
        (("check", "--shape", "q=3"), "--shape q=3: lacks kv, d, lens"),
        (("check", "--shape", "q=1,kv=1,d=8,bs=0,lens=4"), "block_size must be a whole number of at least 1 (got 0)"),
        (("check", "--case-file", "nowhere.json"), "--case-file nowhere.json: No such file or directory"),
        (("check", "--impl-file", "nowhere.py"), "--impl-file nowhere.py: no such file"),
        (("check", "--impl-file", "bad.py"), "--impl-file bad.py: ZeroDivisionError: division by zero"),
        (("check", "--set", "width"), "--set must read NAME=VALUE (got 'width')"),
        (("check", "--set", "tile=64", "--set", "tile=16"), "--set tile is given twice (64 and 16); `pagedbench tune` tries"),
        (("check", "--set", "widht=--5"), "--set widht: no chosen implementation declares it"),
        (("check", "--device", "gpu", *SHAPE, "--in-process"), "--device must be cpu, cuda or cuda:INDEX (got 'gpu')"),
        (("check", "--device", "cuda:99", *SHAPE, "--in-process"), "--device cuda:99: "),
        (("check", "--out", "toys.py", *SHAPE), "cannot write results to toys.py: "),
        (("check", "--stall", "0", *SHAPE), "argument --stall: must be seconds above 0 (got '0')"),
        (("check", "--stall", "nan", *SHAPE), "argument --stall: must be seconds above 0 (got 'nan')"),
        (("check", "--stall", "soon", *SHAPE), "argument --stall: must be seconds above 0 (got 'soon')"),
        (("fuzz", "--stall", "-1"), "argument --stall: must be seconds above 0 (got '-1')"),
        (("fuzz", "--minutes", "nan"), "argument --minutes: must be minutes above 0 (got 'nan')"),
        (("doctor", "--strict", "--sm-clock", "-5"), "argument --sm-clock: must be a whole number of at least 1 (got '-5')"),
        (("calibrate", "--repeats", "0", *SHAPE), "argument --repeats: must be a whole number of at least 1 (got '0')"),
        (("check", "--impl", "torch.cache_write", *SHAPE), "none of the chosen implementations has the operator of "),
        (("list", "--shape", "name=facts.a,q=1,kv=1,d=8,lens=4"), "case 'facts.a' is built in, and is another (its digest is "),
        (("list", "--shape", "name=mine,q=1,kv=1,d=8,lens=4", "--shape", "name=mine,q=1,kv=1,d=8,lens=5"),
         "two cases are named 'mine'"),
        (("check", "--nonsense"), "unrecognized arguments: --nonsense"),
        (("check", "--imp", "torch.*"), "unrecognized arguments: --imp"),
        ((), "the following arguments are required: COMMAND"),
        (("report", "nowhere"), "cannot read records of nowhere: No such file or directory"),
        (("report",), "no run under results/runs; `pagedbench run` makes one"),
        (("report", "empty.jsonl"), "empty.jsonl holds no records"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_one_line(here, capsys, words, says):
    """What was got and what is there instead; exit code 2, and no run that `report` would take for the latest."""
    (here / "bad.py").write_text("1 / 0")
    (here / "empty.jsonl").write_text("not a record\n")
    assert run(*words) == 2
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]

    assert says in last
    assert last.startswith("pagedbench")
    assert "Traceback" not in printed.err
    assert not any(records.stat().st_size for records in here.glob("results/runs/*/records.jsonl"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(capsys, command):
    """And the example is a command line of that command."""
    assert run(command, "--help") == 0
    assert f"example: pagedbench {command}" in capsys.readouterr().out


def test_help_names_every_command(capsys):
    """With what each is for."""
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)


def test_json_is_for_machines(here, capsys):
    """Standard output holds a line a record and nothing else."""
    assert check("toy.right,toy.broken", "--json") == 1
    printed = capsys.readouterr()
    records = [json.loads(line) for line in printed.out.splitlines()]

    assert {record["impl"]: record["status"] for record in records} == {"toy.right": "ok", "toy.broken": "failed"}
    assert "records: " in printed.err


def test_a_report_names_lines_that_are_no_records(here, capsys):
    """They are skipped, and what remains is reported."""
    check("toy.right")
    (folder,) = here.glob("results/runs/*")
    with open(folder / "records.jsonl", "a") as file:
        file.write("{\n[1]\n")
    capsys.readouterr()
    assert run("report") == 0
    printed = capsys.readouterr()

    assert [line.split(": skipped")[0] for line in printed.err.splitlines()] == [
        f"pagedbench: {folder.relative_to(here)}/records.jsonl:{number}" for number in (2, 3)
    ]
    assert "toy.right" in printed.out
    assert (folder / "report.html").exists()


def test_a_disk_that_is_full_ends_the_run_in_one_line(here, capsys):
    """With the file's name; no traceback."""
    check("toy.right")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))
    try:
        code = check("toy.right", "--out", "other")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines = capsys.readouterr().err.strip().splitlines()

    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("pagedbench: ")
    assert "other/" in lines[0]


def test_a_note_that_steers_the_terminal_is_shown_without(here, capsys):
    """A note is its author's: a colour or a line end in it changes nothing around it."""
    tail = 'IMPLS = (toy("toy.right", note="a\\x1b[31m\\nb"),)\n'
    (here / "toys.py").write_text(TOYS + tail, encoding="utf-8")
    assert run("list", "--impl-file", "toys.py", "--impl", "toy.*") == 0

    assert "a?[31m?b\n" in capsys.readouterr().out


def test_a_remark_that_is_no_text_costs_no_report(here):
    """A ledger may hold anything, and the report shows it; it was lost for all rows over one remark."""
    (here / "toys.py").write_text(TOYS.replace("    from impls.torch_gather import prepare\n    return prepare(spec)", """\
    from impls.torch_gather import prepare
    prepared = prepare(spec)
    prepared.ledger = {"casts": ["query", 1], "allocates": None}
    return prepared"""), encoding="utf-8")
    assert check("toy.right", command="run") == 0
    (report,) = here.glob("results/runs/*/report.md")

    assert "['query', 1]" in report.read_text(encoding="utf-8").replace("\\", "")


@pytest.mark.parametrize("name", ["records.jsonl", "run.json", "report.md"])
def test_a_full_disk_says_what_and_what_is_kept(here, monkeypatch, capsys, name):
    """The file that could not be written, and where the records are; nothing of it hides the other."""
    full = (errno.ENOSPC, "No space left on device")
    write_text, append = Path.write_text, Appender.append

    def write(path, *args, **kwargs):
        if name in path.name and (name != "run.json" or (path.parent / name).exists()):
            raise OSError(*full)
        return write_text(path, *args, **kwargs)

    def keep(store, record):
        if store.count and name == store.path.name:
            raise OSError(*full, str(store.path))
        append(store, record)

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(Appender, "append", keep)
    code = check("toy.right,toy.picky", command="run")
    (folder,) = here.glob("results/runs/*")
    told = capsys.readouterr().err

    assert code == (0 if name == "run.json" else 2)
    assert f"No space left on device: '{folder.relative_to(here) / name}'; " in told
    assert f"{1 if name == 'records.jsonl' else 2} records are kept in {folder.relative_to(here) / 'records.jsonl'}" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("check", "--case-file", "pipe"), "--case-file pipe: not a regular file"),
        (("check", "--case-file", "/dev/zero"), "--case-file /dev/zero: not a regular file"),
        (("report", "pipe"), "cannot read records of pipe: not a regular file"),
        (("report", "odd"), "cannot read records of odd: not a regular file"),
    ],
    ids=str,
)
def test_what_is_no_regular_file_is_refused_unread(here, capsys, words, says):
    """A device without an end, a pipe into which nobody writes: neither is waited for."""
    (here / "odd").mkdir()
    for pipe in ("pipe", "odd/records.jsonl"):
        os.mkfifo(here / pipe)
    assert run(*words) == 2

    assert says in capsys.readouterr().err


def test_an_interrupt_within_an_impl_file_is_one_line(here, capsys):
    """Ctrl-C while it is imported, or one of its own: named, and no traceback."""
    (here / "slow.py").write_text("raise KeyboardInterrupt")
    assert run("check", "--impl-file", "slow.py", *SHAPE) == 2

    assert capsys.readouterr().err == "pagedbench: --impl-file slow.py: interrupted while it was imported\n"


def test_a_fault_of_the_harness_says_so(monkeypatch, capsys):
    """With its traceback, for whoever is to mend it, and exit code 2."""
    monkeypatch.setattr("harness.commands.list.main", lambda arguments: 1 / 0)
    assert run("list") == 2
    printed = capsys.readouterr().err

    assert "ZeroDivisionError" in printed
    assert printed.splitlines()[-1] == "pagedbench: the harness itself failed; please report the lines above"


def test_an_interrupt_outside_a_run_is_one_line(monkeypatch, capsys):
    """Ctrl-C while a command looks around."""

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.commands.list.main", interrupted)
    assert run("list") == 2
    assert capsys.readouterr().err == "pagedbench: interrupted\n"


@pytest.mark.parametrize("words", [("list", "--suite", "full"), ("list", "--impl", "torch.gather")], ids=" ".join)
def test_a_reader_that_leaves_is_no_fault(words):
    """`pagedbench list | head -1`: nothing is printed about it, also where all output fits the pipe."""
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "harness", *words]
    done = subprocess.run(command, cwd=HOUSE, env=env, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)

    assert (done.returncode, done.stderr) == (2, b"")


def test_without_standard_output_there_is_one_line():
    """`pagedbench list >&-`: Python has no such stream then."""
    command = ["sh", "-c", f"{sys.executable} -m harness list >&-"]
    done = subprocess.run(command, cwd=HOUSE, stderr=subprocess.PIPE, text=True, timeout=60)

    assert done.returncode == 2
    assert done.stderr == "pagedbench: standard output is closed; send it somewhere, if only to /dev/null\n"


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", [("list",), ("list", "--impl", "nope")], ids=" ".join)
def test_a_log_on_a_full_disk_is_a_fault_of_the_harness(words, unbuffered):
    """`pagedbench list > log 2>&1`: what cannot be said is neither exit code 1 ("something is wrong") nor Python's own 120."""
    command, env = [sys.executable, "-m", "harness", *words], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=HOUSE, stdout=full, stderr=full, env=env, timeout=60)

    assert done.returncode == 2


def test_names_of_folders_do_not_steer_the_terminal(here, capsys):
    """--out holds an escape code and a line end: one clean line says where records are; errors are cleaned alike."""
    check("toy.right", "--out", "runs\x1b[31m\nx")
    assert "records: runs?[31m?x/" in capsys.readouterr().out

    assert run("list", "--impl-file", "no\x1b[31m.py") == 2
    assert capsys.readouterr().err == "pagedbench: --impl-file no?[31m.py: no such file\n"


def test_ctrl_c_keeps_what_there_is(here):
    """In the middle of a row: exit code 2, one line that says where the records are, and no worker left behind."""
    words = ("check", "--impl-file", "toys.py", "--impl", "toy.right,toy.sleep", *SHAPE, "--device", "cpu")
    env = {**os.environ, "TOY_PID": str(here / "pid"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOUSE)}
    with started([*words], env=env) as running:
        end = time.monotonic() + 60
        while not ((here / "pid").exists() and (here / "pid").read_text()):
            assert time.monotonic() < end
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.05)
        worker = int((here / "pid").read_text())
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
    (records,) = here.glob("results/runs/*/records.jsonl")
    num_kept = len(load(records)[0])
    stat = Path(f"/proc/{worker}/stat")

    assert running.returncode == 2
    assert said == f"pagedbench: interrupted; {num_kept} records are kept in {records.relative_to(here)}\n"
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


EMPTY = [
    (option, text) for option in ("--impl", "--case", "--layouts") for text in ("", ",", " ", "torch.*,", ",torch.*")
] + [(option, "") for option in ("--suite", "--case-file", "--shape")]


@pytest.mark.parametrize(("option", "text"), EMPTY)
@pytest.mark.parametrize("command", ["list", "check", "tune"])
def test_an_empty_choice_is_not_everything(here, capsys, command, option, text):
    """What an unset shell variable leaves is wrong usage, not a run of all there is."""
    words = () if option in ("--suite", "--case-file", "--shape", "--case") else SHAPE
    assert run(command, f"{option}={text}", *words, *(() if option == "--impl" else ("--impl", "torch.blocked"))) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]

    assert option in last
    assert "is a shell variable unset?" in last
    assert not list(here.glob("results"))


@pytest.mark.parametrize(
    "words",
    [
        ("check", "--out="), ("fuzz", "--out="), ("report", "--out="), ("check", "--resume="), ("report", ""),
        ("compare", "", "a"), ("compare", "a", "b", "--baselines="), ("accept", "a", "--baselines="),
        ("history", "show", "--history="), ("calibrate", "--runs-dir="), ("check", "--device="),
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_empty_path_is_not_the_folder_one_stands_in(here, capsys, words):
    """No folder is filled or read because its name was left out."""
    assert run(*words) == 2

    assert "is a shell variable unset?" in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("tile=abc", "torch.blocked declares 256, 16, 64, 1024; a value must be a whole number of at least 16 (got 'abc')"),
        ("tile=1.5", "must be a whole number of at least 16 (got '1.5')"),
        ("tile=-3", "must be a whole number of at least 16 (got '-3')"),
        ("tile=8", "must be a whole number of at least 16 (got '8')"),
        (
            "copy=bulky",
            "cuda.tensor_core declares planned, bulk, async, load, load_once; a value must be one of them (got 'bulky')",
        ),
    ],
)
def test_a_setting_is_of_the_declared_type(capsys, setting, says):
    """Refused before anything runs, with what is declared."""
    impl = "cuda.tensor_core" if setting.startswith("copy") else "torch.blocked"
    assert run("check", "--impl", impl, *SHAPE, "--set", setting) == 2

    assert says in capsys.readouterr().err


def test_a_setting_may_be_one_that_is_not_declared(here):
    """The table lists what is worth trying; the record has what was asked for, as a number."""
    assert run("check", "--in-process", "--impl", "torch.blocked[HND]", *SHAPE, "--device", "cpu", "--set", "tile=48") == 0
    (file,) = here.glob("results/runs/*/records.jsonl")

    assert [record.params for record in load(file)[0]] == [{"tile": 48}]


def test_a_case_of_a_suite_may_be_spelt_again(here, capsys):
    """Equal content under the built-in name is the same case, once, also beside its suite."""
    assert run("list", "--json", "--suite", "facts", "--shape", "name=facts.a,q=32,kv=8,d=128,lens=8192x64") == 0

    assert capsys.readouterr().out.count('"name": "facts.a"') == 1

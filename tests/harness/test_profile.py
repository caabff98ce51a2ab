"""`pagedbench profile`: the counters that ncu writes, read; the process that launches; and what is said where neither is."""

from __future__ import annotations

import json
import os
import sys

import pytest

from harness import ncu
from harness.cli import main
from harness.ncu import COUNTERS, STALLS, Unreadable, medians, parse

HEADS = ["ID", "Process ID", "Kernel Name", "Block Size", "CC"]
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
UNITS = {
    "elapsed_s": "ns", "dram_read_bytes": "byte", "dram_written_bytes": "Kbyte", "l2_hit_share": "%", "occupancy": "%",
    "num_ctas": "", "num_threads": "", "registers": "register/thread", "static_bytes": "byte/block",
    "dynamic_bytes": "Kbyte/block", "local_loads": "inst", "local_stores": "inst",
}
VALUES = {
    "elapsed_s": "480,160", "dram_read_bytes": "2,151,000,000", "dram_written_bytes": "35.5", "l2_hit_share": "1.75",
    "occupancy": "12.44", "num_ctas": "132", "num_threads": "256", "registers": "160", "static_bytes": "1024",
    "dynamic_bytes": "135.18", "local_loads": "0", "local_stores": "0",
}


def table(kernels, *, units=UNITS, stalls=("long_scoreboard", "selected")):
    """As `ncu --csv --page raw` writes it: names, units, then a line a launch; each kernel a mapping of what differs."""
    columns = [COUNTERS[name] for name in units] + [STALL.format(name) for name in stalls]
    lines = [[*HEADS, *columns], ["", "", "", "", "", *units.values(), *("inst" for _ in stalls)]]
    for number, (name, changed) in enumerate(kernels):
        values = [{**VALUES, **changed}[unit] for unit in units]
        lines.append([str(number), "71", name, "(256, 1, 1)", "9.0", *values, *("6.0", "2.0")[: len(stalls)]])
    text = "".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines)
    return "==PROF== Connected to process 71 (python)\n" + text


def test_counters_are_read_in_si_units():
    """Thousands are grouped, units are scaled, percents are shares; stalls are shares of all that warps did."""
    (kernel,) = parse(table([("tensor_core", {})]))

    assert kernel.name == "tensor_core"
    assert kernel.counters == pytest.approx({
        "elapsed_s": 480.16e-6, "dram_read_bytes": 2.151e9, "dram_written_bytes": 35500, "l2_hit_share": 0.0175,
        "occupancy": 0.1244, "num_ctas": 132, "num_threads": 256, "registers": 160, "static_bytes": 1024,
        "dynamic_bytes": 135180, "local_loads": 0, "local_stores": 0,
    })  # fmt: skip
    assert kernel.stalls == {"long_scoreboard": 0.75, "selected": 0.25}


@pytest.mark.parametrize(
    ("unit", "text", "seconds"),
    [("ns", "1500", 1.5e-6), ("us", "1.5", 1.5e-6), ("second", "1.5e-06", 1.5e-6), ("nsecond", "1,500", 1.5e-6)],
)
def test_units_of_every_release_are_known(unit, text, seconds):
    """Base units are asked for; releases spell them differently."""
    (kernel,) = parse(table([("k", {"elapsed_s": text})], units={"elapsed_s": unit}))

    assert kernel.counters["elapsed_s"] == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["n/a", "", "nan"])
def test_counters_that_are_missing_are_none(text):
    """Of the device, or of this ncu: a value that is not there, or a column."""
    (kernel,) = parse(table([("k", {"dram_read_bytes": text})], units={"dram_read_bytes": "byte", "registers": ""}, stalls=()))

    assert kernel.counters["dram_read_bytes"] is None
    assert kernel.counters["occupancy"] is None
    assert kernel.counters["registers"] == 160
    assert kernel.stalls == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no table of counters in 0 lines"),
        ("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user\n", "==ERROR== ERR_NVGPUCTRPERM - The user"),
        ("==WARNING== No kernels were profiled.\n", "==WARNING== No kernels were profiled"),
        ('"ID","Name"\n"",""\n"0","k"\n', "no column 'Kernel Name'"),
        (table([]), "its table has no kernel"),
        (table([("k", {"occupancy": "12,44"})]), r"occupancy|warps_active.* is no number as English writes it \(got '12,44'\)"),
        (table([("k", {"occupancy": "12; rm"})]), "is no number"),
        (table([("k", {})], units={"elapsed_s": "fortnight"}), "unit unknown here .got 'fortnight'"),
    ],
)
def test_what_is_no_table_of_counters_is_told(text, why):
    """With ncu's own words where it has some; a number is never guessed at."""
    with pytest.raises(Unreadable, match=why):
        parse(text)


def test_rows_that_break_off_have_what_they_have():
    """A log that was cut, and lines of ncu's own between the rows."""
    text = table([("k", {}), ("m", {})]).replace('"1","71"', '==PROF== Disconnected\n"1","71"')
    cut = text[: text.rindex('"(256, 1, 1)"')]
    whole, broken = parse(cut)

    assert whole.counters["registers"] == 160
    assert (broken.name, set(broken.counters.values())) == ("m", {None})


def test_launches_are_one_by_their_medians():
    """Kernel by kernel of a launch, in order."""
    kernels = parse(table([(name, {"elapsed_s": n}) for n in ("300", "100", "200") for name in ("split", "merge")]))
    split, merge = medians(kernels, 3)

    assert (split.name, merge.name) == ("split", "merge")
    assert split.counters["elapsed_s"] == pytest.approx(200e-9)


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b", "a"), ("a", "b", "a", "b", "b", "a")])
def test_launches_that_differ_are_told(names):
    """Counters of one kernel are never taken for another's."""
    with pytest.raises(Unreadable, match="do not repeat"):
        medians(parse(table([(name, {}) for name in names])), 3)


def test_the_command_asks_for_every_counter(tmp_path):
    """By name, of the launches between the profiler's start and stop, with the clocks of a timed run."""
    words = ncu.command("/opt/ncu", tmp_path / "log", ["python", "-c", "pass"])
    asked = words[words.index("--metrics") + 1].split(",")

    assert words[0] == "/opt/ncu"
    assert words[-3:] == ["python", "-c", "pass"]
    assert set(asked) == {*COUNTERS.values(), *map(STALL.format, STALLS)}
    assert "--profile-from-start off --target-processes all --clock-control none" in " ".join(words)


# The command

KERNELS = """
import impls.torch_gather
from harness.ops.layouts import HND, NHD
from harness.registry import Impl

def prepare(spec):
    prepared = impls.torch_gather.prepare(spec)
    prepared.kernels = ({"name": "split", "registers": 168, "shared_bytes": 2048, "spill_bytes": 16 * spec.params["depth"]},)
    return prepared

def fail(spec):
    prepared = prepare(spec)
    prepared.launch = lambda *tensors: os._exit(3)
    return prepared

import os
IMPLS = (
    Impl(name="my.split", op="attention", prepare="kernels:prepare", layouts=(HND, NHD), params={"depth": (1, 2)}),
    Impl(name="my.dying", op="attention", prepare="kernels:fail", params={"depth": (1,)}),
)
"""
#: Runs what it is given, as ncu does, then writes the table that stands beside it.
PROGRAM = """#!{python}
import pathlib, shutil, subprocess, sys
words = sys.argv[1:]
log = words[words.index("--log-file") + 1]
code = subprocess.run(words[words.index("--log-file") + 2:]).returncode
shutil.copy(pathlib.Path(__file__).with_name("table"), log)
sys.exit(code)
"""


@pytest.fixture
def profile(tmp_path, monkeypatch, capsys):
    """Run `pagedbench profile` beside kernels.py; `counted` is what ncu writes, None where there is no ncu."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)

    def run(*words, counted=None):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        if counted is not None:
            (folder / "ncu").write_text(PROGRAM.format(python=sys.executable))
            (folder / "ncu").chmod(0o755)
            (folder / "table").write_text(counted)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
        monkeypatch.delitem(sys.modules, "kernels", raising=False)
        code = main(["profile", *words, "--impl-file", "kernels.py", "--device", "cpu"])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


THREE = table([(name, {}) for _ in range(3) for name in ("split", "merge")])


def test_without_ncu_the_compiler_is_quoted(profile):
    """Registers, spills and static shared memory, and one line how to get the rest."""
    code, out, _ = profile("my.split", "edges.group_7", "--set", "depth=2")

    assert code == 0
    assert "my.split[HND] on edges.group_7" in out
    assert "registers      168" in out
    assert "spills         32 B" in out
    assert "counters: Nsight Compute is not on PATH" in out


def test_with_ncu_each_kernel_is_shown(profile):
    """Time, grid, DRAM, L2, occupancy, stalls, registers, spills, shared memory; and what the launch moved in all."""
    code, out, _ = profile("my.split", "--shape", "q=4,kv=2,d=64,bs=16,lens=100x2,dtype=f32", counted=THREE)

    assert code == 0
    assert "480.2 µs" in out
    assert "2.15 GB read, 35.5 kB written" in out
    assert "long_scoreboard 75.0%" in out
    assert "16 B, 0 local loads and stores" in out
    assert "4.30 GB of DRAM" in out


def test_layouts_and_json(profile):
    """A row a layout; JSON has what the text has, in SI."""
    code, out, _ = profile("my.split", "edges.group_7", "--layouts", "all", "--json", counted=THREE)
    rows = [json.loads(line) for line in out.splitlines()]

    assert code == 0
    assert [row["layout"] for row in rows] == ["HND", "NHD"]
    assert rows[0]["kernels"][1]["counters"]["registers"] == 160
    assert rows[0]["params"] == {"depth": 1}


@pytest.mark.parametrize(
    ("words", "counted", "code", "why"),
    [
        (("my.dying", "edges.group_7"), THREE, 1, "ended with exit code 3 while it launched"),
        (("my.split", "edges.group_7"), "==ERROR== ERR_NVGPUCTRPERM - no\n", 2, "==ERROR== ERR_NVGPUCTRPERM - no"),
        (("my.split",), None, 2, "profile needs a case"),
        (("my.split", "edges.group_9"), None, 2, "edges.group_9"),
        (("my.spilt", "edges.group_7"), None, 2, "did you mean my.split"),
        (("cuda.split_kv", "edges.group_7"), None, 2, "runs on cuda only"),
        (("my.split", "edges.group_7", "--set", "depth=0"), None, 2, "depth=0"),
    ],
)
def test_what_cannot_be_profiled_is_told(profile, words, counted, code, why):
    """1 where the kernel fails, 2 where it was asked for wrongly, or ncu may not count here."""
    got, _, err = profile(*words, counted=counted)

    assert got == code
    assert why in err

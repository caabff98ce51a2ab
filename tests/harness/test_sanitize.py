"""What compute-sanitizer finds is the record of the row in which it was found."""

from __future__ import annotations

import json
import sys

import pytest

from harness.cli import main
from harness.sanitizer_log import parse
from harness.store import load

# As the tools print: 2023 and later write "function+offset in file:line", earlier ones "offset in file:line:function".
MEMCHECK = """\
========= COMPUTE-SANITIZER
some words of the program
========= Invalid __global__ read of size 16 bytes
=========     at split_kv(const Args)+0x1a0 in split_kv.cu:61
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f8a4e000400 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f8a4e000000 of size 1024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x2f8d8e] in libcuda.so.1
=========
========= Invalid __global__ read of size 16 bytes
=========     at split_kv(const Args)+0x1a0 in split_kv.cu:61
=========     by thread (4,0,0) in block (0,0,0)
=========
========= Invalid __shared__ write of size 4 bytes
=========     at 0x160 in merge.cu:6:merge()
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Target application returned an error
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at merge(float *)+0x90 in merge.cu:41
=========     and Read access at merge(float *)+0x100 in merge.cu:51 [508 hazards]
=========     and Read access at merge(float *)+0x120 in merge.cu:53 [12 hazards]
=========
========= Warning: Race reported between Read access at reduce(int *)+0x260
=========     and Write access at reduce(int *)+0x200 [16 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at vector_add(int *)+0x70 in init.cu:41
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= ERROR SUMMARY: 1 error
"""
SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at tiles(float *)+0x15520
=========     by thread (128,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (
            MEMCHECK,
            [
                "Invalid __global__ read of size 16 bytes at split_kv(const Args)+0x1a0 in split_kv.cu:61 (2 times)",
                "Invalid __shared__ write of size 4 bytes at 0x160 in merge.cu:6:merge()",
            ],
        ),
        (
            RACECHECK,
            [
                "Race reported between Write access at merge(float *)+0x90 in merge.cu:41"
                " and Read access at merge(float *)+0x100 in merge.cu:51 [508 hazards]"
            ],
        ),
        (INITCHECK, ["Uninitialized __global__ memory read of size 4 bytes at vector_add(int *)+0x70 in init.cu:41"]),
        (SYNCCHECK, ["Barrier error detected. Divergent thread(s) in block at tiles(float *)+0x15520"]),
        (CLEAN, []),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", []),
        ("========= A kind of error of next year\n=========     at kernel()\n========= ERROR SUMMARY: 7 errors\n",
         ["7 errors by its summary"]),
    ],
    ids=["memcheck", "racecheck", "initcheck", "synccheck", "clean", "no races", "unknown"],
)  # fmt: skip
def test_findings_are_told_with_their_kernel(text, errors):
    """Equal ones once; threads and addresses, which differ, are left out."""
    assert [str(finding) for finding in parse(text).errors] == errors


def test_a_warning_is_a_finding_and_no_error():
    (warning,) = [finding for finding in parse(RACECHECK).findings if not finding.is_error]

    assert str(warning).startswith("Race reported between Read access at reduce(int *)+0x260 and Write access")


@pytest.mark.parametrize("text", ["", "a kernel's own words\n", MEMCHECK[: MEMCHECK.index("========= ERROR")]])
def test_a_log_without_a_summary_is_no_clean_one(text):
    """A sanitizer that was killed has found nothing, which says nothing."""
    assert parse(text).num_errors is None


# A stand-in for the program: understands its options, and in place of the check writes records for rows that it is told
# of; what it "finds" depends on the rows at hand.
FAKE = """#!{python}
import json, os, pathlib, sys
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
assert value("--watched-by") == value("--tool")
assert ("--padding" in words) == (value("--tool") == "memcheck")
cases = json.loads(pathlib.Path(value("--case-file")).read_text())
impls = [words[i + 1] for i, word in enumerate(words) if word == "--impl"]
plan = json.loads(os.environ["FAKE_PLAN"])
with open(plan["calls"], "a") as calls:
    print(value("--tool"), *impls, *[case["name"] for case in cases], file=calls)
if plan.get("dies"):
    sys.exit("the driver is too old")
folder = pathlib.Path(value("--out")) / "20261130T000000Z"
folder.mkdir(parents=True)
facts = {{"run": "r", "device": {{"slug": "gpu", "kind": "cuda", "name": "cuda:0"}}, "toolchain": {{}}}}
(folder / "run.json").write_text(json.dumps(facts))
bad = [f"{{impl}} {{case['name']}}" for case in cases for impl in impls if f"{{impl}} {{case['name']}}" in plan["found"]]
with open(folder / "records.jsonl", "w") as records:
    for case in cases:
        for impl in impls:
            name, layout = impl[:-1].split("[")
            if f"{{impl}} {{case['name']}}" in plan.get("lost", []):
                continue
            print(json.dumps({{
                "schema": 1, "run": "inner", "suite": "custom", "started_at": "", "op": case["op"], "case": case["name"],
                "case_digest": "0", "shape": case, "impl": name, "layout": layout, "status": "ok", "device": "gpu",
                "device_kind": "cuda", "toolchain": {{}},
            }}), file=records)
text = plan["log"] if bad and not (plan.get("only_together") and len(cases) == 1) else plan["clean"]
pathlib.Path(value("--log-file")).write_text(text)
"""


@pytest.fixture
def sanitize(tmp_path, monkeypatch):
    """Run `check --sanitize` with the stand-in on PATH; returns the exit code, the records, and what the program was asked."""
    tools = tmp_path / "tools"
    tools.mkdir()
    program = tools / "compute-sanitizer"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")

    def run(tool="memcheck", impl="torch.gather[HND],torch.blocked[HND]", **plan):
        calls = tmp_path / "calls"
        monkeypatch.setenv("FAKE_PLAN", json.dumps({"calls": str(calls), "found": [], "log": MEMCHECK, "clean": CLEAN, **plan}))
        words = ["check", "--sanitize", tool, "--impl", impl, "--case", "edges.length_1,edges.length_0"]
        code = main([*words, "--out", str(tmp_path / "runs")])
        (folder,) = (tmp_path / "runs").iterdir()
        records = {(r.row, r.case): r for r in load(folder)[0]}
        return code, records, calls.read_text().splitlines()

    return run


def test_a_clean_run_takes_one_process_an_entry(sanitize):
    """Rows keep the records of their check, under the outer run's name."""
    code, records, calls = sanitize()

    assert code == 0
    assert [record.status for record in records.values()] == ["ok"] * 4
    assert {record.run for record in records.values()} != {"inner"}
    assert calls == [
        "memcheck torch.gather[HND] edges.length_0 edges.length_1", "memcheck torch.blocked[HND] edges.length_0 edges.length_1"
    ]  # fmt: skip


def test_a_finding_is_the_row_s_in_which_it_was_found(sanitize):
    """The entry's rows run again one by one; its neighbours stay right."""
    code, records, calls = sanitize(found=["torch.blocked[HND] edges.length_1"])

    wrong = records.pop(("torch.blocked[HND]", "edges.length_1"))
    assert code == 1
    assert wrong.status == "wrong"
    assert wrong.reason.startswith("memcheck: Invalid __global__ read of size 16 bytes at split_kv(const Args)+0x1a0")
    assert "; and 1 more" in wrong.reason
    assert {record.status for record in records.values()} == {"ok"}
    assert calls[2:] == ["memcheck torch.blocked[HND] edges.length_0", "memcheck torch.blocked[HND] edges.length_1"]


def test_what_shows_among_all_cases_only_is_not_lost(sanitize):
    """A race that does not come again is still wrong; no row can be named, so all of the entry's are."""
    code, records, _ = sanitize(found=["torch.blocked[HND] edges.length_1"], only_together=True)

    reasons = [record.reason for (row, _), record in records.items() if record.status == "wrong" and "blocked" in row]
    assert code == 1
    assert len(reasons) == 2
    assert all("in none of them alone" in reason for reason in reasons)


def test_a_warning_is_a_flag(sanitize):
    """A hazard that the tool takes for harmless stops no row and is told."""
    log = RACECHECK.replace("Error: Race", "Warning: Race").replace("1 error", "0 errors")
    code, records, _ = sanitize("racecheck", found=["torch.gather[HND] edges.length_1"], log=log)

    assert code == 0
    assert any("racecheck: Race reported" in flag for flag in records["torch.gather[HND]", "edges.length_1"].flags)


def test_a_row_without_a_result_is_failed(sanitize):
    """A process that dies under the sanitizer, or a log without a summary, is no clean run."""
    code, records, _ = sanitize(lost=["torch.gather[HND] edges.length_1"])

    lost = records["torch.gather[HND]", "edges.length_1"]
    assert code == 1
    assert (lost.status, lost.device) == ("failed", "gpu")
    assert "memcheck came to no result: ended with exit code 0" in lost.reason


def test_a_sanitizer_that_cannot_start_is_one_line(sanitize, capsys):
    """Not a failure of every row."""
    code, records, _ = sanitize(dies=True)

    assert (code, records) == (2, {})
    assert "--sanitize memcheck: ended with exit code 1; last words: the driver is too old" in capsys.readouterr().err


def test_without_the_program_it_says_where_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main(["check", "--sanitize", "memcheck", "--suite", "smoke", "--out", str(tmp_path / "runs")]) == 2
    assert not (tmp_path / "runs").exists()
    assert "compute-sanitizer is not on PATH; it comes with the CUDA toolkit" in capsys.readouterr().err


def test_its_command_line_is_one_that_check_understands(tmp_path, monkeypatch, capsys):
    """Behind the sanitizer stands the real check; on a CPU it runs, and there is nothing to watch."""
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\nwhile [ "$1" != "$PYTHON" ]; do shift; done\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHON", sys.executable)
    words = ["check", "--sanitize", "memcheck", "--impl", "torch.blocked[HND]", "--set", "tile=16", "--device", "cpu"]

    assert main([*words, "--shape", "q=2,kv=1,d=16,lens=5", "--out", str(tmp_path / "runs")]) == 2
    assert "it watches the kernels of a GPU (got cpu)" in capsys.readouterr().err


def test_in_process_and_sanitized_cannot_both_be(sanitize, tmp_path, capsys):
    assert main(["check", "--sanitize", "memcheck", "--in-process", "--suite", "smoke", "--out", str(tmp_path)]) == 2
    assert "--in-process and --sanitize memcheck: each says how rows are run; leave out one" in capsys.readouterr().err

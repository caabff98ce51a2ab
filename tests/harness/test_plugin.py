"""pytest's door, from outside: another project's tests, run on toy implementations in a folder of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Runs inside forget the modules that they loaded, and torch cannot be loaded twice.
import harness.pipeline
import harness.report
import impls.torch_block_copy  # noqa: F401

pytest_plugins = ["pytester"]

HOUSE = Path(harness.pipeline.__file__).parent.parent

KERNELS = """
from harness.ops.layouts import HND, NHD
from harness.registry import Impl, Limits, Prepared

class Idle(Prepared):
    def launch(self, *tensors):
        pass

def idle(spec):
    return Idle()

def broken(spec):
    raise RuntimeError("no such luck")

REAL = "impls.torch_block_copy:prepare"
IMPLS = (
    Impl(name="toy.right", op="block_copy", prepare=REAL, layouts=(HND, NHD)),
    Impl(name="toy.idle", op="block_copy", prepare="kernels:idle"),
    Impl(name="toy.broken", op="block_copy", prepare="kernels:broken"),
    Impl(name="toy.picky", op="block_copy", prepare=REAL, limits=Limits(max_block_size=2)),
)
"""
TINY = {
    "op": "block_copy", "name": "copy.tiny", "num_kv_heads": 1, "head_dim": 16, "block_size": 4, "num_copies": 4,
    "num_blocks": 16,
}  # fmt: skip
CASES = [TINY, {**TINY, "name": "copy.small", "num_blocks": 64}]
MODULE = """
from harness.plugin import judge

def test_kernel(paged_record):
    judge(paged_record)
"""
TINY_RIGHT = "test_kernels.py::test_kernel[copy.tiny-toy.right[HND]]"


@pytest.fixture
def project(pytester, monkeypatch):
    """Another project: a test of its own, kernels in a file, cases in another; names the plugin, has warnings as errors."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # pytest-benchmark times nothing in a worker of pytest-xdist
    pytester.makeconftest('pytest_plugins = ["harness.plugin"]')
    # Where the package is installed, pytest regrets that the run outside has loaded it already.
    warnings = ["error", "ignore:Module already imported so cannot be rewritten"]
    pytester.makepyprojecttoml(f"[tool.pytest]\nstrict_markers = true\nfilterwarnings = {warnings}")
    pytester.makepyfile(kernels=KERNELS, test_kernels=MODULE)
    Path("cases.json").write_text(json.dumps(CASES))
    return pytester


def run(project, *words, impls="toy.right[HND]", cases="copy.tiny"):
    """Run pytest in the project; `impls` and `cases` are the globs given. No worker: it would load torch each time."""
    files = ("--impl-file", "kernels.py", "--case-file", "cases.json", "--in-process")
    return project.runpytest_inprocess(*files, "--impl", impls, "--case", cases, "-p", "no:cacheprovider", *words)


def saved_file():
    (path,) = Path(".benchmarks").rglob("*.json")
    return path


def save(project, change=lambda saved: None, **choice):
    """Run and save, then let `change` work on what was saved."""
    assert run(project, "--benchmark", "--benchmark-autosave", **choice).ret == 0
    saved = json.loads(saved_file().read_text())
    change(saved)
    saved_file().write_text(json.dumps(saved))


def records():
    (path,) = Path("results/runs").glob("*/records.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_is_an_item_with_a_readable_name(project):
    """An item is named by its case and its implementation with the layout."""
    result = run(project, "--collect-only", "-q", impls="toy.right", cases="copy.tiny,copy.small")

    assert [line for line in result.outlines if "::" in line] == [
        f"test_kernels.py::test_kernel[copy.{case}-toy.right[{layout}]]"
        for case in ("tiny", "small")
        for layout in ("HND", "NHD")
    ]


def test_rows_are_checked_and_not_timed(project):
    """Without --benchmark, what is wrong or broken fails and what is unsupported is skipped, with the reason."""
    result = run(project, "-rsf", impls="toy.*")

    result.assert_outcomes(passed=2, failed=2, skipped=1)
    result.stdout.fnmatch_lines_random([
        "*SKIPPED*toy.picky[[]HND[]] on copy.tiny is unsupported: block_size must be at most 2 (got 4)*",
        "*toy.idle[[]HND[]] on copy.tiny is wrong: plain inputs: *",
        "*toy.broken[[]HND[]] on copy.tiny is failed: prepare: RuntimeError: no such luck*",
    ])  # fmt: skip
    assert "benchmark 'copy.tiny'" not in result.stdout.str()
    assert not Path("results").exists()


def test_rows_are_checked_without_pytest_benchmark(project, monkeypatch):
    """Only times need it. In a process of its own: pytest keeps the marks that it has seen."""
    monkeypatch.setenv("PYTHONPATH", str(HOUSE))
    how = ("-p", "no:benchmark", "--in-process", "-p", "no:cacheprovider")
    chosen = ("--impl-file", "kernels.py", "--case-file", "cases.json", "--case", "copy.tiny", "--impl", "toy.right[HND]")

    project.runpytest_subprocess(*how, *chosen).assert_outcomes(passed=1)


def test_only_rows_that_are_left_are_measured(project):
    """What -k leaves out is not run at all."""
    result = run(project, "--benchmark", "-k", "NHD", impls="toy.*")

    result.assert_outcomes(passed=1, deselected=4)
    assert [(row["impl"], row["layout"]) for row in records()] == [("toy.right", "NHD")]


def test_samples_in_every_file_are_the_same(project):
    """pytest-benchmark's file holds the samples of our records to the last bit, of right rows only."""
    result = run(project, "--benchmark", "--benchmark-autosave", "--benchmark-save-data", impls="toy.right,toy.idle,toy.picky")

    result.assert_outcomes(passed=2, failed=1, skipped=1)
    ours = {row["impl"] + f"[{row['layout']}]": row for row in records()}
    theirs = {row["params"]["paged_entry"]: row for row in json.loads(saved_file().read_text())["benchmarks"]}
    assert set(theirs) == {"toy.right[HND]", "toy.right[NHD]"}
    assert set(ours) == {*theirs, "toy.idle[HND]", "toy.picky[HND]"}
    for name, row in theirs.items():
        assert row["stats"]["data"] == ours[name]["launch_s"]["samples"]
        assert row["group"] == "copy.tiny"
        assert row["extra_info"]["case_digest"] == ours[name]["case_digest"]


def test_the_report_stands_beside_the_records(project):
    """A timed run says where its folder is, and the report is in it."""
    result = run(project, "--benchmark")

    folder = Path(re.search(r"records and report: (.+)", result.stdout.str())[1])
    assert folder.parent == Path("results/runs").resolve()
    assert (folder / "report.md").is_file()


def test_machine_info_names_the_device(project):
    """Whoever reads pytest-benchmark's file knows what was timed."""
    save(project)

    facts = json.loads(saved_file().read_text())["machine_info"]["pagedbench"]
    assert facts["device"]["slug"] == records()[0]["device"]
    assert facts["toolchain"]["torch"] == records()[0]["toolchain"]["torch"]


def scale(factor):
    def change(saved):
        for row in saved["benchmarks"]:
            row["stats"]["median"] *= factor

    return change


@pytest.mark.parametrize(("factor", "fails"), [(1e-3, True), (1e3, False)])
def test_compare_fail_holds_device_times(project, factor, fails):
    """--benchmark-compare-fail fails a row that is slower than the saved one, and only that."""
    save(project, scale(factor))

    result = run(project, "--benchmark", "--benchmark-compare", "--benchmark-compare-fail=median:50%")

    assert (result.ret != 0) == fails
    assert ("Performance has regressed" in result.stderr.str()) == fails
    assert "(NOW)" in result.stdout.str()


def test_other_devices_are_never_compared(project):
    """A saved run of another device is refused as wrong usage."""
    save(project, lambda saved: saved["machine_info"]["pagedbench"]["device"].update(slug="nvidia-h200"))

    result = run(project, "--benchmark", "--benchmark-compare")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: different devices are never compared: the saved run is of nvidia-h200, this is *"])


def test_another_case_of_the_same_name_is_never_compared(project):
    """A case that changed under its name fails, whatever its times."""
    save(project)
    Path("cases.json").write_text(json.dumps([{**TINY, "num_copies": 5}]))

    result = run(project, "--benchmark", "--benchmark-compare")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*copy.tiny is failed: the case is another one than in the saved run (digest *"])


def test_a_row_of_the_saved_run_that_is_not_timed_fails_the_run(project):
    """A kernel that became unsupported does not pass --benchmark-compare unseen."""
    save(project, impls="toy.right")
    Path("kernels.py").write_text(KERNELS.replace("layouts=(HND, NHD)", "layouts=(HND, NHD), limits=Limits(max_block_size=2)"))

    result = run(project, "--benchmark", "--benchmark-compare", impls="toy.right")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert f"MISSING: {TINY_RIGHT} is in the saved run and was not timed in this one" in result.outlines


def test_a_run_that_times_nothing_fails(project):
    """All rows skipped under --benchmark is no success."""
    result = run(project, "--benchmark", impls="toy.picky")

    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["nothing was timed; *"])


def test_benchmark_only_leaves_untimed_rows_out(project):
    """pytest-benchmark's own switches know which items are timed."""
    run(project, "--benchmark-only").assert_outcomes(skipped=1)
    run(project, "--benchmark", "--benchmark-only").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--impl", "toy.rihgt"), "no implementation matches 'toy.rihgt'; did you mean *toy.right*"),
        (("--case", "copy.tinny"), "no case matches 'copy.tinny'; did you mean *copy.tiny*"),
        (("--suite", "smok"), "no suite 'smok'; did you mean smoke*"),
        (("--impl-file", "none.py"), "--impl-file none.py: no such file"),
        (("--case-file", "none.json"), "--case-file none.json: *"),
        (("--pagedbench-device", "gpu"), "--device must be cpu, cuda or cuda:INDEX (got 'gpu')"),
        (("--shape", "q=3"), "--shape q=3: lacks *"),
        (("--shape", "q=1,kv=1,d=16,lens=5", "--case", "shape.*"), "none of the chosen implementations has the operator *"),
    ],
)  # fmt: skip
def test_wrong_names_are_wrong_usage(project, words, says):
    """One line that says what is near, exit code 4, and nothing is run."""
    files = () if words[0] == "--suite" else ("--case-file", "cases.json")
    impl = () if words[0] == "--impl" else ("--impl", "toy.right")
    result = project.runpytest_inprocess("--impl-file", "kernels.py", *files, *impl, *words)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {says}"])


def test_a_choice_that_no_test_acts_on_is_wrong_usage(project):
    """Rows chosen by name do not vanish because no test asks for them."""
    project.makepyfile(test_kernels="def test_other():\n    pass")

    result = run(project)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: rows are chosen, but no collected test asks for `paged_record`*"])


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
def test_rows_are_not_timed_beside_each_other(project):
    """Several processes would share the device, and pytest-benchmark would say nothing."""
    result = run(project, "--benchmark", "-n", "2")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --benchmark times rows in one process, *: give -n 0"])


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
def test_rows_are_checked_in_several_processes(project, monkeypatch):
    """Each row comes once, to the outcome that it has in one process."""
    monkeypatch.setenv("PYTHONPATH", str(HOUSE))
    how = ("--in-process", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider")
    chosen = ("--impl-file", "kernels.py", "--case-file", "cases.json", "--case", "copy.tiny", "--impl", "toy.*")
    result = project.runpytest_subprocess(*how, *chosen)

    result.assert_outcomes(passed=2, failed=2, skipped=1)


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
def test_a_choice_that_no_test_acts_on_is_wrong_usage_in_several_processes(project, monkeypatch):
    """Only the workers collect, and the one line comes from the process that the user started."""
    monkeypatch.setenv("PYTHONPATH", str(HOUSE))
    project.makepyfile(test_kernels="def test_other():\n    pass")

    result = project.runpytest_subprocess("-n", "2", "-p", "no:cacheprovider", "--suite", "smoke")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line[:5] for line in result.errlines if line] == ["ERROR"]
    result.stderr.fnmatch_lines(["ERROR: rows are chosen, but no collected test asks for `paged_record`*"])


def test_a_folder_that_cannot_be_written_ends_the_run_in_one_line(project):
    """Results that would be lost are not measured."""
    Path("results").write_text("in the way")

    result = run(project, "--benchmark")

    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "pagedbench: cannot write results to " in result.stdout.str()


def test_a_kernel_that_crashes_fails_alone(project):
    """Rows are measured in a worker: one that dies is a failed item, and the session goes on."""
    Path("kernels.py").write_text(KERNELS.replace('raise RuntimeError("no such luck")', "import os; os.abort()"))
    files = ("--impl-file", "kernels.py", "--case-file", "cases.json", "--case", "copy.tiny")

    result = project.runpytest_inprocess(*files, "--impl", "toy.broken,toy.right", "-p", "no:cacheprovider")

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*toy.broken[[]HND[]] on copy.tiny is failed: *SIGABRT*"])


def test_the_matrix_runs_without_a_test_module(project):
    """--pyargs harness.test_matrix needs no more of a project than a file of kernels."""
    result = run(project, "--pyargs", "harness.test_matrix", impls="toy.right")

    result.assert_outcomes(passed=2)


def test_no_other_run_pays_for_the_plugin(pytester):
    """Installed beside projects that never ask for it, it loads neither torch nor the tables."""
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_loaded():
            assert "harness.plugin" in sys.modules
            assert not {"torch", "numpy", "cases", "impls"} & set(sys.modules)
        """
    )
    words = [sys.executable, "-m", "pytest", "-p", "harness.plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(HOUSE)}, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stdout + done.stderr

"""docs/example: a repository that gates its own kernel. The very command of the action passes it, and stops what is worse."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

HOUSE = Path(__file__).resolve().parent.parent
EXAMPLE = HOUSE / "docs" / "example"
#: What a machine without a GPU needs to be told.
ON_A_CPU = "--device cpu --check-suite smoke --threshold 75%"
#: The case in small, and a launch that mostly waits: what else this machine does is little beside it.
SMALL, LAST, WAIT_S = [48, 17], "        lse.copy_(logs.flatten(1))\n", 0.02


def waiting(seconds):
    """The example's kernel, each launch longer by `seconds`."""
    return KERNEL.replace(LAST, f"{LAST}        __import__('time').sleep({seconds})\n")


KERNEL = (EXAMPLE / "kernels.py").read_text()
RIGHT, SLOW = waiting(WAIT_S), waiting(3 * WAIT_S)
WRONG = RIGHT.replace("self.spec.scale).where(used.mT, -math.inf)", "self.spec.scale)")
assert len({KERNEL, RIGHT, SLOW, WRONG}) == 4


def yaml(path):
    return YAML(typ="safe").load(path)


class Repository:
    """A copy of the example, with `pagedbench` where the action installs it."""

    def __init__(self, folder):
        self.folder, self.runner = folder / "repository", folder / "runner"
        shutil.copytree(EXAMPLE, self.folder, ignore=shutil.ignore_patterns("__pycache__"))
        cases = self.folder / "cases" / "shapes.json"
        cases.write_text(json.dumps([{**case, "seq_lens": SMALL} for case in json.loads(cases.read_text())]))
        command = self.runner / "pagedbench" / "bin" / "pagedbench"
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m harness "$@"\n')
        command.chmod(0o755)
        path = os.pathsep.join([str(HOUSE), os.environ.get("PYTHONPATH", "")])
        named = {name: str(self.runner / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        of_others = ("PAGEDBENCH_BASE", "GITHUB_BASE_REF")
        kept = {name: value for name, value in os.environ.items() if name not in of_others}
        self.environment = {**kept, **named, "RUNNER_TEMP": str(self.runner), "PYTHONPATH": path}

    def run(self, *words, **environment):
        return subprocess.run(
            words, cwd=self.folder, env={**self.environment, **environment}, capture_output=True, text=True, check=False
        )

    def gate(self, kernel, **environment):
        """Do what the workflow does with that kernel: exit code, all output, and the summary."""
        (self.folder / "kernels.py").write_text(kernel)
        action = yaml(HOUSE / "action.yml")
        given = yaml(self.folder / ".github" / "workflows" / "gate.yml")["jobs"]["gate"]["steps"][-1]["with"]
        inputs = {name: one.get("default", "") for name, one in action["inputs"].items()} | given
        inputs["options"] += f" {ON_A_CPU}"
        (step,) = (step for step in action["runs"]["steps"] if step.get("id") == "gate")
        asked = {
            name: re.sub(r"\$\{\{ inputs\.([a-z-]+) \}\}", lambda found: inputs[found[1]], value)
            for name, value in step["env"].items()
        }
        done = self.run("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"], **asked, **environment)
        told = dict(line.split("=", 1) for line in (self.runner / "github_output").read_text().splitlines())
        return done.returncode, done.stdout + done.stderr, (self.folder / told["summary"]).read_text()

    def git(self, *words):
        done = self.run("git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The example with an accepted baseline of this machine, made as the page says."""
    made = Repository(tmp_path_factory.mktemp("example"))
    command = str(made.runner / "pagedbench" / "bin" / "pagedbench")
    (made.folder / "kernels.py").write_text(RIGHT)
    chosen = "--impl-file kernels.py --impl mine.* --case-file cases/shapes.json --device cpu --out runs"
    measured = made.run(command, "run", *chosen.split())
    assert measured.returncode == 0, measured.stdout + measured.stderr
    (run,) = (made.folder / "runs").iterdir()
    accepted = made.run(command, "accept", str(run), "-m", "the first", "--device", "cpu", "--allow", "doubts")
    assert accepted.returncode == 0, accepted.stderr
    return made


def test_its_kernel_is_right_on_all_that_a_gpu_runner_checks(repository):
    """`ci` checks `edges` unless told otherwise, empty batches among them."""
    command = str(repository.runner / "pagedbench" / "bin" / "pagedbench")
    (repository.folder / "kernels.py").write_text(KERNEL)
    chosen = "--suite edges --impl-file kernels.py --impl mine.* --device cpu --out edges"
    done = repository.run(command, "check", *chosen.split())

    assert done.returncode == 0, done.stdout


def test_the_kernel_passes(repository):
    """Right, and as fast as its baseline: exit 0, verdict first, and the job's summary is the same text."""
    code, said, summary = repository.gate(RIGHT)

    assert code == 0, said
    assert summary.splitlines()[2].startswith("### PASS: compare: 1 SAME against the baseline of cpu-")
    assert (repository.runner / "github_step_summary").read_text().endswith(summary)
    (folder,) = (repository.folder / "results" / "ci").iterdir()
    assert {"summary.md", "log.txt"} <= {path.name for path in folder.iterdir()}
    assert {"records.jsonl", "report.html", "report.md", "run.json"} <= {path.name for path in (folder / "run").iterdir()}


def test_a_slower_kernel_is_stopped(repository):
    """Three times as long: SLOWER than its baseline, exit 1."""
    code, said, summary = repository.gate(SLOW)

    assert code == 1, said
    assert summary.splitlines()[2].startswith("### SLOWER: compare: 1 SLOWER against the baseline of cpu-")


def test_a_wrong_kernel_is_stopped(repository):
    """Slots without a token take part: WRONG, exit 1, beside the commit before, too, whose kernel is right."""
    repository.git("init", "-q")
    (repository.folder / "kernels.py").write_text(RIGHT)
    repository.git("add", "kernels.py")
    repository.git("commit", "-q", "-m", "right")
    repository.git("branch", "base")
    (repository.folder / "kernels.py").write_text(WRONG)
    repository.git("commit", "-q", "-a", "-m", "wrong")
    code, said, summary = repository.gate(WRONG, PAGEDBENCH_BASE="base")
    folders = sorted((repository.folder / "results" / "ci").iterdir())
    comparison = json.loads((folders[-1] / "ab" / "comparison.json").read_text())

    assert code == 1, said
    assert summary.splitlines()[2].startswith("### WRONG: check: 0 ok, ")
    assert "#### Not right" in summary
    assert comparison["headline"] == "1 WRONG"

"""Workflows and the action are what GitHub takes, and what a linter for their security lets pass."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from ruamel.yaml import YAML

HOUSE = Path(__file__).resolve().parent.parent
ACTION = HOUSE / "action.yml"
EXAMPLE = HOUSE / "docs" / "example" / ".github" / "workflows" / "gate.yml"
WORKFLOWS = [*sorted((HOUSE / ".github" / "workflows").glob("*.yml")), EXAMPLE]
GPU = HOUSE / ".github" / "workflows" / "gpu.yml"


def read(path):
    return YAML(typ="safe").load(path)


def lint(path):
    """What GitHub's schema and zizmor say of a file: exit codes, and their words."""
    schema = "github-actions" if path.name == "action.yml" else "github-workflows"
    zizmor = shutil.which("zizmor", path=sysconfig.get_path("scripts"))
    assert zizmor is not None, "zizmor is not installed; `pip install pagedbench[test]` does it"
    commands = (
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)],
        [zizmor, "--offline", "--no-progress", "--quiet", "--config", str(HOUSE / ".github" / "zizmor.yml"), str(path)],
    )
    done = [subprocess.run(command, capture_output=True, text=True, timeout=60, check=False) for command in commands]
    return [one.returncode for one in done], "".join(one.stdout + one.stderr for one in done)


@pytest.mark.parametrize("path", [ACTION, *WORKFLOWS], ids=lambda path: str(path.relative_to(HOUSE)))
def test_nothing_is_amiss(path):
    codes, said = lint(path)

    assert codes == [0, 0], said


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("", "", ""),
        ("runs-on:", "run-on:", "'runs-on' is a required property"),
        ("@3d3c42e5aac5ba805825da76410c181273ba90b1", "@v7", "unpinned-uses"),
        ("-- --allow-unsure", "-- ${{ github.event.pull_request.title }}", "template-injection"),
        ("pull_request:", "pull_request_target:", "dangerous-triggers"),
        ("persist-credentials: false", "submodules: false", "artipacked"),
    ],
    ids=["as-it-is", "schema", "unpinned", "injection", "trigger", "credentials"],
)
def test_what_is_amiss_is_found(tmp_path, old, new, says):
    """The test above can fail; an unchanged copy does not."""
    path = tmp_path / ".github" / "workflows" / "gpu.yml"
    path.parent.mkdir(parents=True)
    path.write_text(GPU.read_text().replace(old, new))
    codes, said = lint(path)

    assert says in said
    assert (codes == [0, 0]) == (not says)


def test_the_gpu_runner_does_what_a_developer_does_at_home():
    """The workflow's one command is tox's environment, and that is one command of ours: no logic in YAML."""
    (job,) = read(GPU)["jobs"].values()
    (run,) = [step["run"] for step in job["steps"] if "run" in step]
    tox = configparser.ConfigParser()
    tox.read(HOUSE / "tox.ini")

    assert run.endswith("tox run -e gpu -- --allow-unsure")
    assert tox["testenv:gpu"]["commands"] == "pagedbench ci {posargs}"


def test_two_jobs_never_share_the_gpu_and_nothing_is_lost_by_a_failure():
    """One group for all of them, none cancelled while it runs; artifacts are kept whatever came before."""
    workflow = read(GPU)
    (job,) = workflow["jobs"].values()

    assert workflow["concurrency"] == {"group": "gpu", "cancel-in-progress": False}
    assert workflow["permissions"] == {"contents": "read"}
    assert [step["if"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")] == ["always()"]


def test_the_example_is_ten_lines_and_gives_the_action_what_it_takes():
    """No input that the action does not have, and every one that it asks for."""
    text = EXAMPLE.read_text()
    given = set(read(EXAMPLE)["jobs"]["gate"]["steps"][-1]["with"])
    inputs = read(ACTION)["inputs"]

    assert len(text.splitlines()) == 10
    assert {name for name, one in inputs.items() if one.get("required")} <= given <= set(inputs)


def test_the_page_shows_the_example_as_it_is():
    assert f"```yaml\n{EXAMPLE.read_text()}```" in (HOUSE / "docs" / "regressions.md").read_text(encoding="utf-8")

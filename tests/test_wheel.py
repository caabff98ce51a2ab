"""The installed package, away from the checkout: complete, and not mistaken for what lies in the current folder."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parent.parent
ROOMS = ("harness", "impls", "cases", "runtime")
#: what rooms hold besides modules, and a kernel or a page cannot do without
DATA = (".cu", ".cuh", ".j2", ".css", ".js")


def installed_version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "0, which is none"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel built from a copy of the checkout's rooms and installed into a folder: nothing fetched, nothing isolated."""
    for package, least in (("pip", 23), ("setuptools", 77)):
        version = installed_version(package)
        if int(version.split(".")[0]) < least:
            pytest.skip(f"needs {package} {least} or newer (got {version})")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for room in ROOMS:
        shutil.copytree(HOUSE / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for page in ("pyproject.toml", "LICENSE"):
        shutil.copy(HOUSE / page, source)
    (source / "README.md").touch()
    words = ["install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture
def stranger(tmp_path):
    """Another project, which has a package `cases` of its own."""
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "__init__.py").write_text("raise RuntimeError('the stranger was run')\n")
    return tmp_path


def run(installed, folder, *words):
    """Run a program in `folder` with the installed package alone at hand."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_nothing_is_left_out(installed):
    """Every module, kernel source, header, template, style and script of the rooms is in the wheel."""
    here = {path.relative_to(HOUSE) for room in ROOMS for path in (HOUSE / room).rglob("*") if path.suffix in (".py", *DATA)}
    there = {path.relative_to(installed) for room in ROOMS for path in (installed / room).rglob("*")}

    assert {path.suffix for path in here} >= {".py", ".cu", ".cuh"}
    assert here - there == set()


def test_no_more_than_the_rooms_is_installed(installed):
    """Tests and results stay at home."""
    names = {path.name for path in installed.iterdir()} - {"bin"}

    assert {name for name in names if not name.endswith(".dist-info")} == set(ROOMS)


def test_the_command_runs_in_a_project_with_cases_of_its_own(installed, stranger):
    """`pagedbench` does not look into the current folder for its packages, and writes its results there."""
    chosen = ("--suite", "smoke", "--impl", "torch.block_copy[HND]")
    done = run(installed, stranger, installed / "bin" / "pagedbench", "run", *chosen)

    assert done.returncode == 0, done.stderr
    assert list(stranger.glob("results/runs/*/records.jsonl"))


def test_python_m_names_the_folder_in_the_way(installed, stranger):
    """`python -m harness` finds the project's `cases` first: one line says so, exit 2, and the stranger is not run."""
    done = run(installed, stranger, sys.executable, "-m", "harness", "run", "--suite", "smoke")

    assert done.returncode == 2
    assert done.stderr.startswith(f"pagedbench: {stranger}/cases hides pagedbench's own package 'cases' ")
    assert done.stderr.count("\n") == 1


def test_python_m_runs_where_nothing_is_in_the_way(installed, tmp_path):
    """The installed package is complete without a checkout."""
    chosen = ("--suite", "smoke", "--impl", "torch.cache_write[HND]")
    done = run(installed, tmp_path, sys.executable, "-m", "harness", "check", *chosen)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        (("--import-mode=importlib",), "2 passed"),
        ((), "cases hides pagedbench's own package 'cases'"),
    ],
)
def test_the_plugin_serves_a_project_with_cases_of_its_own(installed, stranger, words, outcome):
    """Installed, pytest finds the plugin by its entry point; it works, or says which folder is in the way."""
    (stranger / "conftest.py").write_text('pytest_plugins = ["harness.plugin"]\n')
    (stranger / "test_kernels.py").write_text("from harness.test_matrix import test_matrix\n")
    chosen = ("--impl", "torch.block_copy[HND]", "--suite", "smoke", "-p", "no:cacheprovider", "-W", "error")
    done = run(installed, stranger, sys.executable, "-P", "-m", "pytest", *chosen, *words)

    assert outcome in done.stdout + done.stderr
    assert (done.returncode == 0) == outcome.endswith("passed")

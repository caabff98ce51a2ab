"""Peers come and go with their libraries, nothing else imports those, and a missing one says how to get it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from harness.commands.doctor import examine
from harness.registry import Registry, default_registry
from impls.peers import PEERS, libraries
from impls.peers.libraries import Operators, Package

HOUSE = Path(__file__).resolve().parents[2]
PACKAGE = Package(name="Toy", module="pagedbench_toy", variable="PAGEDBENCH_TOY", get="pip install toy")
OPERATORS = Operators(
    name="Toy", package="pagedbench_toy", file="sub/_C.so", variable="PAGEDBENCH_TOY_C", get="pip install toy"
)
FOREIGN = {"flashinfer", "flash_attn", "flash_attn_interface", "transformers", "vllm"}


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """A machine that has none of the libraries, whatever this one has."""
    for variable in ("FLASHINFER", "FA3", "FA2", "TRANSFORMERS", "VLLM_PACKAGE", "VLLM", "VLLM_FA3", "TOY", "TOY_C"):
        monkeypatch.delenv(f"PAGEDBENCH_{variable}", raising=False)
    found = libraries.importlib.util.find_spec
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None if name in FOREIGN else found(name))
    for name in FOREIGN:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_missing_package_says_how_to_get_it():
    """Two ways: to install it, or to say where it lies."""
    why = "Toy is not installed: pip install toy, or set PAGEDBENCH_TOY to the folder that holds pagedbench_toy"

    assert PACKAGE.why_missing() == why
    assert OPERATORS.why_missing() == "Toy is not installed: pip install toy, or set PAGEDBENCH_TOY_C to its _C.so"


def test_a_package_is_taken_from_the_folder_that_the_environment_names(monkeypatch, tmp_path):
    """Looking imports nothing; loading does. A wrong folder is told of."""
    monkeypatch.setenv("PAGEDBENCH_TOY", str(tmp_path))
    assert PACKAGE.why_missing() == f"PAGEDBENCH_TOY={tmp_path}: has no module pagedbench_toy"

    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "pagedbench_toy.py").write_text("answer = 42")
    assert PACKAGE.why_missing() is None
    assert "pagedbench_toy" not in sys.modules
    assert PACKAGE.load().answer == 42
    del sys.modules["pagedbench_toy"]


def test_operators_are_taken_from_the_file_that_the_environment_names(monkeypatch, tmp_path):
    """Or from the installed package; one that registers something else is told of."""
    torch = pytest.importorskip("torch")
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setenv("PAGEDBENCH_TOY_C", str(tmp_path / "_C.so"))
    assert OPERATORS.why_missing() == f"PAGEDBENCH_TOY_C={tmp_path / '_C.so'}: no such file; it must name Toy's _C.so"

    (tmp_path / "_C.so").touch()
    assert OPERATORS.why_missing() is None
    with pytest.raises(RuntimeError, match=r"_C.so registers no torch.ops.pagedbench_toy.run: is it of another release"):
        OPERATORS.load("pagedbench_toy.run")
    assert loaded == [str(tmp_path / "_C.so")]


def test_a_peer_without_its_library_comes_only_when_it_is_named(monkeypatch, tmp_path):
    """A run on a machine without libraries has no rows of theirs; asked for, they are there to be refused with a reason."""
    registry = Registry([impl for impl in PEERS if impl.name.startswith("peer.flashinfer.")])
    assert registry.entries() == []
    assert len(registry.entries(["peer.flashinfer.xqa"])) == 2

    (tmp_path / "flashinfer.py").touch()
    monkeypatch.setenv("PAGEDBENCH_FLASHINFER", str(tmp_path))
    assert len(registry.entries()) == sum(len(impl.layouts) for impl in registry)


def test_doctor_lists_peers_and_why_one_is_missing(monkeypatch, tmp_path):
    """By themselves, whichever device there is."""
    (tmp_path / "flashinfer.py").touch()
    monkeypatch.setenv("PAGEDBENCH_FLASHINFER", str(tmp_path))
    (section,) = (facts for name, facts in examine([]).items() if name.startswith("peers on "))

    assert set(section) == {impl.name for impl in default_registry() if impl.name.startswith("peer.")}
    assert section["peer.flashinfer.xqa"] in ("yes", "found; runs on cuda only")
    assert section["peer.vllm.fa3"] == (
        "no: vLLM is not installed: pip install 'pagedbench[vllm]', or set PAGEDBENCH_VLLM_FA3 to its _vllm_fa3_C.abi3.so"
    )


LISTING = """
import sys
import impls
from harness.cli import main

assert main(["list", "--impl", "peer.*"]) == 0
print(*{name.split(".")[0] for name in sys.modules})
"""


def test_listing_imports_no_library(tmp_path):
    """Where all of them are there, and would say so."""
    for name in FOREIGN:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('was imported')")
    done = subprocess.run(
        [sys.executable, "-c", LISTING], cwd=HOUSE, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )

    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[-1].split()) & (FOREIGN | {"torch"}) == set()


def test_no_page_imports_a_library_by_name():
    """Not even an adapter: all go through `libraries`, when a row is prepared."""
    for room in ("harness", "impls", "cases"):
        for page in (HOUSE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(page.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {name.split(".")[0] for name in names} & FOREIGN, page


def test_entries_name_what_is_there():
    """Every `prepare` loads on a machine without libraries; only preparing needs them."""
    for impl in PEERS:
        assert callable(impl.load()), impl.name
        assert impl.why_missing("cuda") is None or "not installed" in impl.why_missing("cuda")

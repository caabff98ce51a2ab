"""Who may import whom: the rooms of the house open their doors one way."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parent.parent
ROOMS = ("harness", "impls", "cases", "runtime", "tests")

#: What the modules of a room may import of the house. Out-of-room imports are all listed; a room may import itself.
MAY_IMPORT = {
    "cases": ("harness.ops", "harness.names"),
    "impls": ("harness.ops", "harness.registry", "harness.control", "harness.device", "harness.guards", "harness.names"),
    "harness": (),
    "runtime": ("harness.registry", "harness.ops", "harness.device", "harness.names", "harness.words"),
}
#: Commands of the runtime, and what they measure with: they write records as others do. And the sampler's kernel, which is no
#: implementation of an operator.
DOORS = {
    "runtime/sampler.py": ("impls.triton",),
    "runtime/serve.py": ("harness.record", "harness.store"),
    "runtime/measuring.py": ("harness.interval", "harness.nvml"),
    "runtime/generate_batch.py": ("harness.interval",),
    "runtime/serve_table.py": ("harness.record",),
}
#: impls/__init__.py holds the table; a folder of impls knows its own pages and the table's, no other folder's.
IMPL_FOLDERS = ("cuda", "triton", "peers", "controls")
#: The block pool must live in any engine.
POOL = ("blocks", "eviction", "prefix", "errors")


def imports(source: str) -> set[str]:
    """Every module named by an import statement, wherever it stands; `from a import b` gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which room is meant"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def pages(room: str) -> list[str]:
    return sorted(str(path.relative_to(HOUSE)) for path in (HOUSE / room).rglob("*.py"))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def strangers(page: str, source: str) -> set[str]:
    """The modules of the house that a page imports and may not."""
    room = page.split("/")[0]
    of_house = {module for module in imports(source) if module.split(".")[0] in ROOMS}
    allowed = (*MAY_IMPORT[room], *DOORS.get(page, ()), room)
    # `from harness import names` names the package as well as the page; the page decides.
    parents = {package.rpartition(".")[0] for package in allowed} - {""}
    return {module for module in of_house - parents if not any(within(module, package) for package in allowed)}


@pytest.mark.parametrize("page", [page for room in MAY_IMPORT for page in pages(room)])
def test_a_page_imports_only_rooms_that_it_may(page):
    """cases know the operators, implementations the contract, the harness nobody, the runtime the registry."""
    assert strangers(page, (HOUSE / page).read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("page", [page for page in pages("impls") if page != "impls/__init__.py"])
def test_folders_of_implementations_stay_apart(page):
    """A kernel's folder can be taken away without touching another one."""
    folder = page.split("/")[1]
    named = imports((HOUSE / page).read_text(encoding="utf-8"))
    others = [f"impls.{other}" for other in IMPL_FOLDERS if other != folder]

    assert {module for module in named if any(within(module, other) for other in others)} == set()


@pytest.mark.parametrize("page", [page for page in pages("runtime") if Path(page).stem in POOL])
def test_the_block_pool_needs_the_standard_library_and_numpy_only(page):
    """An engine that is not ours can take the pool as it is."""
    tops = {module.split(".")[0] for module in imports((HOUSE / page).read_text(encoding="utf-8"))}

    assert tops - set(sys.stdlib_module_names) - {"numpy", "runtime"} == set()


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("harness/check.py", "import impls.cuda"),
        ("harness/check.py", "def late():\n    from cases import ALL"),
        ("cases/decode.py", "from harness.registry import Impl"),
        ("cases/decode.py", "from harness import check"),
        ("impls/numpy_dense.py", "from harness.check import judge"),
        ("impls/numpy_dense.py", "from cases.decode import SMALL"),
        ("runtime/engine.py", "import impls"),
    ],
)
def test_a_forbidden_import_is_found(page, line):
    """The test above can fail."""
    assert strangers(page, line)


def test_ray_is_an_extra():
    """Nothing but its own page asks for it, and only when it is wanted; ours it never is."""
    named = [page for room in ROOMS[:-1] for page in pages(room) if re.search(r"\bimport_module\(.ray.\)|import ray\b",
             (HOUSE / page).read_text(encoding="utf-8"))]  # fmt: skip

    assert named == ["harness/cluster.py"]
    assert "ray" not in imports((HOUSE / "harness/cluster.py").read_text(encoding="utf-8"))


LISTING = """
import sys
from harness.cli import main

assert main(["list", "--suite", "full"]) == 0
print(*{name.split(".")[0] for name in sys.modules})
"""


def test_listing_needs_neither_torch_nor_cuda():
    """The tables of implementations and cases are plain data: `pagedbench list` answers on any machine, at once."""
    done = subprocess.run([sys.executable, "-c", LISTING], cwd=HOUSE, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "impls" in loaded
    assert loaded & {"torch", "cuda", "triton", "numpy", "ray"} == set()

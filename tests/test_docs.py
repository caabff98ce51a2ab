"""The words are true: the documentation's kernels run, its commands parse, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import COMMANDS, main
from harness.store import load
from impls.cuda import toolkit

HOUSE = Path(__file__).resolve().parent.parent
PAGES = sorted([HOUSE / "README.md", *(HOUSE / "docs").rglob("*.md")])
GUIDE = HOUSE / "docs" / "adding-a-kernel.md"
BASELINE = HOUSE / "results" / "baselines" / "nvidia-h200.jsonl"


def blocks(page: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page that are in `language`."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)
    return [text for name, text in fenced if name == language]


def page_of(kernel: str) -> str:
    """The example whose docstring begins with a kernel's name."""
    (text,) = (block for block in blocks(GUIDE, "python") if block.startswith(f'"""{kernel}:'))
    return text


def check(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Check the kernel of kernels.py on one case, as a reader of the page does."""
    (folder / "kernels.py").write_text(text)
    command = "check --impl-file kernels.py --impl mine.per_sequence --case edges.group_7 --device cpu --out runs"
    path = os.pathsep.join([str(HOUSE), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "harness", *command.split()],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )


def test_the_torch_kernel_is_right(tmp_path):
    """kernels.py, as it stands on the page."""
    done = check(tmp_path, page_of("mine.per_sequence"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 ok, 0 wrong" in done.stdout


def test_its_fault_is_found(tmp_path):
    """Without the cut at seq_len it reads the NaN in the last block, as the page says."""
    done = check(tmp_path, page_of("mine.per_sequence").replace("[:, :seq_len]", ""))

    assert done.returncode == 1, done.stdout + done.stderr
    assert "outputs are NaN" in done.stdout


@pytest.mark.skipif(
    toolkit.compiler_why_missing() is not None, reason=toolkit.compiler_why_missing() or "the compiler is here"
)
def test_the_cuda_kernel_compiles(tmp_path):
    """two_pass.cu and two_pass.py, without spills, on the targets that builds are tested on."""
    from impls.cuda import jit
    from impls.cuda.attention import DEFAULT_SHAPES
    from impls.cuda.builds import ARCHS

    (source,) = blocks(GUIDE, "cpp")
    (tmp_path / "two_pass.cu").write_text(source)
    (tmp_path / "two_pass.py").write_text(page_of("mine.two_pass"))
    spec = importlib.util.spec_from_file_location("two_pass", tmp_path / "two_pass.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    (entry,) = page.IMPLS
    built = [page.build(shape) for shape in DEFAULT_SHAPES if shape.head_dim % entry.limits.head_dim_multiple == 0]
    kernels = [jit.compile(b.source, entry=b.entry, macros=b.macros, arch=arch) for arch in ARCHS for b in built]

    assert len(built) > 3
    assert {kernel.resources["spill_bytes"] for kernel in kernels} == {0}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOUSE)))
def test_links_lead_somewhere(page):
    """Relative links name files that are there."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))

    assert [target for target in targets if not (page.parent / target).exists()] == []


def commands() -> list[str]:
    """Every `pagedbench ...` line of a fenced block, without its comment."""
    lines = [line for page in PAGES for block in blocks(page) for line in block.splitlines()]
    return sorted({line.partition(" #")[0].strip() for line in lines if line.startswith("pagedbench ")})


@pytest.mark.parametrize("line", commands())
def test_commands_take_what_is_written(line, capsys):
    """Each command exists and has each option that the page gives it."""
    command, *words = shlex.split(line)[1:]
    assert command in COMMANDS
    with pytest.raises(SystemExit):
        main([command, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))

    assert {word for word in words if word.startswith("--")} <= known


def test_the_table_of_the_readme_is_the_baseline():
    """docs/h200_table.py makes of the accepted records what the README shows."""
    if not BASELINE.exists():
        pytest.skip(f"{BASELINE.relative_to(HOUSE)} is not there yet")
    spec = importlib.util.spec_from_file_location("h200_table", HOUSE / "docs" / "h200_table.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    shown = (HOUSE / "README.md").read_text(encoding="utf-8").partition(page.BEGIN)[2].partition(page.END)[0]

    assert shown.strip() == page.table(load(BASELINE)[0])

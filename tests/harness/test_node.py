"""A node is sent data alone: files by content, rows by name; and it measures as one device does."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from harness import node
from harness.names import UsageError
from harness.ops.block_copy import BlockCopyCase
from harness.options import Options
from harness.record import parse_line
from harness.work import Work, rows_to_json

TINY = BlockCopyCase(name="copy.tiny", num_kv_heads=1, head_dim=16, block_size=4, num_copies=4, num_blocks=16)


@pytest.fixture
def path(monkeypatch):
    """Python's path, to be changed by a test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    return sys.path


@pytest.mark.parametrize("is_on_path", [True, False])
def test_a_file_and_the_sources_beside_it_reach_a_node(tmp_path, path, is_on_path):
    """By content; the driver's own folder is not looked into there, whatever it holds by then."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kernels.py").write_text("IMPLS = ()")
    (mine / "two_pass.cu").write_bytes(b"\xff not text")
    (mine / "weights.bin").write_bytes(b"large")
    path[:] = [*path, *([str(mine)] if is_on_path else [])]
    packed = node.pack(mine / "kernels.py")
    path.append(str(mine))  # as Ray does with the folder that the driver was started in
    there = Path(node.unpack(packed, tmp_path / "there"))

    assert there == tmp_path / "there" / "kernels.py"
    assert {file.name: file.read_bytes() for file in there.parent.iterdir()} == {
        "kernels.py": b"IMPLS = ()", "two_pass.cu": b"\xff not text",
    }  # fmt: skip
    assert str(mine) not in path
    assert (str(there.parent) in path) == is_on_path


def test_sources_that_are_too_large_to_be_sent_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "SOURCES_BYTES", 10)
    (tmp_path / "kernels.py").write_text("IMPLS = ()  # eleven")

    with pytest.raises(UsageError, match=r"go to every node with it, .* give it a folder of its own"):
        node.pack(tmp_path / "kernels.py")


def test_code_that_differs_in_one_byte_is_another_pagedbench(tmp_path, monkeypatch):
    """A revision says too little: two checkouts with changes of their own have one name."""
    for room in ("harness", "impls", "cases"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "page.py").write_text("x = 1\n")
    monkeypatch.setattr(node, "HOUSE", tmp_path)
    before = node.identity()
    (tmp_path / "impls" / "page.cu").write_text("//")
    kernel = node.identity()
    (tmp_path / "impls" / "page.cu").unlink()

    assert before["code"] != kernel["code"]
    assert node.identity() == before


TOYS = """
from harness.registry import Impl

def prepare(spec):
    from impls.torch_block_copy import prepare
    return prepare(spec)

IMPLS = (Impl(name="toy.right", op="block_copy", prepare="toys:prepare"),)
"""


def test_a_node_measures_as_one_device_does(tmp_path, monkeypatch, path):
    """Asked in plain data it answers in plain data, with the driver's number of threads, and leaves no files."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "toys.py"
    file.write_text(TOYS)
    work = Work(options=Options(bench=False), device=None, run="r", impl_files=[str(file)], rows=())
    asked = node.ask(work, "cpu")
    file.unlink()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here = node.Node(asked)
    try:
        facts = here.introduce()
        (entry,) = here._registry.entries(["toy.right"])
        answer = here.measure(json.loads(json.dumps(rows_to_json({0: (TINY, entry)}))))
    finally:
        here.close()
        sys.modules.pop("toys", None)

    assert facts["device"]["kind"] == "cpu"
    assert facts["toolchain"]["threads"] == "1"
    (record,) = map(parse_line, answer["records"])
    assert (record.case, record.row, record.run, record.status) == (TINY.name, "toy.right[HND]", "r", "ok")
    assert answer["spent_s"]["check"] > 0
    assert list(tmp_path.iterdir()) == []

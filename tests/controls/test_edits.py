"""Controls are small, named edits of right implementations, and each edit still finds the text that it changes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from harness.control import DERIVED
from harness.ops.attention import AttentionCase
from impls import IMPLS
from impls.controls import CONTROLS
from impls.controls.edit import Edit, EditError, edited_text
from impls.controls.edited import edited_page, write_sources
from impls.cuda import jit

EDITS = [control for control in CONTROLS if isinstance(control, Edit)]
KERNELS = [control for control in EDITS if any(not change.file.endswith(".py") for change in control.changes)]
#: changed lines beyond which a control is no edit but a kernel of its own
FEW = 12


def test_there_are_controls_in_every_language():
    """At least 30, of NumPy, torch, Triton and CUDA, for all three operators."""
    folders = {Path(edit.right).parts[0].split("_")[0] for edit in EDITS}

    assert len(CONTROLS) >= 30
    assert {"numpy", "torch", "triton", "cuda"} <= folders
    assert {control.op for control in CONTROLS} == {"attention", "cache_write", "block_copy"}


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_control_says_what_it_is(control):
    """Its name and role keep it out of runs; it says what it does wrong; its rules ask what a case can answer."""
    fields = {name for case in ("attention", "cache_write", "block_copy") for name in fields_of(case)}

    assert control.name.startswith("control.")
    assert control.role == "control"
    assert control in IMPLS
    assert control.fault
    assert set(control.shows.at_least) <= fields | set(DERIVED)


def fields_of(op: str) -> set[str]:
    from harness.ops import case_type

    kind = case_type(op)
    return {field.name for field in dataclasses.fields(kind)} | {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("control", EDITS, ids=lambda control: control.name)
def test_an_edit_changes_a_few_words_of_what_is_there(control):
    """Each old text stands exactly once in its file, and little is put in its place."""
    for file in {control.right, *(change.file for change in control.changes)}:
        edited_text(control, file)

    assert all(change.old != change.new for change in control.changes)
    assert sum(len(change.new.splitlines()) for change in control.changes) <= FEW


def test_an_edit_that_has_lost_its_place_is_named():
    """A right implementation that moves on breaks the build here, and not the audit in silence."""
    lost = dataclasses.replace(EDITS[0], changes=(dataclasses.replace(EDITS[0].changes[0], old="no such text"),))

    with pytest.raises(EditError, match=r"control\.\w+: impls/numpy_\w+\.py must hold .* exactly once \(got 0\)"):
        edited_text(lost, lost.right)


@pytest.mark.parametrize("control", KERNELS, ids=lambda control: control.name)
def test_an_edited_kernel_compiles_to_another_one(control, tmp_path):
    """The fault is in the cubin: it compiles, and differs from the right one's."""
    write_sources(control, tmp_path)
    edited = {Path(change.file).name for change in control.changes}
    builds = edited_page(control.name).builds("sm_90")
    listed = [build for build in builds if build.source in edited or not any(name.endswith(".cu") for name in edited)]
    chosen = next((build for build in listed if "PA_LAYER" in build.macros and asks(control)), listed[0])

    right, wrong = (
        jit.compile(source, entry=chosen.entry, macros=chosen.macros, arch="sm_90").resources["digest"]
        for source in (chosen.source, tmp_path / chosen.source)
    )

    assert wrong != right


def asks(control):
    """Whether its fault shows only where a case asks for something besides."""
    return bool(control.limits.features)


def test_an_edited_page_leaves_the_right_one_alone():
    """The edit is a module of its own."""
    from impls import torch_blocked

    edited = edited_page("control.softmax_per_block")

    assert edited.Blocked is not torch_blocked.Blocked
    assert sys.modules["impls.torch_blocked"] is torch_blocked


def test_a_control_refuses_a_case_on_which_it_is_right():
    """Such a case must not count as missed."""
    case = AttentionCase(name="aligned", num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(32,))
    control = next(control for control in CONTROLS if control.name == "control.last_block_dropped")

    assert control.why_not(case, "cpu") == "its fault shows where num_ragged is at least 1 (got 0)"
    assert control.why_not(dataclasses.replace(case, seq_lens=(33,)), "cpu") is None


def test_listing_controls_imports_no_torch():
    """They stand in the table that `pagedbench list` prints at once."""
    code = "import sys, impls; assert impls.IMPLS; print(sorted({'torch', 'numpy', 'triton', 'cuda'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )

    assert result.stdout.strip() == "[]"

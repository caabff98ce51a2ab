"""The suite of public faults: what each case promises by its name, it has; the page about them leaves none out."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cases import SUITES
from cases.faults import FAULTS
from harness.hazards import NEEDLES, PLAIN, TIMED, deal_blocks, seed_of
from harness.ops.block_copy_tensors import _copies
from harness.ops.cache_write_tensors import _slots
from harness.ops.features import FEATURES
from harness.ops.layouts import CONTIGUOUS, HND, NHD
from harness.options import Options
from harness.pipeline import CaseRun
from harness.registry import Entry, Impl, Limits, default_registry
from harness.row import Row

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
BY_NAME = {case.name: case for case in FAULTS}


def largest_block(case, hazards):
    """The highest block id that is read or written."""
    rng = np.random.default_rng(seed_of(case.digest, hazards))
    if case.op == "cache_write":
        return int(_slots(case, rng).max()) // case.block_size
    if case.op == "block_copy":
        return int(_copies(case, rng).max())
    tables = deal_blocks(case.blocks_per_seq, case.num_blocks, rng)
    return max(int(row[:count].max()) for row, count in zip(tables, case.blocks_per_seq, strict=True))


@pytest.mark.parametrize("hazards", [PLAIN, NEEDLES, TIMED], ids=lambda hazards: hazards.name)
@pytest.mark.parametrize("case", [case for case in FAULTS if re.search(r"over_2_3|ids_over", case.name)], ids=str)
def test_offsets_go_as_far_as_the_name_says(case, hazards):
    """In every family some token in use lies behind the limit; blocks are dealt at random, so that this is checked."""
    block = largest_block(case, hazards)

    if "65535" in case.name:
        assert block > 65535
    else:
        limit = 2**31 if "2_31" in case.name else 2**32
        assert block * case.block_size * case.num_kv_heads * case.head_dim >= limit
        assert block < 2**31


def test_large_blocks_reach_2_31_with_small_ids():
    """Neither the id nor the stride is large; only their product is."""
    case = BY_NAME["faults.over_2_31_large_blocks"]

    assert case.num_blocks < 5000
    assert case.block_size * case.num_kv_heads * case.head_dim < 2**20


def refused(case, layouts, free_bytes):
    """Which of these layouts' rows a GPU with so much free memory would skip."""
    device = SimpleNamespace(kind="cuda", name="cuda:0", memory_bytes=150e9, free_bytes=lambda: free_bytes)
    limits = Limits(features=frozenset(FEATURES))
    impl = Impl(name="any", op=case.op, prepare="nowhere:prepare", layouts=tuple(layouts), limits=limits)
    rows = [Row(case, Entry(impl, layout), device, None) for layout in layouts]
    run = CaseRun(SimpleNamespace(device=device, options=Options(bench=False)), case, rows, print)
    return [row.entry.layout for row in rows if run._refuse(row)]


@pytest.mark.parametrize("case", [case for case in FAULTS if case.op == "attention"], ids=str)
def test_an_h200_holds_every_attention_case(case):
    """In HND and NHD, and without pages, in one run; a skipped case finds nothing."""
    assert refused(case, (HND, NHD, CONTIGUOUS), free_bytes=139e9) == []


@pytest.mark.parametrize("layout", [HND, NHD], ids=str)
@pytest.mark.parametrize("case", [case for case in FAULTS if case.op != "attention"], ids=str)
def test_an_h200_holds_every_write_and_copy_in_one_layout(case, layout):
    """Written caches are held more often; the largest take a run for each layout."""
    assert refused(case, (layout,), free_bytes=139e9) == []


def test_what_does_not_fit_is_skipped_layout_by_layout():
    """The layouts that still fit run."""
    case = BY_NAME["faults.write_over_2_32_elements"]

    assert refused(case, (HND, NHD), free_bytes=139e9) == [NHD]
    assert refused(case, (HND, NHD), free_bytes=80e9) == [HND, NHD]


def numbers_of(page):
    """Row number -> its cells, of every table of the page."""
    rows = [line.strip().strip("|").split("|") for line in page.splitlines() if re.match(r"\| *\d", line)]
    return {number: cells for cells in rows for number in [int(cells[0])]}


def test_every_public_fault_is_told_of_once():
    """The list has 77 entries; a fault that is neither tried nor given a reason would be forgotten."""
    assert list(numbers_of(PAGE.read_text())) == list(range(1, 78))


def test_the_page_names_cases_that_there_are_and_leaves_none_out():
    """A case is renamed on both sides or not at all."""
    named = set(re.findall(r"`(faults\.[a-z0-9_.*]+)`", PAGE.read_text()))
    stars = {name for name in named if name.endswith("*")}
    covered = {case.name for case in FAULTS if case.name in named or any(case.name.startswith(s[:-1]) for s in stars)}

    assert named - stars <= BY_NAME.keys()
    assert all(any(name.startswith(star[:-1]) for name in BY_NAME) for star in stars)
    assert covered == BY_NAME.keys()


def test_the_page_names_controls_that_there_are():
    """A fault said to be covered is."""
    controls = {impl.name for impl in default_registry() if impl.role == "control"}
    named = set(re.findall(r"`(control\.[a-z0-9_]+)`", PAGE.read_text()))

    assert len(named) > 30
    assert named <= controls


def test_the_suite_is_this_page():
    assert SUITES["faults"] == FAULTS

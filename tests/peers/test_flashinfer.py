"""FlashInfer's adapters, end to end, against a fake of the library."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from harness.ops.cache_write import CacheWriteCase
from impls.peers import flashinfer, flashinfer_prefill
from tests.peers import fake_flashinfer
from tests.peers.conftest import CASES, SHARED

DECODE = [f"peer.flashinfer.{name}" for name in ("decode", "decode.lse", "tensor_core", "tensor_core.lse", "xqa")]
BATCH = ["peer.flashinfer.batch", "peer.flashinfer.batch.lse"]
PREFILL = [f"peer.flashinfer.prefill.{name}" for name in ("fa2", "fa2.lse", "fa3", "fa3.lse")]
CASCADE = [f"peer.flashinfer.cascade{name}" for name in ("", ".fa2", ".fa2.lse")]
ONE_TOKEN = ("ragged", "some_without_a_token", "no_token", "own_scale", "partitions")


@pytest.fixture(autouse=True)
def library(monkeypatch):
    for name, module in fake_flashinfer.module().items():
        monkeypatch.setitem(sys.modules, name, module)
    for size in ("FLOAT_WORKSPACE", "SCRATCH"):  # zeroing them takes longer than all else
        monkeypatch.setattr(flashinfer, size, 4096)
    monkeypatch.setattr(flashinfer_prefill, "FLOAT_WORKSPACE", 4096)
    monkeypatch.setattr(flashinfer, "SEMAPHORES", fake_flashinfer.SEMAPHORES)


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in DECODE + BATCH + PREFILL for case in ONE_TOKEN] + [(name, "prefill") for name in BATCH + PREFILL],
)
def test_every_argument_arrives_as_flashinfer_takes_it(measured, name, case):
    """In both layouts, base-2 log-sum-exp converted, relations held to, unused table entries left alone."""
    found = measured(name, CASES[case])

    assert {layout: (record.status, record.reason) for layout, record in found.items()} == dict.fromkeys(
        ("HND", "NHD"), ("ok", None)
    )


@pytest.mark.parametrize("name", CASCADE)
@pytest.mark.parametrize(("case", "levels"), [*((case, 3) for case in SHARED), ("prefix_levels", 2)])
def test_what_neighbours_share_is_a_level(measured, name, case, levels):
    """Groups, levels, ragged query tokens and sequences that share nothing; merged by log-sum-exp."""
    found = measured(name, SHARED[case], levels=levels)
    refused = ("unsupported", "e4m3 is not implemented (implements: softcap)")
    want = refused if case == "prefix_e4m3" and "fa2" not in name else ("ok", None)

    assert {layout: (record.status, record.reason) for layout, record in found.items()} == dict.fromkeys(("HND", "NHD"), want)


@pytest.mark.parametrize("name", CASCADE)
def test_a_cascade_is_for_batches_that_share(measured, name):
    """Elsewhere it would be a row of the prefill wrapper under another name."""
    says = "neighbours in the batch must begin with the same blocks (got none that do)"

    assert {(record.status, record.reason) for record in measured(name, CASES["ragged"]).values()} == {("unsupported", says)}


@pytest.mark.parametrize("case", ["some_without_a_token", "prefill"])
@pytest.mark.parametrize("name", ["peer.flashinfer.prefill.fa2", "peer.flashinfer.prefill.fa3.lse"])
def test_a_prefill_may_have_fixed_buffers(measured, name, case):
    """cuda_graph=1: what serves an engine that captures a step."""
    found = measured(name, CASES[case], cuda_graph=1)

    assert {(record.status, record.reason) for record in found.values()} == {("ok", None)}


@pytest.mark.parametrize(
    ("name", "case", "says"),
    [
        ("peer.flashinfer.decode", "group_16", "group must be one of 1, 2, 3, 4, 8 (got 16)"),
        ("peer.flashinfer.tensor_core", "head_dim_80", "head_dim must be one of 64, 128, 256 (got 80)"),
        ("peer.flashinfer.tensor_core", "prefill", "max_q_len must be at most 1 (got 20)"),
        ("peer.flashinfer.xqa", "blocks_of_256", "block_size must be one of 16, 32, 64, 128 (got 256)"),
    ],
)
def test_what_flashinfer_refuses_is_a_limit(measured, name, case, says):
    """Known from data, before the library is asked."""
    assert {(record.status, record.reason) for record in measured(name, CASES[case]).values()} == {("unsupported", says)}


@pytest.mark.parametrize("name", ["peer.flashinfer.decode", "peer.flashinfer.tensor_core.lse"])
def test_without_fixed_buffers_the_wrapper_plans_anew(measured, name):
    """cuda_graph=0: what serves an engine that captures nothing."""
    found = measured(name, CASES["some_without_a_token"], cuda_graph=0)

    assert {(record.status, record.reason) for record in found.values()} == {("ok", None)}


def test_a_group_that_fills_xqa_s_tile_is_refused(measured):
    """Group and head_dim together decide, which prepare finds out."""

    case = dataclasses.replace(CASES["ragged"], name="peers.wide", num_q_heads=142, head_dim=256)
    (record, _) = measured("peer.flashinfer.xqa", case).values()

    assert record.status == "unsupported"
    assert record.reason == "a group's query heads must fit 16 KiB, 32 of head_dim 256 (got 71)"


def test_strided_outputs_are_refused_where_strides_are_not_looked_at(measured):
    """Not written to the wrong places."""
    (record, _) = measured("peer.flashinfer.decode", CASES["ragged"]).values()

    assert record.check["relations"]["strided_query"].startswith("refused: ValueError: out must be contiguous")


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"num_padding": 0}, "ok", None),
        ({"num_padding": 0, "order": "runs", "block_size": 24}, "ok", None),
        ({"num_padding": 0, "num_tokens": 0}, "ok", None),
        ({"num_padding": 3}, "unsupported", "writes every token, so no slot may be -1"),
        ({"num_padding": 0, "num_kv_heads": 40, "head_dim": 256}, "unsupported",
         "has a thread for each 16 bytes of a token's keys, 1024 at most (got 1280)"),
    ],
    ids=["decode", "prefill", "nothing", "padded", "wide"],
)  # fmt: skip
def test_appended_keys_and_values_are_in_their_slots(measured, fields, status, reason):
    """Each token a page of its own of one sequence, whatever its slot."""
    wanted = {"num_kv_heads": 2, "head_dim": 64, "block_size": 16, "num_tokens": 40, "num_blocks": 8} | fields
    for layout, record in measured("peer.flashinfer.append", CacheWriteCase(name="peers.append", **wanted)).items():
        assert (layout, record.status, record.reason) == (layout, status, reason)

"""Adapters of vLLM's operators and of its FlashAttention-3, end to end, against fakes under the real schemas."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from harness.ops.cache_write import CacheWriteCase
from tests.peers import fake_vllm
from tests.peers.conftest import CASES

FA3 = ["peer.vllm.fa3", "peer.vllm.fa3.scheduled", "peer.vllm.fa3.scheduled.lse"]
PAGED = [f"peer.vllm.paged_attention_{name}" for name in ("v1", "v2", "v2.lse")]
WRITES = {
    "scattered": CacheWriteCase(
        name="peers.write", num_kv_heads=2, head_dim=64, block_size=16, num_tokens=40, num_padding=9, num_blocks=8
    ),
    "e4m3": CacheWriteCase(
        name="peers.e4m3", num_kv_heads=2, head_dim=64, block_size=16, num_tokens=40, num_padding=9, num_blocks=8,
        kv_dtype="e4m3",
    ),
    "wide": CacheWriteCase(name="peers.wide", num_kv_heads=40, head_dim=128, block_size=16, num_tokens=3, num_blocks=2),
    "float32": CacheWriteCase(
        name="peers.float", num_kv_heads=3, head_dim=20, block_size=8, num_tokens=9, num_blocks=4, dtype="f32"
    ),
}


@pytest.fixture(autouse=True)
def library(monkeypatch, tmp_path):
    """Two files that the environment names, and a loader that knows them."""
    for variable, name in (("PAGEDBENCH_VLLM", "_C_stable_libtorch.abi3.so"), ("PAGEDBENCH_VLLM_FA3", "_vllm_fa3_C.abi3.so")):
        (tmp_path / name).touch()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setattr(torch.ops, "load_library", fake_vllm.load_library)


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in PAGED for case in CASES if case not in ("group_16", "blocks_of_256", "prefill")]
    + [(name, case) for name in FA3 for case in CASES],
)
def test_every_argument_arrives_as_vllm_takes_it(measured, name, case):
    """In each layout, with its log-sum-exp where it has one, relations held to, unused table entries left alone."""
    for layout, record in measured(name, CASES[case]).items():
        assert (layout, record.status, record.reason) == (layout, "ok", None)


@pytest.mark.parametrize(
    ("name", "case", "status", "reason"),
    [
        ("reshape_and_cache_flash", "scattered", "ok", None),
        ("reshape_and_cache_flash", "wide", "ok", None),
        ("reshape_and_cache_flash", "e4m3", "ok", None),
        ("reshape_and_cache", "e4m3", "ok", None),
        ("reshape_and_cache", "scattered", "ok", None),
        ("reshape_and_cache", "float32", "ok", None),
        ("reshape_and_cache", "wide", "unsupported",
         "writes the first 512 chunks of 16 bytes of a token, a thread each (got 640)"),
    ],
)  # fmt: skip
def test_keys_and_values_are_written_to_their_slots(measured, name, case, status, reason):
    """Padding writes nothing; what the library would leave out is refused."""
    for layout, record in measured(f"peer.vllm.{name}", WRITES[case]).items():
        assert (layout, record.status, record.reason) == (layout, status, reason)


@pytest.mark.parametrize(
    ("name", "case", "says"),
    [
        ("peer.vllm.paged_attention_v1", "blocks_of_256", "block_size must be one of 8, 16, 32 (got 256)"),
        ("peer.vllm.paged_attention_v2", "prefill", "max_q_len must be at most 1 (got 20)"),
    ],
)
def test_what_vllm_refuses_is_a_limit(measured, name, case, says):
    """Known from data, before the library is asked."""
    assert {(record.status, record.reason) for record in measured(name, CASES[case]).values()} == {("unsupported", says)}


@pytest.mark.parametrize("case", ["ragged", "some_without_a_token", "group_16", "prefill", "blocks_of_256"])
def test_every_argument_arrives_as_unified_attention_takes_it(monkeypatch, measured, case):
    """With room for the segments of as many sequences as may be cut."""
    module = types.ModuleType("triton_unified_attention")
    module.unified_attention = fake_vllm.unified_attention
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.triton_unified_attention", module)

    for layout, record in measured("peer.vllm.unified", CASES[case]).items():
        assert (layout, record.status, record.reason) == (layout, "ok", None)

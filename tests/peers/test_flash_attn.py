"""Adapters of Dao-AILab's FlashAttention-2 and -3, end to end, against fakes of the libraries."""

from __future__ import annotations

import sys
import types

import pytest

from tests.peers import fake_flash_attn
from tests.peers.conftest import CASES

FA3 = ["peer.fa3", "peer.fa3.scheduled", "peer.fa3.scheduled.lse"]


@pytest.fixture(autouse=True)
def library(monkeypatch):
    flash_attn = types.ModuleType("flash_attn")
    flash_attn.flash_attn_with_kvcache = fake_flash_attn.flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_attn.interface())


@pytest.mark.parametrize("name", FA3)
@pytest.mark.parametrize("case", ["ragged", "some_without_a_token", "no_token", "own_scale", "head_dim_80", "prefill"])
def test_every_argument_arrives_as_flash_attention_3_takes_it(measured, name, case):
    """With the metadata of the batch, where there is any, and the log-sum-exp in our order of dimensions."""
    for layout, record in measured(name, CASES[case]).items():
        assert (layout, record.status, record.reason) == (layout, "ok", None)


@pytest.mark.parametrize("name", ["peer.fa2", "peer.fa2.lse"])
def test_every_argument_arrives_as_flash_attention_2_takes_it(measured, name):
    """Its log-sum-exp says +inf where no key is seen; ours -inf."""
    for layout, record in measured(name, CASES["blocks_of_256"]).items():
        assert (layout, record.status, record.reason) == (layout, "ok", None)


def test_flash_attention_2_takes_large_blocks_only(measured):
    """Its own rule, known from data."""
    for record in measured("peer.fa2", CASES["ragged"]).values():
        assert (record.status, record.reason) == ("unsupported", "block_size must be one of 256, 512, 1024 (got 16)")

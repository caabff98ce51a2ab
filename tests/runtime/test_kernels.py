"""Which entries an engine takes: by limits and layouts alone, so also without a GPU."""

from __future__ import annotations

import dataclasses

import pytest

from harness.registry import Impl, Unsupported
from runtime.kernels import CacheShape, Kernels

SHAPE = CacheShape(
    num_layers=2, num_q_heads=16, num_kv_heads=8, head_dim=128, scale=0.1, dtype="bf16", block_size=16, num_blocks=64,
    max_seq_len=512, device="cuda:0",
)  # fmt: skip


@pytest.fixture
def on_hopper(monkeypatch):
    """Nothing is missing but what runs on CPUs alone."""
    monkeypatch.setattr(Impl, "why_missing", lambda self, kind: None)


def chosen(shape=SHAPE, **named):
    kernels = Kernels(shape, **{"max_q_len": 64, **named})
    return str(kernels.decode), str(kernels.prefill)


@pytest.mark.parametrize(
    ("changes", "named", "wanted"),
    [
        ({}, {}, ("cuda.tensor_core[HND_SWIZZLED]", "cuda.prefill[HND_SWIZZLED]")),
        ({"head_dim": 80}, {}, ("cuda.tensor_core[HND]", "triton.split_kv[HND]")),
        ({"dtype": "f32"}, {}, ("cuda.split_kv[HND]", "triton.split_kv[HND]")),
        ({"head_dim": 20, "dtype": "f32"}, {}, ("torch.gather[HND]", "torch.gather[HND]")),
        ({}, {"decode": "cuda.tensor_core[NHD]"}, ("cuda.tensor_core[NHD]", "cuda.prefill[NHD]")),
        ({}, {"decode": "cuda.tensor_core[NHD]", "max_q_len": 4}, ("cuda.tensor_core[NHD]", "cuda.tensor_core[NHD]")),
        ({}, {"decode": "cuda.per_token"}, ("cuda.per_token[HND]", "cuda.per_token[HND]")),
        ({}, {"decode": "cuda.per_token", "prefill": "cuda.prefill"}, ("cuda.per_token[HND]", "cuda.prefill[HND]")),
        ({"device": "cpu"}, {}, ("torch.gather[HND]", "torch.gather[HND]")),
    ],
)
def test_entries_are_chosen_by_what_they_take(on_hopper, changes, named, wanted):
    """The best pair; or the entry named, and for prompts itself or the best in its layout."""
    assert chosen(dataclasses.replace(SHAPE, **changes), **named) == wanted


def test_without_hopper_another_pair_is_taken(monkeypatch):
    """Swizzled caches have no entry for prompts there that is fast."""
    monkeypatch.setattr(Impl, "why_missing", lambda self, kind: "no wgmma" if self.name == "cuda.prefill" else None)

    assert chosen() == ("cuda.tensor_core[HND]", "triton.split_kv[HND]")


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        ({"decode": "cuda.tensor_core[NHD]", "prefill": "cuda.prefill[HND]"}, "the cache is in NHD"),
        ({"decode": "cuda.block_copy"}, "it implements block_copy, and attention is wanted"),
        ({"decode": "torch.contiguous"}, "CONTIGUOUS is not paged"),
        ({"decode": "numpy.dense[NHD]"}, "runs on cpu only"),
        ({"decode": "cuda.tensor_core[NHD]", "prefill": "cuda.tensor_core[NHD]"}, "max_q_len must be at most 8"),
    ],
)
def test_an_entry_that_does_not_take_the_model_is_refused(on_hopper, named, rule):
    """With the rule that it breaks."""
    with pytest.raises(Unsupported, match=rule):
        chosen(**named)


def test_a_machine_that_has_nothing_says_why(monkeypatch):
    """All that was tried, and what each lacks."""
    monkeypatch.setattr(Impl, "why_missing", lambda self, kind: f"no {self.name} here")
    with pytest.raises(Unsupported, match=r"no cuda\.tensor_core here.*no cuda\.split_kv here.*no torch\.gather here"):
        chosen()

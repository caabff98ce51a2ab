"""Sampling on a GPU: the kernel compiled, at a vocabulary of Qwen3's size."""

from __future__ import annotations

import pytest
import torch

from impls.triton.interpreter import why_missing
from runtime import sampler
from runtime.groups import Group, Sequence
from runtime.requests import Request, Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARY = 151_936
FILTERS = {"none": (0, 1.0), "top-k": (50, 1.0), "top-p": (0, 0.9), "both": (1000, 0.95)}


def rows(count, top_k, top_p, position=0):
    made = []
    for index in range(count):
        sampling = Sampling(temperature=0.5 + index % 5, top_k=top_k, top_p=top_p, seed=index)
        sequence = Sequence(index, Group(Request.of(index, [1] * 4, sampling), frozenset()), [1] * 4, index)
        sequence.num_pending = position
        made.append(sequence)
    return made


def logits(count, dtype=torch.bfloat16):
    return torch.randn(count, VOCABULARY, generator=torch.Generator("cuda").manual_seed(count), device="cuda").mul(3).to(dtype)


@pytest.fixture(autouse=True)
def _compiled():
    if reason := why_missing("cuda"):
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FILTERS)
def test_the_kernel_draws_what_torch_draws(monkeypatch, name, dtype):
    """64 rows, 8 positions; of 512 tokens one may hang on how a sum or a logarithm is rounded."""
    values, positions = logits(64, dtype), range(8)
    by_kernel = torch.stack([sampler.sample(values, rows(64, *FILTERS[name], position)) for position in positions])
    monkeypatch.setattr(sampler, "_kernel", lambda kind: None)
    by_torch = torch.stack([sampler.sample(values, rows(64, *FILTERS[name], position)) for position in positions])

    assert (by_kernel != by_torch).sum().item() <= 1


@pytest.mark.parametrize("name", FILTERS)
def test_a_row_gets_the_same_token_in_any_batch(name):
    """Alone, among others, and last to first, 37 rows and so at addresses of any alignment."""
    values, sequences = logits(37), rows(37, *FILTERS[name])
    together = sampler.sample(values, sequences)
    alone = torch.cat([sampler.sample(values[i : i + 1], sequences[i : i + 1]) for i in range(37)])

    assert torch.equal(together, alone)
    assert torch.equal(together, sampler.sample(values.flip(0), sequences[::-1]).flip(0))


def test_whatever_the_number_of_rows_one_kernel_is_compiled():
    """Addresses of a few numbers are not compiled for."""
    from impls.triton.sample import draw

    sampler.warm_up_sampler(VOCABULARY, torch.bfloat16, "cuda")
    before = len(draw.device_caches[torch.cuda.current_device()][0])
    for count in (1, 2, 3, 5, 16):
        sampler.sample(logits(count), rows(count, 50, 0.9))

    assert len(draw.device_caches[torch.cuda.current_device()][0]) == before

"""The Ascend article's interface, in float32 against attention over plain tensors."""

import subprocess
import sys

import pytest
import torch

from harness.registry import Registry, Unsupported
from runtime import ForeignBlock, InvalidLength, OutOfBlocks, SequenceExists, UnknownSequence
from runtime.ascend_npu import IMPLS as IMPLS_NPU
from runtime.paged_attention import PagedAttention

IMPLS = ("torch.gather", "torch.blocked", "numpy.dense", "numpy.online")


def tokens(count, heads, seed):
    return torch.randn(count, heads, 16, generator=torch.Generator().manual_seed(seed))


def truth(query, key, value):
    """Causal attention of the last len(query) tokens, in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(group, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) / 4
    seen = torch.arange(len(key)) <= torch.arange(len(query))[:, None] + len(key) - len(query)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("impl", IMPLS)
def test_two_requests_decode_side_by_side(impl):
    """A prompt, then one token at a time; each request reads its own blocks, past block edges and in scattered order."""
    attention = PagedAttention(num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, num_blocks=12, impl=impl)
    attention.key_cache.fill_(torch.nan)
    attention.value_cache.fill_(torch.nan)
    attention.allocate("gone", 5)
    blocks = {"a": attention.allocate("a", 11)}
    attention.free("gone")
    blocks["b"] = attention.allocate("b", 9)
    seen = {name: (tokens(0, 2, 0), tokens(0, 2, 0)) for name in blocks}
    for step, count in enumerate((5, 1, 2, 1)):
        for offset, name in enumerate(blocks):
            query, key, value = (tokens(count, heads, 10 * step + 3 * offset + i) for i, heads in enumerate((4, 2, 2)))
            seen[name] = tuple(torch.cat(pair) for pair in zip(seen[name], (key, value), strict=True))
            out = attention.forward(query, key, value, blocks[name])
            torch.testing.assert_close(out.double(), truth(query, *seen[name]), rtol=1e-5, atol=1e-5)


def test_it_refuses_what_was_not_allocated():
    """Past the allocated length, foreign blocks, a second free, a second allocation, more than there is."""
    attention = PagedAttention(num_heads=2, head_dim=16, block_size=4, num_blocks=4)
    blocks = attention.allocate(1, 6)
    part = tokens(5, 2, 0)
    attention.forward(part, part, part, blocks)

    with pytest.raises(InvalidLength, match="has slots for 6 tokens and holds 5, got 5 more"):
        attention.forward(part, part, part, blocks)
    with pytest.raises(ForeignBlock, match=r"no request holds the blocks \[3\]"):
        attention.forward(part, part, part, [3])
    with pytest.raises(InvalidLength, match=r"key must be \[5, 2, 16\]"):
        attention.forward(part, part[:4], part, blocks)
    with pytest.raises(SequenceExists, match="request 1 has blocks"):
        attention.allocate(1, 2)
    with pytest.raises(OutOfBlocks, match="needs 3 blocks, and 2 of 4 can be taken"):
        attention.allocate(2, 9)
    attention.free(1)
    with pytest.raises(UnknownSequence, match="request 1 has no blocks"):
        attention.free(1)
    assert len(attention.free_blocks) == 4


@pytest.mark.parametrize(
    "wrong",
    [{"num_heads": 0}, {"head_dim": 16.0}, {"num_kv_heads": 0}, {"num_kv_heads": -2}, {"dtype": "f8"}],
)
def test_sizes_that_cannot_be_meant_are_refused(wrong):
    """Zero KV heads are not "as many as heads", and an unknown dtype is told."""
    with pytest.raises(InvalidLength, match=r"PagedAttention: (num_heads|head_dim|num_kv_heads|dtype) must be "):
        PagedAttention(**{"num_heads": 2, "head_dim": 16, "block_size": 4, "num_blocks": 4} | wrong)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_layer_that_learns_leaves_the_cache_as_it_was(impl):
    """Keys that require a gradient are copied and no more: the next token, of whomever, finds a cache that can be written."""
    attention = PagedAttention(num_heads=2, head_dim=16, block_size=4, num_blocks=4, impl=impl)
    blocks = attention.allocate(1, 6)
    query, key, value = (tokens(3, 2, seed) for seed in range(3))
    learned = (part.clone().requires_grad_() for part in (query, key, value))

    out = attention.forward(*learned, blocks)
    again = attention.forward(query[:1], key[:1], value[:1], blocks)
    assert [part.requires_grad for part in (out, again, attention.key_cache)] == [False] * 3
    torch.testing.assert_close(out.double(), truth(query, key, value), rtol=1e-5, atol=1e-5)


def test_an_implementation_of_another_device_is_refused():
    """In words, not by torch: a CUDA kernel cannot read a cache in host memory."""
    attention = PagedAttention(2, 64, 16, 4, impl="cuda.split_kv", dtype="f16")
    blocks = attention.allocate(1, 4)
    part = torch.zeros(1, 2, 64, dtype=torch.float16)

    with pytest.raises(Unsupported, match=r"cuda\.split_kv cannot run this PagedAttention: runs on cuda only \(got cpu\)"):
        attention.forward(part, part, part, blocks)


def test_naming_it_needs_no_torch():
    """The facade loads torch when it is made, and not when its page is imported."""
    code = "import sys, runtime; runtime.PagedAttention; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


def test_the_npu_adapter_says_that_it_cannot_run_here():
    """One of the registry like any other: unsupported, with the reason, and marked as never run."""
    (impl,) = IMPLS_NPU
    attention = PagedAttention(2, 16, 4, 4, impl=impl.name, registry=Registry(IMPLS_NPU), dtype="f16")
    blocks = attention.allocate(1, 4)
    part = tokens(1, 2, 0).half()

    assert impl.note == "experimental: never run on an NPU"
    with pytest.raises(Unsupported, match=r"never run on an NPU; it needs an Ascend device \(got cpu\)"):
        attention.forward(part, part, part, blocks)

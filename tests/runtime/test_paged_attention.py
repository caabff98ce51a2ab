"""The Ascend article's interface, in float32 against attention over plain tensors."""

import subprocess
import sys

import pytest
import torch

from harness.ops.dtypes import torch_dtype
from harness.ops.quantised import quantise
from harness.registry import Registry, Unsupported
from runtime import ForeignBlock, InvalidLength, OutOfBlocks, SequenceExists, UnknownSequence
from runtime.ascend_npu import IMPLS as IMPLS_NPU
from runtime.paged_attention import PagedAttention

IMPLS = ("torch.gather", "torch.blocked", "numpy.dense", "numpy.online")


def tokens(count, heads, seed):
    return torch.randn(count, heads, 16, generator=torch.Generator().manual_seed(seed))


def truth(query, key, value, *, scale=1 / 4, window=None, softcap=None, alibi_slopes=None, sinks=None):
    """Causal attention of the last len(query) tokens, in float64."""
    heads = query.shape[1]
    key, value = (part.double().repeat_interleave(heads // key.shape[1], dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    behind = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * behind
    seen = (behind >= 0) & (behind < (window or len(key)))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(heads, len(query), 1)], dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


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


SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.tensor([1.0, -3.0, 0.0, 2.0])
BY_HEAD = {"k_scale": torch.tensor([0.5, 0.01]), "v_scale": torch.tensor([0.02, 0.25])}
ADDED = {
    "scale": {"scale": 0.7},
    "window": {"window": 5},
    "softcap": {"softcap": 0.5},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "e4m3": {"kv_dtype": "e4m3", "k_scale": 0.01, "v_scale": torch.tensor([0.25])},
    "e5m2 by head": {"kv_dtype": "e5m2", **BY_HEAD},
    "all": {
        "window": 7, "softcap": 5.0, "alibi_slopes": SLOPES, "sinks": SINKS, "kv_dtype": "e4m3", **BY_HEAD,
    },
}  # fmt: skip


def stored(tokens, kv_dtype, scale):
    """What a quantised cache gives back of them."""
    scale = torch.as_tensor(scale).view(-1, 1)
    return quantise(tokens, scale, torch_dtype(kv_dtype)).float() * scale


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("added", ADDED)
def test_what_a_layer_adds_is_added(added, impl):
    """To a prompt, to a few tokens to be verified and to one; fp8 caches are written by their scales, and read by them."""
    layer = ADDED[added]
    attention = PagedAttention(
        num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, num_blocks=12, impl=impl, **layer
    )
    kv_dtype = layer.get("kv_dtype")
    masks = {name: value for name, value in layer.items() if not name.startswith(("kv", "k_", "v_"))}
    blocks, seen = attention.allocate("a", 17), (tokens(0, 2, 0), tokens(0, 2, 0))
    for step, count in enumerate((9, 4, 1, 3)):
        query, *new = (tokens(count, heads, 10 * step + i) for i, heads in enumerate((4, 2, 2)))
        out = attention.forward(query, *new, blocks)
        if kv_dtype:
            new = [stored(part, kv_dtype, layer[name]) for part, name in zip(new, ("k_scale", "v_scale"), strict=True)]
        seen = tuple(torch.cat(pair) for pair in zip(seen, new, strict=True))
        torch.testing.assert_close(out.double(), truth(query, *seen, **masks), rtol=1e-5, atol=1e-5)
        assert step == 0 or kv_dtype or not torch.allclose(out.double(), truth(query, *seen), rtol=1e-3, atol=1e-3)

    assert attention.key_cache.dtype == (torch_dtype(kv_dtype) if kv_dtype else torch.float32)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"scale": 0}, r"scale must be None or a finite number other than 0 \(got 0\)"),
        ({"scale": torch.tensor(0.5)}, "scale must be None or a finite number"),
        ({"window": 0}, "window must be None or a whole number of at least 1"),
        ({"window": 2.0}, "window must be None or a whole number of at least 1"),
        ({"softcap": -1.0}, "softcap must be None or a finite number above 0"),
        ({"kv_dtype": "f8"}, r"kv_dtype must be None or one of e4m3, e5m2 \(got 'f8'\)"),
        ({"kv_dtype": torch.float8_e5m2}, "kv_dtype must be None or one of e4m3, e5m2"),
        ({"kv_dtype": "e4m3"}, "k_scale must be 1 finite number above 0, as a tensor of float32, got None"),
        ({"kv_dtype": "e4m3", "k_scale": 1.0}, "v_scale must be 1 finite number above 0, as a tensor of float32, got None"),
        ({"kv_dtype": "e4m3", "k_scale": 0.0, "v_scale": 1.0}, r"k_scale must be 1 finite number above 0.*got \[0.0\]"),
        ({"kv_dtype": "e4m3", "k_scale": True, "v_scale": 1.0}, "k_scale must be .* got True"),
        ({"kv_dtype": "e4m3", "k_scale": torch.ones(2), "v_scale": 1.0}, r"v_scale must be 2 finite numbers .*got \[1\]"),
        ({"kv_dtype": "e4m3", "k_scale": torch.ones(3), "v_scale": torch.ones(3)}, r"k_scale must be 2 .*got \[3\] of torch.f"),
        ({"k_scale": 1.0}, "k_scale is for a cache with a kv_dtype, got none of f32"),
        ({"sinks": torch.ones(2)}, r"sinks must be 4 finite numbers, as a tensor of float32, got \[2\] of torch.float32"),
        ({"sinks": [1.0] * 4}, r"sinks must be 4 finite numbers, as a tensor of float32, got \[1.0, 1.0"),
        ({"sinks": torch.full((4,), torch.nan)}, "sinks must be 4 finite numbers.* got .nan"),
        ({"alibi_slopes": torch.ones(4).half()}, r"alibi_slopes must be .* got \[4\] of torch.float16"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_layer_cannot_add_is_refused(given, says):
    """When it is made, in one sentence, not by a kernel."""
    with pytest.raises(InvalidLength, match=f"PagedAttention: {says}"):
        PagedAttention(num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, num_blocks=4, **given)


def test_an_implementation_that_lacks_what_a_layer_adds_says_so():
    """Before anything is written."""
    attention = PagedAttention(2, 64, 16, 4, impl="triton.split_kv", dtype="f16", window=3)
    blocks, part = attention.allocate(1, 4), torch.zeros(1, 2, 64, dtype=torch.float16)

    with pytest.raises(Unsupported, match=r"triton\.split_kv cannot run this PagedAttention: window is not implemented"):
        attention.forward(part, part, part, blocks)


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
    [{"num_heads": 0}, {"head_dim": 16.0}, {"num_kv_heads": 0}, {"num_kv_heads": -2}, {"dtype": "f8"}, {"device": "cuda:99"}],
)
def test_sizes_that_cannot_be_meant_are_refused(wrong):
    """Zero KV heads are not "as many as heads", and an unknown dtype or a GPU that is not there is told."""
    with pytest.raises(InvalidLength, match=r"PagedAttention: (num_heads|head_dim|num_kv_heads|dtype|device) must be "):
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("added", [None, *ADDED])
def test_a_gpu_says_what_a_cpu_does(added):
    """The fast kernel and the fast write, a prompt of eight tokens and what follows it, within what 16 bits round."""
    layer = ADDED.get(added, {})
    pair = [
        PagedAttention(4, 64, 16, 12, num_kv_heads=2, impl=impl, dtype="bf16", device=device, **layer)
        for impl, device in (("cuda.tensor_core", "cuda"), ("torch.gather", "cpu"))
    ]
    blocks = [attention.allocate("a", 40) for attention in pair]
    chance = torch.Generator().manual_seed(0)
    for count in (8, 1, 4, 8):
        new = [torch.randn(count, heads, 64, generator=chance).bfloat16() for heads in (4, 2, 2)]
        got, want = (
            attention.forward(*(part.to(attention.key_cache.device) for part in new), of).cpu()
            for attention, of in zip(pair, blocks, strict=True)
        )
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


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

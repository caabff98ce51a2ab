"""triton.sample, interpreted, against what torch draws: runtime/sampler.py."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from impls.triton.interpreter import has_interpreter, why_missing
from runtime import sampler
from runtime.groups import Group, Sequence
from runtime.requests import Request, Sampling
from tests.runtime.test_sampler import key_that_gives

pytestmark = pytest.mark.skipif(not has_interpreter(), reason="needs triton 3.7 or newer")

HOUSE = Path(__file__).resolve().parent.parent.parent
SETTINGS = tuple(
    Sampling(temperature=temperature, top_k=count, top_p=share, seed=seed)
    for seed, (temperature, count, share) in enumerate([
        (1.0, 0, 1.0), (0.2, 0, 1.0), (1e-6, 0, 1.0),
        (1.0, 1, 1.0), (2.0, 7, 1.0), (3.0, 8999, 1.0), (1.0, 9000, 1.0), (1.0, 9999, 1.0),
        (1.0, 0, 1e-9), (1.5, 0, 0.3), (5.0, 0, 0.9), (1.0, 0, 0.999), (1.0, 0, 1 - 1e-12),
        (4.0, 20, 0.5), (1e-6, 3, 0.5), (9.0, 2, 0.99),
    ])
)


@pytest.fixture
def kernel(monkeypatch):
    """`sampler.sample` draws by the kernel."""
    reason = why_missing("cpu")
    if reason:
        pytest.skip(reason)
    from impls.triton.sample import sample

    monkeypatch.setattr(sampler, "_kernel", lambda kind: sample)


def rows(count, position=0):
    made = []
    for index in range(count):
        group = Group(Request.of(index, [1] * 4, SETTINGS[index % len(SETTINGS)]), frozenset())
        sequence = Sequence(index, group, [1] * 4, index)
        sequence.num_pending = position
        made.append(sequence)
    return made


def logits(dtype, kind="normal", columns=9000):
    values = torch.randn(len(SETTINGS), columns, generator=torch.Generator().manual_seed(len(kind))) * 3
    if kind == "ties":
        values = values.round()
        values[:, ::3] = -0.0
    if kind == "masked":
        values[:, ::2] = -torch.inf
        values[0] = -torch.inf
        values[0, 4321] = -5.0
    if kind == "below zero":
        values -= 40
        values[3, 17] = torch.inf
        values[4] = -torch.inf
    return values.to(dtype)


@pytest.mark.parametrize("kind", ["normal", "ties", "masked", "below zero"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernel_draws_what_torch_draws(monkeypatch, kernel, dtype, kind):
    """Every setting: filters alone and together, ties, zeros of both signs, tokens that must not be drawn."""
    values = logits(dtype, kind)
    drawn = sampler.sample(values, rows(len(values)))
    monkeypatch.setattr(sampler, "_kernel", lambda kind: None)

    assert torch.equal(drawn, sampler.sample(values, rows(len(values))))


def test_the_kernels_filters_leave_what_torchs_leave(monkeypatch, kernel):
    """40 positions of a row with 6 tokens left are drawn from these 6 alone, and are not all the same."""
    values = logits(torch.bfloat16)[8:9].expand(40, -1)
    sequences = [sequence for position in range(40) for sequence in rows(1, position)]
    for sequence in sequences:
        sequence.group.request = dataclasses.replace(sequence.group.request, sampling=Sampling(temperature=9.0, top_k=6))
    drawn = set(sampler.sample(values, sequences).tolist())

    assert drawn == set(values[0].topk(6).indices.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("by_kernel", [True, False])
def test_zeros_of_both_signs_stand_or_fall_together(monkeypatch, kernel, by_kernel, dtype):
    """The likeliest token is either of them, whichever bits it has."""
    if not by_kernel:
        monkeypatch.setattr(sampler, "_kernel", lambda kind: None)
    values = torch.full((1, 9), -1.0, dtype=dtype)
    values[0, 3], values[0, 5] = -0.0, 0.0
    sequences = [sequence for position in range(20) for sequence in rows(1, position)]
    for sequence in sequences:
        sequence.group.request = dataclasses.replace(sequence.group.request, sampling=Sampling(temperature=1.0, top_k=1))

    assert set(sampler.sample(values.expand(20, -1), sequences).tolist()) == {3, 5}


def test_a_row_of_rows_that_lie_apart_is_read_where_it_lies(kernel):
    """Logits may have gaps between rows, as a part of a wider table has."""
    values = logits(torch.float32)
    wide = torch.full((len(values), 2 * values.shape[1]), 99.0)
    wide[:, : values.shape[1]] = values

    assert torch.equal(
        sampler.sample(wide[:, : values.shape[1]], rows(len(values))), sampler.sample(values, rows(len(values)))
    )


@pytest.mark.parametrize(("logit", "wanted"), [(-20.0, 0), (-29.0, None)])
def test_noise_has_40_bits(kernel, logit, wanted):
    """A token whose noise is 28.4, the largest, is drawn 20 below the others, of which none has more than 16; not 29 below."""
    from impls.triton.sample import sample

    values = torch.zeros(1, 300)
    values[0, 0] = logit
    ones = torch.ones(1)
    token = sample(values, ones, torch.tensor([300]), ones, key_that_gives(0xABCDEF)[0], sampler.MIXING).item()

    assert token == wanted if wanted is not None else token != 0


def test_no_rows_give_no_tokens(kernel):
    """Without a launch."""
    assert sampler.sample(torch.zeros(0, 10), []).shape == (0,)


@pytest.mark.parametrize(
    ("values", "got"),
    [
        (torch.zeros(1, 10, dtype=torch.float64), "got torch.float64, 10 columns"),
        (torch.zeros(10, 2).T, r"strides \(1, 2\)"),
        (torch.zeros(1, 1).expand(1, 2**24), "16777216 columns"),
    ],
)
def test_logits_that_the_kernel_cannot_read_are_refused(kernel, values, got):
    """By type, strides and size."""
    with pytest.raises(ValueError, match=got):
        sampler.sample(values, rows(len(values)))


AHEAD_OF_TIME = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from impls.triton.sample import TILE, WARPS, draw

longs, floats = {"counts", "keys", "tokens"}, {"temperatures", "shares"}
for bits, kind in ((16, "*bf16"), (16, "*fp16"), (32, "*fp32")):
    constants = dict(bits=bits, tile=TILE)
    kinds = {name: "constexpr" if name in constants else kind if name == "logits" else "*i64" if name in longs else "*fp32"
             if name in floats else "i64" if "number" in name else "i32" for name in draw.arg_names}
    for arch in (80, 90):
        source, target = ASTSource(draw, kinds, constants), GPUTarget("cuda", arch, 32)
        built = triton.compile(source, target=target, options={"num_warps": WARPS})
        print(kind, arch, len(built.asm["cubin"]) > 0, "lg2.approx" in built.asm["ptx"], "st.local" in built.asm["ptx"])
"""


def test_the_kernel_compiles_for_gpus_that_are_not_here(tmp_path):
    """Without an approximate logarithm, by which the noise next to a uniform of 1 could be infinite."""
    environment = {"PATH": "", "PYTHONPATH": str(HOUSE), "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", AHEAD_OF_TIME], capture_output=True, text=True, env=environment, check=False, timeout=300
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"{kind} {arch} True False False" for kind in ("*bf16", "*fp16", "*fp32") for arch in (80, 90)
    ]

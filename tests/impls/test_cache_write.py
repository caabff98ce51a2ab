"""Every cache_write of the table against a loop over tokens, bit for bit, on the best device that it runs on here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.hazards import PLAIN
from harness.ops import operator
from harness.ops.cache_write import CacheWriteCase, CacheWriteSpec, CacheWriteStep
from harness.ops.dtypes import torch_dtype
from harness.ops.layouts import HND_SWIZZLED, NHD, X_PACKED
from harness.ops.quantised import quantise
from harness.registry import Registry, Unsupported
from impls import IMPLS
from impls.numpy_cache_write import fp8_bits
from tests.impls.devices import device_of

ENTRIES = [entry for entry in Registry(IMPLS).entries() if entry.impl.op == "cache_write"]
WIDE = {"num_kv_heads": 3, "head_dim": 72, "block_size": 6}
SHAPES = ({"num_kv_heads": 2, "head_dim": 64, "block_size": 16}, WIDE, {"num_kv_heads": 1, "head_dim": 128, "block_size": 1})


def integers(tensor):
    """View as integers: bit patterns compare equal to themselves, NaN does not."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def random_bits(shape, dtype, device, seed):
    """Every bit pattern alike, NaN and infinity among them."""
    width = {2: torch.int16, 4: torch.int32}[torch_dtype(dtype).itemsize]
    limits = torch.iinfo(width)
    made = torch.randint(limits.min, limits.max, shape, dtype=width, generator=torch.Generator().manual_seed(seed))
    return made.view(torch_dtype(dtype)).to(device)


class Problem:
    """A pool of 7 blocks, and what a list of slots must leave in it."""

    def __init__(self, entry, dtype, shape, slots):
        self.entry, self.dtype, self.shape = entry, dtype, shape
        self.device = device_of(entry.impl)
        self.slots = np.array(slots, np.int64)
        heads, head_dim, block_size = shape.values()
        self.pool = [random_bits((7, heads, block_size, head_dim), dtype, self.device, seed) for seed in (1, 2)]
        self.rows = [random_bits((len(slots), heads, head_dim), dtype, self.device, seed) for seed in (3, 4)]

    def prepare(self):
        return self.entry.impl.load()(CacheWriteSpec(
            **self.shape, dtype=self.dtype, layout=self.entry.layout, num_blocks=7, max_num_tokens=64, device=self.device,
            params=self.entry.impl.resolve_params({}),
        ))

    def step(self):
        return CacheWriteStep(
            slot_mapping=torch.from_numpy(self.slots).to(self.device), host_slot_mapping=self.slots,
        )

    def caches(self):
        """Fresh caches in the entry's layout, owning their memory."""
        return self.entry.layout.arrange(*(part.clone() for part in self.pool))

    def want(self):
        wanted = [part.clone() for part in self.pool]
        for part, rows in zip(wanted, self.rows, strict=True):
            for token, slot in enumerate(self.slots.tolist()):
                if slot >= 0:
                    part[slot // self.shape["block_size"], :, slot % self.shape["block_size"]] = rows[token]
        return wanted

    def assert_written(self, caches):
        got = self.entry.layout.restore(*caches)
        for name, part, wanted in zip(("key_cache", "value_cache"), got, self.want(), strict=True):
            assert torch.equal(integers(part), integers(wanted)), f"{name} differs"


def slots_of(kind, block_size):
    """Slots of one batch: the pool holds 7 blocks."""
    pool = 7 * block_size
    shuffled = np.random.default_rng(5).permutation(pool)[: min(pool, 23)]
    return {
        "scattered": shuffled.tolist(),
        "padded": [-1, *shuffled[:3].tolist(), -1, -7, *shuffled[3:5].tolist(), -1],
        "all padding": [-1, -1, -1],
        "first and last slot": [pool - 1, 0],
        "one token": [pool // 2],
        "no tokens": [],
    }[kind]


@pytest.mark.parametrize("kind", ["scattered", "padded", "all padding", "first and last slot", "one token", "no tokens"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape.values())))
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_writes_its_slots_and_nothing_else(entry, shape, kind):
    """The pool afterwards is the loop's, bit for bit: padding wrote nothing and no neighbour changed."""
    problem = Problem(entry, "bf16", shape, slots_of(kind, shape["block_size"]))
    prepared = problem.prepare()
    caches = problem.caches()

    prepared.plan(problem.step())
    prepared.launch(*problem.rows, *caches)

    problem.assert_written(caches)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_takes_rows_of_a_fused_projection(entry, dtype):
    """Key and value may be views of one QKV tensor, whose tokens lie further apart than their heads fill."""
    problem = Problem(entry, dtype, WIDE, slots_of("padded", 6))
    heads, head_dim = WIDE["num_kv_heads"], WIDE["head_dim"]
    fused = random_bits((len(problem.slots), 4 * heads, head_dim), dtype, problem.device, seed=6)
    problem.rows = [fused[:, 2 * heads : 3 * heads], fused[:, 3 * heads :]]
    prepared = problem.prepare()
    caches = problem.caches()

    prepared.plan(problem.step())
    prepared.launch(*problem.rows, *caches)

    problem.assert_written(caches)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_shorter_step_forgets_the_longer_one(entry):
    """Slots of the step before are not written again (a stale tail of the slot buffer)."""
    long = Problem(entry, "f16", WIDE, slots_of("scattered", 6))
    short = Problem(entry, "f16", WIDE, [4, -1, 40])
    prepared = long.prepare()
    prepared.plan(long.step())
    prepared.launch(*long.rows, *long.caches())
    caches = short.caches()

    prepared.plan(short.step())
    prepared.launch(*short.rows, *caches)

    short.assert_written(caches)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if "cuda" in entry.impl.devices], ids=str)
def test_refuses_a_batch_that_was_not_planned(entry):
    """A launch of other rows than the plan's slots is an error, not a read out of bounds."""
    problem = Problem(entry, "bf16", WIDE, [3, 4])
    prepared = problem.prepare()
    prepared.plan(problem.step())

    with pytest.raises(ValueError, match=r"planned for 2 tokens \(got 1\)"):
        prepared.launch(*(rows[:1] for rows in problem.rows), *problem.caches())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["padded", "all padding"])
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if "cuda" in entry.impl.devices and entry.impl.graph], ids=str)
def test_captured_equals_eager(entry, kind):
    """A graph captured on a full batch writes what a later plan of the same size says, padding included."""
    full = Problem(entry, "bf16", WIDE, slots_of("scattered", 6)[: len(slots_of(kind, 6))])
    later = Problem(entry, "bf16", WIDE, slots_of(kind, 6))
    slots = full.step()
    prepared = full.prepare()
    prepared.plan(slots)
    prepared.launch(*later.rows, *full.caches())
    caches = later.caches()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.launch(*later.rows, *caches)

    slots.slot_mapping.copy_(later.step().slot_mapping)
    prepared.plan(CacheWriteStep(slot_mapping=slots.slot_mapping, host_slot_mapping=later.slots))
    graph.replay()

    later.assert_written(caches)


@pytest.mark.parametrize("layout", [X_PACKED, HND_SWIZZLED], ids=str)
@pytest.mark.parametrize("name", ["numpy.cache_write", "torch.cache_write"])
def test_a_head_of_broken_chunks_is_refused(name, layout):
    """Layouts of 16-byte chunks need heads of whole ones, and say which rule was broken."""
    impl = next(impl for impl in IMPLS if impl.name == name)
    spec = CacheWriteSpec(
        num_kv_heads=1, head_dim=20, block_size=4, dtype="bf16", layout=layout, num_blocks=4, max_num_tokens=4, device="cpu",
    )

    with pytest.raises(Unsupported, match=r"head_dim must be a multiple of 8, 16 bytes \(got 20\)"):
        impl.load()(spec)


QUANTISING = [entry for entry in ENTRIES if {"e4m3", "e5m2"} <= set(entry.impl.limits.features)]


@pytest.mark.parametrize("kv_scales", ["tensor", "head"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bf16", "e4m3"), ("f16", "e5m2"), ("f32", "e4m3")])
@pytest.mark.parametrize("entry", QUANTISING, ids=str)
def test_quantises_what_it_writes(entry, dtype, kv_dtype, kv_scales):
    """Every byte is that of a division in float32, rounded to nearest even; what is too large becomes the largest number."""
    device, op = device_of(entry.impl), operator("cache_write")
    case = CacheWriteCase(
        name="some.write", num_kv_heads=3, head_dim=64, block_size=6, num_tokens=40, num_padding=7, num_blocks=16, dtype=dtype,
        kv_dtype=kv_dtype, kv_scales=kv_scales,
    )
    staged = op.build(case, PLAIN, layers=1, device=device).stage(entry.layout)
    prepared = entry.impl.load()(op.spec(case, entry.layout, device, entry.impl.resolve_params({})))

    prepared.plan(staged.step)
    staged.soil(0)
    prepared.launch(*staged.arguments(0), **staged.keywords(0))

    assert staged.judge(0, frozenset()).reason is None
    written = torch.cat([part.float().flatten() for part in staged.inputs.expected(0)])
    largest = torch.finfo(torch_dtype(kv_dtype)).max
    assert 0.0003 < (written.abs() == largest).double().mean() < 0.05


def all_numbers(dtype):
    """Every number of 16 bits, and those half between two of fp8: [n] f32, NaN and infinity too."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    halves = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float().unique()
    halves = halves[halves.isfinite()]
    numbers = torch.where(numbers.isnan(), torch.nan, numbers)  # NumPy warns of those that signal
    return torch.cat([numbers, (halves[1:] + halves[:-1]) / 2])


def assert_rounded_as_torch_does(got, numbers, dtype):
    want = quantise(numbers, torch.ones((), device=numbers.device), dtype)
    is_nan = numbers.isnan()
    assert torch.equal(got.float().isnan(), is_nan)
    assert torch.equal(got[~is_nan].view(torch.uint8), want[~is_nan].view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
def test_numpy_rounds_to_fp8_as_torch_does(kv_dtype):
    """All numbers: two codes, one answer."""
    dtype = torch_dtype(kv_dtype)
    every = all_numbers(dtype)

    assert_rounded_as_torch_does(torch.from_numpy(fp8_bits(every.numpy(), kv_dtype)).view(dtype), every, dtype)


@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("entry", [entry for entry in QUANTISING if entry.layout is NHD], ids=str)
def test_all_numbers_are_rounded_alike(entry, kv_dtype):
    """By whoever writes a cache."""
    device, dtype = device_of(entry.impl), torch_dtype(kv_dtype)
    every = all_numbers(dtype).to(device)
    rows = torch.nn.functional.pad(every, (0, -len(every) % 2048)).view(-1, 16, 128)
    spec = CacheWriteSpec(
        num_kv_heads=16, head_dim=128, block_size=1, dtype="f32", layout=NHD, num_blocks=len(rows), max_num_tokens=len(rows),
        device=device, params=entry.impl.resolve_params({}), kv_dtype=kv_dtype,
    )
    prepared, slots = entry.impl.load()(spec), torch.arange(len(rows))
    caches = NHD.empty((len(rows), 16, 1, 128), dtype, device)
    prepared.plan(CacheWriteStep(slot_mapping=slots.to(device), host_slot_mapping=slots.numpy()))
    ones = torch.ones(1, device=device)
    prepared.launch(rows, rows, *caches, k_scale=ones, v_scale=ones)

    for cache in caches:
        assert_rounded_as_torch_does(cache.flatten(), rows.flatten(), dtype)

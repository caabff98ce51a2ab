"""Every block_copy of the table against the list read in order, bit for bit, on the best device that it runs on here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.ops.block_copy import BlockCopySpec, BlockCopyStep
from harness.ops.dtypes import torch_dtype
from harness.registry import Registry
from impls import IMPLS
from tests.impls.devices import device_of

ENTRIES = [entry for entry in Registry(IMPLS).entries() if entry.impl.op == "block_copy"]
NUM_BLOCKS = 12
SHAPE = {"num_kv_heads": 3, "head_dim": 24, "block_size": 5}
COPIES = {
    "one": [(3, 7)],
    "fork": [(0, 4), (0, 5), (0, 11)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "rotation": [(0, 9), (1, 0), (9, 1)],
    "overwritten": [(2, 6), (3, 6)],
    "onto itself": [(4, 4), (4, 5)],
    "none": [],
}


class Problem:
    """Random pools, one a layer, and what a list of pairs must make of them."""

    def __init__(self, entry, dtype, copies, num_layers):
        self.entry, self.dtype, self.num_layers = entry, dtype, num_layers
        self.device = device_of(entry.impl)
        self.copies = np.array(copies, np.int32).reshape(-1, 2)
        shape = (num_layers, 2, NUM_BLOCKS, SHAPE["num_kv_heads"], SHAPE["block_size"], SHAPE["head_dim"])
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        self.pools = numbers.to(torch_dtype(dtype)).to(self.device)
        self.pools[:, :, 8] = float("nan")  # not a block of any list: the copies must leave it, and not spread it

    def prepare(self):
        return self.entry.impl.load()(BlockCopySpec(
            **SHAPE, num_layers=self.num_layers, dtype=self.dtype, layout=self.entry.layout, num_blocks=NUM_BLOCKS,
            max_num_copies=6, device=self.device, params=self.entry.impl.resolve_params({}),
        ))

    def step(self):
        return BlockCopyStep(copies=torch.from_numpy(self.copies).to(self.device), host_copies=self.copies)

    def caches(self):
        """Fresh key_caches and value_caches in the entry's layout, owning their memory."""
        arranged = [self.entry.layout.arrange(layer[0].clone(), layer[1].clone()) for layer in self.pools]
        return tuple(key for key, _ in arranged), tuple(value for _, value in arranged)

    def assert_copied(self, key_caches, value_caches):
        for layer, caches in enumerate(zip(key_caches, value_caches, strict=True)):
            wanted = self.pools[layer].clone()
            for source, destination in self.copies.tolist():
                wanted[:, destination] = wanted[:, source]
            got = torch.stack(self.entry.layout.restore(*caches))
            assert torch.equal(got.nan_to_num(1e4), wanted.nan_to_num(1e4)), f"layer {layer} differs"


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_copies_as_if_in_list_order(entry, kind):
    """Chains read what they wrote, the last writer wins, and no other block changes, in every layer."""
    problem = Problem(entry, "bf16", COPIES[kind], num_layers=2)
    prepared = problem.prepare()
    caches = problem.caches()

    prepared.plan(problem.step())
    prepared.launch(*caches)

    problem.assert_copied(*caches)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_takes_every_dtype(entry, dtype):
    """A copy depends on the width of an element alone."""
    problem = Problem(entry, dtype, COPIES["rotation"], num_layers=1)
    prepared = problem.prepare()
    caches = problem.caches()

    prepared.plan(problem.step())
    prepared.launch(*caches)

    problem.assert_copied(*caches)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_new_plan_replaces_the_old_one(entry):
    """Pairs of a longer list before are not copied again."""
    long, short = (Problem(entry, "f16", COPIES[kind], num_layers=1) for kind in ("rotation", "one"))
    prepared = long.prepare()
    prepared.plan(long.step())
    prepared.launch(*long.caches())
    caches = short.caches()

    prepared.plan(short.step())
    prepared.launch(*caches)

    short.assert_copied(*caches)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_many_layers(entry):
    """A model has more layers than one kernel has parameters for: every one of 250 is copied."""
    problem = Problem(entry, "bf16", COPIES["chain"], num_layers=250)
    prepared = problem.prepare()
    caches = problem.caches()

    prepared.plan(problem.step())
    prepared.launch(*caches)

    problem.assert_copied(*caches)

"""Rows on a GPU: what a launch leaves with CUDA is that row's."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from harness.ops.block_copy import BlockCopyCase
from harness.options import Options
from harness.registry import Impl, Registry
from harness.session import Session
from impls import torch_block_copy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
COPY = BlockCopyCase(name="tiny.copy", num_kv_heads=1, head_dim=16, block_size=4, num_copies=3, num_blocks=8)


class Refused(torch_block_copy.BlockCopy):
    """Asks for what CUDA refuses, and does not look whether it did."""

    def launch(self, *tensors):
        super().launch(*tensors)
        (place,) = set(re.findall(r"/\S*libcudart\.so\S*", Path("/proc/self/maps").read_text()))
        assert ctypes.CDLL(place).cudaMemcpy(None, None, ctypes.c_size_t(1), 99) != 0


class Raises(Refused):
    """The same, and says so."""

    def launch(self, *tensors):
        super().launch(*tensors)
        raise RuntimeError("refused")


@pytest.mark.parametrize(("kind", "reason"), [("Refused", "CUDA error: invalid"), ("Raises", "RuntimeError: refused")])
def test_an_error_that_a_launch_left_behind_is_its_own(kind, reason):
    """CUDA gives it to whoever launches next: that was the harness, outside any row, and the worker died of it."""
    bad = Impl(name="toy.bad", op="block_copy", prepare=f"{__name__}:{kind}")
    good = Impl(name="toy.good", op="block_copy", prepare="impls.torch_block_copy:BlockCopy")
    registry = Registry([bad, good])
    options = Options(min_visits=2, max_visits=3, row_s=0.0, power="none", ceiling=False)
    first, second = Session(options, registry, "cuda:0").measure([COPY], registry.entries())

    assert (first.status, second.status) == ("failed", "ok")
    assert reason in first.reason

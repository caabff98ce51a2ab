"""Where an implementation is tried."""

from __future__ import annotations

import pytest
import torch

from harness.registry import Impl


def device_of(impl: Impl) -> str:
    """The GPU for what runs on one, where there is one; else the CPU. Skips where it can run on neither."""
    device = "cuda" if "cuda" in impl.devices and torch.cuda.is_available() else "cpu"
    if device not in impl.devices:
        pytest.skip(f"{impl.name} runs on {' or '.join(impl.devices)} only; no GPU here")
    reason = impl.why_missing(device)
    if reason:
        pytest.skip(reason)
    return device

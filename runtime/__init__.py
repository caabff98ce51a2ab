"""Where keys and values live, and the engine that serves from there: blocks, sequences, steps of a Qwen3 model."""

import importlib
from typing import Any

from runtime.errors import (
    BrokenInvariant,
    ForeignBlock,
    InvalidId,
    InvalidLength,
    MemoryPlaneError,
    OutOfBlocks,
    SequenceExists,
    TokenMismatch,
    UnknownSequence,
)
from runtime.manager import BlockManager, KVBlockManager
from runtime.sequences import SequenceState

__all__ = [
    "BlockManager",
    "BrokenInvariant",
    "Engine",
    "ForeignBlock",
    "InvalidId",
    "InvalidLength",
    "KVBlockManager",
    "MemoryPlaneError",
    "OutOfBlocks",
    "PagedAttention",
    "Sampling",
    "SequenceExists",
    "SequenceState",
    "Settings",
    "TokenMismatch",
    "UnknownSequence",
    "load",
]


#: what loads on first use: it brings the registry with it, or torch, and the block manager needs neither
_LATE = {
    "Engine": "runtime.engine",
    "PagedAttention": "runtime.paged_attention",
    "Sampling": "runtime.requests",
    "Settings": "runtime.settings",
    "load": "runtime.model",
}


def __getattr__(name: str) -> Any:
    """Load one of `_LATE`."""
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

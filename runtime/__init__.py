"""Where keys and values live: a block manager that shares and evicts, and the contiguous caches that it replaces."""

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
    "ForeignBlock",
    "InvalidId",
    "InvalidLength",
    "KVBlockManager",
    "MemoryPlaneError",
    "OutOfBlocks",
    "PagedAttention",
    "SequenceExists",
    "SequenceState",
    "TokenMismatch",
    "UnknownSequence",
]


def __getattr__(name: str) -> Any:
    """`PagedAttention` on first use: it brings the registry with it, and the block manager needs none."""
    if name == "PagedAttention":
        from runtime.paged_attention import PagedAttention

        return PagedAttention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

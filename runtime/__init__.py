"""Where keys and values live: a block manager that shares and evicts, and the contiguous caches that it replaces."""

from runtime.errors import (
    BrokenInvariant,
    ForeignBlock,
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
    "InvalidLength",
    "KVBlockManager",
    "MemoryPlaneError",
    "OutOfBlocks",
    "SequenceExists",
    "SequenceState",
    "TokenMismatch",
    "UnknownSequence",
]

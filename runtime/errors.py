"""What the memory plane refuses, and in which words.

Every message says who refused, the rule, what was got and what to do. A refused call has changed nothing.
"""


class MemoryPlaneError(Exception):
    """Anything that a block manager or an allocator refuses."""


class OutOfBlocks(MemoryPlaneError, RuntimeError):
    """More memory was asked for than is free or can be evicted."""


class UnknownSequence(MemoryPlaneError, KeyError):
    """The id was never given out, or its sequence is released."""

    def __str__(self) -> str:  # KeyError would show the message in quotes
        return str(self.args[0])


class InvalidId(MemoryPlaneError, TypeError):
    """What cannot be the id of a sequence, or a batch of them."""


class SequenceExists(MemoryPlaneError, ValueError):
    """The id is taken."""


class ForeignBlock(MemoryPlaneError, ValueError):
    """A block that does not exist, or that is not held by whoever gives it back."""


class InvalidLength(MemoryPlaneError, ValueError):
    """A length, a count or a number of tokens that cannot be meant."""


class TokenMismatch(MemoryPlaneError, ValueError):
    """Tokens other than those whose keys and values a block already holds."""


class BrokenInvariant(MemoryPlaneError, AssertionError):
    """The books do not balance: a fault of the manager itself, or of someone who wrote to its arrays."""

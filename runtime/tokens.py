"""Token ids and counts as people give them, and batches in which a sequence stands more than once."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runtime.errors import InvalidLength

BEYOND = 2**31  # what int32 does not hold


def as_tokens(tokens: ArrayLike | Iterable[int], who: str) -> NDArray[np.int32]:
    """Token ids as int32 [n]; a list takes three times less this way than through np.array."""
    if isinstance(tokens, np.ndarray):
        found = tokens
    elif isinstance(tokens, Iterable) and not hasattr(tokens, "__array__"):
        given: Any = tokens if isinstance(tokens, list | tuple | range) else list(tokens)  # of bytes, array takes four for one
        try:
            return np.frombuffer(array("i", given), np.int32) if given else np.zeros(0, np.int32)
        except (TypeError, OverflowError) as error:
            raise InvalidLength(f"{who}: token ids must be integers of 32 bits ({error})") from error
    else:
        found = np.asarray(tokens)  # a tensor, or a single number
    if found.size and found.dtype.kind not in "iu":
        raise InvalidLength(f"{who}: token ids must be integers, got an array of {found.dtype}")
    if found.dtype != np.int32 and found.size and not -BEYOND <= int(found.min()) <= int(found.max()) < BEYOND:
        raise InvalidLength(f"{who}: token ids must be integers of 32 bits, got {found.min()} to {found.max()}")
    return np.ascontiguousarray(found.reshape(-1), np.int32)


def as_counts(counts: int | Sequence[int] | NDArray[np.integer], num_ids: int, who: str) -> NDArray[np.int64]:
    """A number of tokens, at least 1, for each of `num_ids` sequences."""
    given = np.asarray(counts)
    if given.size and (given.dtype.kind not in "iu" or given.max() >= BEYOND):
        raise InvalidLength(f"{who}: counts must be integers below {BEYOND}, got {counts}")
    found = given.reshape(-1).astype(np.int64)
    if found.size == 1:
        found = np.repeat(found, num_ids)
    if found.size != num_ids:
        raise InvalidLength(f"{who}: counts must be one number or one for each of {num_ids} ids, got {found.size}")
    if found.size and found.min() < 1:
        raise InvalidLength(f"{who}: counts must be at least 1, got {found.min()}; leave idle sequences out of ids")
    return found


def grouped(ids: list[int]) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]]:
    """The different ids, how often each stands in `ids`, and where: the k-th token in their order is the origin[k]-th given."""
    place = {sequence_id: at for at, sequence_id in enumerate(dict.fromkeys(ids))}
    index = np.fromiter(map(place.__getitem__, ids), np.int64, len(ids))
    return list(place), np.bincount(index), np.argsort(index, kind="stable")

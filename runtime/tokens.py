"""Token ids and counts as people give them, and batches in which a sequence stands more than once."""

from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runtime.errors import InvalidLength

BEYOND = 2**31  # what int32 does not hold


def as_integer(value: object, what: str, least: int, most: int = BEYOND - 1) -> int:
    """`value` as a Python integer between `least` and `most`; `what` begins the sentence if it is none."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        found = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidLength(f"{what} must be an integer, got {value!r}") from None
    if not least <= found <= most:
        raise InvalidLength(f"{what} must be {least} to {most}, got {found}")
    return found


def as_tokens(tokens: ArrayLike | Iterable[int], who: str) -> NDArray[np.int32]:
    """Token ids as int32 [n]; a list takes three times less this way than through np.array."""
    if not isinstance(tokens, np.ndarray) and isinstance(tokens, Iterable) and not hasattr(tokens, "__array__"):
        return _from_list(tokens, who)
    try:
        found = np.asarray(tokens)  # a tensor, or a single number
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidLength(f"{who}: token ids must be integers, got {type(tokens).__name__} ({error})") from error
    if found.ndim > 1:
        raise InvalidLength(f"{who}: token ids must be one after another, got an array of shape {found.shape}")
    if found.dtype.kind not in "iu" and (found.size or found.dtype.kind != "f"):  # np.array([]) is of floats
        raise InvalidLength(f"{who}: token ids must be integers, got an array of {found.dtype}")
    if found.dtype != np.int32 and found.size and not -BEYOND <= int(found.min()) <= int(found.max()) < BEYOND:
        raise InvalidLength(f"{who}: token ids must be integers of 32 bits, got {found.min()} to {found.max()}")
    return np.ascontiguousarray(found.reshape(-1), np.int32)


def _from_list(tokens: Iterable[Any], who: str) -> NDArray[np.int32]:
    if isinstance(tokens, Set | Mapping):
        raise InvalidLength(f"{who}: token ids must be in order, got a {type(tokens).__name__}")
    # Of bytes, array would take four for one.
    given: Any = tokens if isinstance(tokens, list | tuple | range) else list(tokens)
    if len(given) == 0:
        return np.zeros(0, np.int32)
    if isinstance(given[0], bool | np.bool_):  # the first tells what kind of list it is
        raise InvalidLength(f"{who}: token ids must be integers of 32 bits (got booleans)")
    try:
        return np.frombuffer(array("i", given), np.int32)
    except (TypeError, OverflowError) as error:
        raise InvalidLength(f"{who}: token ids must be integers of 32 bits ({error})") from error


def as_counts(counts: int | Sequence[int] | NDArray[np.integer], num_ids: int, who: str) -> NDArray[np.int64]:
    """A number of tokens, at least 1, for each of `num_ids` sequences; a single number is that of each."""
    try:
        given = np.asarray(counts)
    except (TypeError, ValueError, RuntimeError):  # rows of different lengths, a tensor on a GPU
        given = np.asarray(None)
    if given.size and (given.dtype.kind not in "iu" or given.max() >= BEYOND):
        raise InvalidLength(f"{who}: counts must be integers below {BEYOND}, got {counts}")
    if given.ndim and given.shape != (num_ids,):
        raise InvalidLength(
            f"{who}: counts must be one number or one for each of {num_ids} ids, got {counts} (shape {given.shape})"
        )
    found = np.full(num_ids, given, np.int64) if given.ndim == 0 else given.astype(np.int64)
    if found.size and found.min() < 1:
        raise InvalidLength(f"{who}: counts must be at least 1, got {found.min()}; leave idle sequences out of ids")
    return found


def grouped(ids: list[int]) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]]:
    """The different ids, how often each stands in `ids`, and where: the k-th token in their order is the origin[k]-th given."""
    place = {sequence_id: at for at, sequence_id in enumerate(dict.fromkeys(ids))}
    index = np.fromiter(map(place.__getitem__, ids), np.int64, len(ids))
    return list(place), np.bincount(index), np.argsort(index, kind="stable")

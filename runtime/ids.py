"""Ids of sequences as people give them, and the errors for those that cannot be meant."""

from collections.abc import Iterable, Mapping, Set
from operator import index

import numpy as np

from runtime.errors import InvalidId, InvalidLength, UnknownSequence


def as_ids(ids: Iterable[int], who: str) -> list[int]:
    """`ids` as a list; one of integers is taken as it is.

    The first tells what kind of list it is: a mask of booleans, or an array of floats, is refused. That the others are known
    is looked up in any case.
    """
    if type(ids) is not list:
        ids = _listed(ids, who)
    if ids and type(ids[0]) is not int:
        return [as_id(sequence_id, who) for sequence_id in ids]
    return ids


def as_id(sequence_id: object, who: str) -> int:
    """`sequence_id` as a Python integer."""
    try:
        if isinstance(sequence_id, bool | np.bool_):
            raise TypeError
        return index(sequence_id)  # type: ignore[arg-type]
    except TypeError:
        kind = type(sequence_id).__name__
        raise InvalidId(f"{who}: a sequence's id is an integer, got {sequence_id!r} ({kind})") from None


def twice(count: int) -> InvalidLength:
    """The error for a batch in which an id is repeated and must not be."""
    return InvalidLength(f"BlockManager: an id stands twice in a batch of {count}; give each sequence once")


def unknown(who: str, sequence_id: object, preempted: Mapping[int, object]) -> UnknownSequence | InvalidId:
    """The error for an id that has no row."""
    try:
        as_id(sequence_id, who)
    except InvalidId as error:
        return error
    if sequence_id in preempted:
        return UnknownSequence(f"{who}: sequence {sequence_id} is preempted: resume it first")
    return UnknownSequence(f"{who}: sequence {sequence_id} is unknown: it was never created, or is released already")


def _listed(ids: Iterable[int], who: str) -> list[int]:
    shape = getattr(ids, "shape", None)  # of an array or a tensor
    try:
        if shape is not None and len(shape) == 1:
            return list(ids.tolist())  # type: ignore[attr-defined]
        if shape is None and not isinstance(ids, str | bytes | Set | Mapping):  # a set has no order
            return list(ids)
    except (TypeError, RuntimeError):  # not iterable; a tensor without data
        pass
    got = f"an array of shape {tuple(shape)}" if shape is not None else f"{type(ids).__name__} {ids!r}"
    raise InvalidId(f"{who}: ids must be a list of sequences' ids, got {got}")

"""What a problem may ask besides softmax(scale * q.k) v, by name: the words in which an entry says what it implements."""

from __future__ import annotations

from typing import Any

#: of a mask, a score or the sum of a row; and element types of a cache that is not of the query's
FEATURES = ("window", "softcap", "alibi", "sinks", "e4m3", "e5m2")
#: types of a quantised cache, `kv_dtype`
KV_DTYPES = ("e4m3", "e5m2")
#: how far a scale of a quantised cache reaches, `kv_scales`: all of it, or one KV head
KV_SCALES = ("tensor", "head")


def features_of(problem: Any) -> tuple[str, ...]:
    """The features that a case or a spec asks for, in the order of FEATURES; fields that it lacks ask for nothing."""
    asked = {name for name in FEATURES if getattr(problem, name, None)} | {getattr(problem, "kv_dtype", None)}
    return tuple(name for name in FEATURES if name in asked)

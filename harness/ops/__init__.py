"""The operators: what can be asked of an implementation.

Each operator has a page of plain data (its `Case`, what a problem is: no torch) and a class that makes tensors of it.
The class loads on first use, so that listing needs no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.ops.case import Case
    from harness.ops.contract import Operator

_OPERATORS = {
    "attention": "harness.ops.attention_tensors:AttentionOperator",
    "cache_write": "harness.ops.cache_write_tensors:CacheWriteOperator",
    "block_copy": "harness.ops.block_copy_tensors:BlockCopyOperator",
}

_CASES = {
    "attention": "harness.ops.attention:AttentionCase",
    "cache_write": "harness.ops.cache_write:CacheWriteCase",
    "block_copy": "harness.ops.block_copy:BlockCopyCase",
}

OP_NAMES = tuple(_OPERATORS)


def case_type(op: str) -> type[Case]:
    """Return the class of an operator's cases; no torch."""
    found: type[Case] = _load(_CASES[op])
    return found


def case_from_json(data: Mapping[str, Any]) -> Case:
    """Return the case that `Case.to_json` made this of."""
    fields: dict[str, Any] = {name: tuples(value) for name, value in data.items() if name != "op"}
    return case_type(data["op"])(**fields)


def tuples(value: Any) -> Any:
    """Lists, and lists in them, as tuples: a case's fields cannot change."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


def operator(name: str) -> Operator:
    """Return the operator called `name`; raises KeyError with the known names."""
    if name not in _OPERATORS:
        raise KeyError(f"no operator {name!r}; there are: {', '.join(_OPERATORS)}")
    made: Operator = _load(_OPERATORS[name])()
    return made


def _load(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)

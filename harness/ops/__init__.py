"""The operators: what can be asked of an implementation.

Each operator has a page of plain data (its `Case`, what a problem is: no torch) and a class that makes tensors of it.
The class loads on first use, so that listing needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.ops.contract import Operator

_OPERATORS = {
    "attention": "harness.ops.attention_tensors:AttentionOperator",
    "cache_write": "harness.ops.cache_write_tensors:CacheWriteOperator",
    "block_copy": "harness.ops.block_copy_tensors:BlockCopyOperator",
}

OP_NAMES = tuple(_OPERATORS)


def operator(name: str) -> Operator:
    """Return the operator called `name`; raises KeyError with the known names."""
    if name not in _OPERATORS:
        raise KeyError(f"no operator {name!r}; there are: {', '.join(_OPERATORS)}")
    module, _, attribute = _OPERATORS[name].partition(":")
    made: Operator = getattr(importlib.import_module(module), attribute)()
    return made

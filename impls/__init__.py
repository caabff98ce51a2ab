"""What is measured: one file a variant, one line each in this table. Strings load on first use."""

from __future__ import annotations

from harness.registry import Impl

IMPLS: tuple[Impl, ...] = ()

"""What takes minutes where a run has seconds, and is left out unless --patient asks for it."""

from __future__ import annotations

import math

from harness.ops.case import Case
from harness.registry import Impl

#: What a CPU does in seconds and not minutes: bytes of one cache, and multiplications and additions.
CPU_CACHE_BYTES, CPU_FLOPS = 192 << 20, 4e9
#: And how many sequences, and rows of one query head and token, it makes and judges in that time.
CPU_SEQS, CPU_ROWS = 20_000, 200_000


def why_too_long(case: Case, impl: Impl, device_kind: str) -> str | None:
    """Return why `impl` on `case` would take minutes on a "cpu" or "cuda" device, or None."""
    found = _why_on_a_cpu(case) if device_kind == "cpu" else None
    limit, work = impl.max_work.get(device_kind, math.inf), max(case.flops, case.traffic_bytes)
    if found is None and work > limit:
        return (
            f"would take minutes: {work / 1e6:.0f} million operations, {impl.name} on {device_kind} "
            f"is given at most {limit / 1e6:.0f} million (--patient runs it)"
        )
    return found


def _why_on_a_cpu(case: Case) -> str | None:
    seqs, rows = getattr(case, "num_seqs", 0), getattr(case, "num_tokens", 0) * getattr(case, "num_q_heads", 0)
    if case.cache_bytes > CPU_CACHE_BYTES:
        what = f"{case.cache_bytes / 1e6:.0f} MB of cache a layer (at most {CPU_CACHE_BYTES / 1e6:.0f}"
    elif case.flops > CPU_FLOPS:
        what = f"{case.flops / 1e9:.1f} GFLOP (at most {CPU_FLOPS / 1e9:.0f}"
    elif seqs > CPU_SEQS or rows > CPU_ROWS:
        what = f"{seqs} sequences, {rows} rows of a query head (at most {CPU_SEQS} and {CPU_ROWS}"
    else:
        return None
    return f"would take minutes on a CPU: {what}; --patient runs it)"

"""cuda.split_kv: block_parallel with each sequence cut over several CTAs, and their partial results merged.

The number of splits is fixed at prepare, from capacities and the number of SMs, so that a captured launch stays right
whatever the lengths are when it is replayed; where a sequence is cut follows from its length, on the device.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from harness.registry import Unsupported
from impls.cuda.attention import DEFAULT_SHAPES, SIGNATURE, Attention, Shape, load
from impls.cuda.builds import Build
from impls.cuda.group import TIGHT_SHAPES, Group

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec

MERGE_THREADS = 256
MAX_SPLITS = MERGE_THREADS            # a thread of merge_splits takes one split's weight
MAX_WORKSPACE_BYTES = 256 * 1024**2
LONG_SPLIT = 1024                     # tokens: shorter splits pay only while SMs stand idle
WAVES = 8                             # CTAs for each that fits at once, which evens out their ends

SPLIT_SIGNATURE = SIGNATURE + "PPi"   # and split_sums, split_stats, min_split
MERGE_SIGNATURE = "PPPP PP iiii q"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    """Cut a row of n tokens into at most `count` splits of at least `min_tokens`.

    split_bytes    workspace of one split of every row: sums and (most, total), in float
    """

    count: int
    min_tokens: int
    split_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """Partial results of all rows; none where rows are never cut."""
        return self.count * self.split_bytes if self.count > 1 else 0


def plan_splits(spec: AttentionSpec, num_sms: int) -> Splits:
    """Choose splits for `spec` on a GPU of `num_sms`; the parameter `splits` overrides the number, 0 leaves it to us.

    First as many as give every SM its CTAs, however short; then more, of LONG_SPLIT tokens, while that evens out the
    ends. A pool smaller than all sequences at full length says that few of them are long: then the long ones count.
    Raises Unsupported when the number asked for is above MAX_SPLITS.
    """
    group = Group.of(Shape.of(spec))
    split_bytes = spec.max_num_tokens * spec.num_q_heads * (spec.head_dim + 2) * 4
    asked = int(spec.params.get("splits", 0))
    if not 0 <= asked <= MAX_SPLITS:
        raise Unsupported(f"splits must be 0 (planned) to {MAX_SPLITS} (got {asked})")
    longest = max(min(spec.max_seq_len, spec.max_blocks_per_seq * spec.block_size), 1)
    if asked:
        return Splits(count=asked, min_tokens=group.step, split_bytes=split_bytes)
    full = min(1.0, spec.num_blocks * spec.block_size / max(spec.max_num_seqs * longest, 1))
    ctas = max(math.ceil(spec.max_num_tokens * full), 1) * spec.num_kv_heads * group.parts
    resident = num_sms * group.ctas
    fill = min(math.ceil(resident / ctas), math.ceil(longest / group.step))
    even = min(math.ceil(WAVES * resident / ctas), longest // LONG_SPLIT)
    count = max(min(max(fill, even), MAX_SPLITS, MAX_WORKSPACE_BYTES // max(split_bytes, 1)), 1)
    least = min(max(math.ceil(longest / count), group.step), LONG_SPLIT)
    return Splits(count=count, min_tokens=math.ceil(least / group.step) * group.step, split_bytes=split_bytes)


class SplitKv(Attention):
    """Grid (num_tokens * num_kv_heads * parts, splits), then one CTA a (query token, query head) to merge."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        import torch

        from harness.guards import workspace

        shape = Shape.of(spec)
        self._group = Group.of(shape)
        self._splits = plan_splits(spec, count_sms(spec.device))
        split, merge = build(shape), build_merge(shape)
        self._split, resources = load(split, spec.device, SPLIT_SIGNATURE)
        self.kernels = (resources,)
        if self._splits.count > 1:
            self._merge, resources = load(merge, spec.device, MERGE_SIGNATURE)
            self.kernels += (resources,)
        self.ledger["splits"] = f"at most {self._splits.count}, of at least {self._splits.min_tokens} tokens"
        self.workspace_bytes = self._splits.workspace_bytes
        self._workspace = workspace(self.workspace_bytes // 4, torch.float32, spec.device)
        num_sums = self._splits.count * spec.max_num_tokens * spec.num_q_heads * spec.head_dim
        self._sums = self._workspace.data_ptr()
        self._stats = self._sums + 4 * num_sums
        self._head_ctas = spec.num_kv_heads * self._group.parts

    def _enqueue(self, stream: int, values: tuple[Any, ...]) -> None:
        spec, splits = self._spec, self._splits
        grid = (self._num_tokens * self._head_ctas, splits.count, 1)
        self._split(grid, self._group.threads, stream, *values, self._sums, self._stats, splits.min_tokens)
        if splits.count == 1:
            return
        (out, lse), (starts, lens, num_seqs), out_stride = values[:2], values[6:9], values[13]
        self._merge(
            (self._num_tokens * spec.num_q_heads, 1, 1), MERGE_THREADS, stream, out, lse, self._sums, self._stats,
            starts, lens, num_seqs, spec.num_q_heads, splits.count, splits.min_tokens, out_stride,
        )


def count_sms(device: str) -> int:
    """Return the number of SMs of a CUDA device."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def build(shape: Shape) -> Build:
    """The kernel that attends to one split."""
    group = Group.of(shape)
    return Build(
        source="split_kv.cu", entry="split_kv", macros=shape.macros() | group.macros(), shared_bytes=group.shared_bytes
    )


def build_merge(shape: Shape) -> Build:
    """The kernel that merges splits."""
    macros = shape.macros() | {"PA_STEP": Group.of(shape).step, "PA_THREADS": MERGE_THREADS}
    return Build(source="merge_splits.cu", entry="merge_splits", macros=macros)


def builds(arch: str) -> list[Build]:
    """Builds that stand for all; the same on every architecture."""
    return [build(shape) for shape in DEFAULT_SHAPES + TIGHT_SHAPES] + [build_merge(shape) for shape in DEFAULT_SHAPES[:3]]


prepare = SplitKv

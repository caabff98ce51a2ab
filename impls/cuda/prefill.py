"""cuda.prefill: many query tokens a sequence, on Hopper's warpgroup products.

What a CTA takes follows on the device from the lengths it finds there (deal.cuh); fixed at prepare are the tile and the number
of CTAs. So a captured launch stays right when lengths change.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from harness.ops.layouts import HND_SWIZZLED
from harness.registry import Unsupported
from impls.cuda.attention import SIGNATURE, Attention, Shape, load
from impls.cuda.builds import SHARED_LIMIT, Build
from impls.cuda.split_kv import count_sms
from impls.cuda.toolkit import why_other

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec

ARCH = "sm_90"
ALIGNMENT = 1024           # bytes, of matrices in shared memory
REGISTERS = {1: 240, 2: 224, 3: 152}  # of a thread that multiplies, by warpgroups: what one that copies leaves, in eights
OTHER_REGISTERS = 28       # that it needs besides sums, scores, weights and queries

#: and counters
PREFILL_SIGNATURE = SIGNATURE + "P"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a CTA works.

    warpgroups    that multiply, 64 packed rows each; one more copies
    tile          tokens of K and of V that are taken at a time
    stages        of the rings of K and of V, each a tile
    query         where products read queries: in "shared" memory, or in "registers"
    """

    warpgroups: int = 2
    tile: int = 128
    stages: int = 2
    query: str = "shared"

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def macros(self) -> dict[str, str | int]:
        """The macros of deal.cuh, tile.cuh, stages.cuh, warpgroup.cuh and roles.cuh."""
        return {
            "PA_ROWS": self.rows, "PA_TILE": self.tile, "PA_STAGES": self.stages, "PA_REGISTERS": REGISTERS[self.warpgroups],
            "PA_QUERY": self.query.upper(),
        }

    def shared_bytes(self, head_dim: int) -> int:
        """Queries, both rings, their barriers and two items."""
        matrices = 2 * head_dim * (self.rows + 2 * self.stages * self.tile)
        return -(-(matrices + 8 * (2 + 4 * self.stages) + 2 * 24) // ALIGNMENT) * ALIGNMENT

    def registers(self, head_dim: int) -> int:
        """Of a thread that multiplies: sums, scores and weights of a tile, queries, and others."""
        held = head_dim // 4 if self.query == "registers" else 0
        return head_dim // 2 + self.tile // 2 + self.tile // 4 + held + OTHER_REGISTERS


def plan_tiles(head_dim: int, params: dict[str, Any]) -> Tiles:
    """Choose for `head_dim`; the parameters override, 0 leaves it to us.

    Raises Unsupported where what was asked for does not fit.
    """
    warpgroups, stages = params.get("warpgroups", 2), params.get("stages", 2)
    tile = params.get("tile", 0) or (128 if head_dim <= 128 and warpgroups <= 2 else 80)
    tiles = Tiles(warpgroups=warpgroups, tile=tile, stages=stages, query=params.get("query", "shared"))
    limits = (
        ("shared memory", "bytes a CTA", tiles.shared_bytes(head_dim), SHARED_LIMIT[ARCH]),
        ("registers", "a thread", tiles.registers(head_dim), REGISTERS[warpgroups]),
    )
    for what, unit, needed, most in limits:
        if needed > most:
            raise Unsupported(f"{what} must be at most {most} {unit} (got {needed}); set a smaller tile, or fewer stages")
    return tiles


class Prefill(Attention):
    """One CTA an SM, whatever the step is."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        import torch

        from harness.guards import workspace

        self._tiles = plan_tiles(spec.head_dim, dict(spec.params))
        self._kernel, resources = load(build(Shape.of(spec), self._tiles), spec.device, PREFILL_SIGNATURE)
        self.kernels = (resources,)
        self._counters = workspace(2, torch.int32, spec.device).zero_()  # every launch leaves zeros
        self.workspace_bytes = 4 * self._counters.numel()
        self._counters_at = self._counters.data_ptr()
        self._grid = (count_sms(spec.device), 1, 1)
        self.ledger["tiles"] = (
            f"{self._tiles.rows} rows by {self._tiles.tile} tokens, {self._tiles.stages} stages, queries in {self._tiles.query}"
        )

    def _enqueue(self, stream: int, values: tuple[Any, ...]) -> None:
        self._kernel(self._grid, self._tiles.threads, stream, *values, self._counters_at)


def build(shape: Shape, tiles: Tiles) -> Build:
    """The kernel for `shape`."""
    shared_bytes = tiles.shared_bytes(shape.head_dim)
    return Build(
        source="prefill.cu", entry="prefill", macros=shape.macros() | tiles.macros() | {"PA_SHARED": shared_bytes},
        shared_bytes=shared_bytes, only="a",
    )


def why_no_wgmma(device_kind: str) -> str | None:
    """Return why this machine cannot run the kernel, or None."""
    return why_other(device_kind, (9, 0), "wgmma")


def builds(arch: str) -> list[Build]:
    """Builds that stand for all; none but on Hopper."""
    if arch != ARCH:
        return []
    listed: tuple[tuple[Shape, dict[str, Any]], ...] = (
        (Shape(), {}),
        (Shape(layout=HND_SWIZZLED.name, block_size=24, group=5), {}),
        (Shape(layout="NHD", group=7, dtype="f16", block_size=1), {"warpgroups": 3}),
        (Shape(layout="NHD"), {"query": "registers"}),
        (Shape(), {"tile": 64, "stages": 4}),
        (Shape(block_size=8), {"tile": 160}),
        (Shape(group=8), {"tile": 176}),
        (Shape(head_dim=64, group=8), {}),
        (Shape(head_dim=64, group=1), {"tile": 192}),
        (Shape(head_dim=64, block_size=32), {"query": "registers", "warpgroups": 3}),
        (Shape(head_dim=256, group=2, layout="NHD"), {}),
    )
    return [build(shape, plan_tiles(shape.head_dim, params)) for shape, params in listed]


prepare = Prefill

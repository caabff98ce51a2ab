"""cuda.tensor_core where many query rows see the same keys: drafts of large groups, verified by Hopper's warpgroup products.

As tensor_core_general.py, but that a team is a CTA, and its tiles and roles are those of cuda.prefill: products of warps, with
their operands from registers, take longer for more than 32 rows than memory does for K and V.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from harness.ops.layouts import HND_SWIZZLED
from harness.registry import Unsupported
from impls.cuda import prefill
from impls.cuda import tensor_core_general as general
from impls.cuda.attention import Shape
from impls.cuda.builds import SHARED_LIMIT, Build
from impls.cuda.prefill import Tiles, plan_tiles
from impls.cuda.tensor_core import STATIC_BYTES

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec

HEAD_DIMS = {64, 128, 256}  # that warpgroups take, as in cuda.prefill
TILES = (0, 64, 128)        # that may be asked for
MOST_WARPGROUPS = 2         # of a CTA that multiply
RING_BYTES = 128 * 1024     # of keys and values: more was slower where it was measured, docs/kernels.md


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warpgroups:
    """How a CTA's warpgroups share the work.

    tiles    of cuda.prefill; their rows are those of a part
    parts    that cover the rows of a KV head
    """

    tiles: Tiles
    parts: int

    @property
    def copy(self) -> str:
        """How tiles come: 16 bytes a lane."""
        return "async"

    @property
    def heads(self) -> int:
        """As Teams has it."""
        return self.tiles.rows

    @property
    def tile(self) -> int:
        return self.tiles.tile

    @property
    def stages(self) -> int:
        return self.tiles.stages

    @property
    def warps(self) -> int:
        return self.tiles.threads // 32

    @property
    def team(self) -> int:
        """All of a CTA's take a segment together."""
        return self.warps

    @property
    def arrivals(self) -> int:
        """As Teams has it: each warpgroup merges its own rows."""
        return self.tiles.warpgroups

    def macros(self) -> dict[str, str | int]:
        """The macros of shares.cuh and partials.cuh, to which a warpgroup is a team, and those of cuda.prefill."""
        own = {"PA_WARPS": self.warps, "PA_TEAM": 4, "PA_CREW": 4, "PA_AT_ONCE": 16}
        return self.tiles.macros() | own


def plan_warpgroups(shape: Shape, spec: AttentionSpec, arch: str) -> Warpgroups | None:
    """Choose for `spec`, or return None where warps do it.

    Planned are warpgroups where warps would share a ring, unless something is set that only warps have. Raises Unsupported
    where they are asked for and cannot be had.
    """
    products, asked = spec.params.get("products", "planned"), general.Asked.of(spec)
    why = refusal(shape, spec, arch)
    if products == "warpgroups" and why:
        raise Unsupported(f"products=warpgroups {why}")
    if products == "warps" or why or (products == "planned" and general.plan_rows(shape, asked)[2] == 1):
        return None
    stages, tile = spec.params.get("stages", 0), spec.params.get("tile", 0)
    found = fitting(shape, asked, spec.max_num_seqs, SHARED_LIMIT[arch], (stages,) if stages else (), tile)
    if found is None and products == "warpgroups":
        room = f"a ring beside {spec.max_num_seqs} sequences in {SHARED_LIMIT[arch]} bytes of shared memory"
        raise Unsupported(f"products=warpgroups needs {room}; set fewer stages, or a smaller tile")
    return found


def fitting(
    shape: Shape, asked: general.Asked, max_num_seqs: int, shared_limit: int, stages: Iterable[int] = (), tile: int = 0
) -> Warpgroups | None:
    """With the first of `stages` for which shared memory has room, or None. None given are as many as RING_BYTES hold."""
    rows = shape.group * asked.queries
    warpgroups = min(math.ceil(rows / 64), MOST_WARPGROUPS)
    query = "registers" if warpgroups == 1 and shape.head_dim <= 128 else "shared"  # where there are some left
    for number in stages or range(8, 1, -1):
        with contextlib.suppress(Unsupported):
            tiles = plan_tiles(shape.head_dim, {"warpgroups": warpgroups, "tile": tile, "stages": number, "query": query})
            if not stages and number > 2 and 4 * number * tiles.tile * shape.head_dim > RING_BYTES:
                continue
            found = Warpgroups(tiles=tiles, parts=math.ceil(rows / tiles.rows))
            if shared_bytes(shape, asked, found, max_num_seqs) + STATIC_BYTES <= shared_limit:
                return found
    return None


def refusal(shape: Shape, spec: AttentionSpec, arch: str) -> str | None:
    """Say what warpgroups do not do, or None."""
    params = {
        "team": 0, "warps": 0, "tile": 0, "copy": "planned", "solo": "planned", "opening": "planned", "closing": "planned",
        **spec.params,
    }
    rules = (
        (arch == prefill.ARCH, f"needs compute capability 9.0 (got {arch})"),
        (shape.head_dim in HEAD_DIMS, f"needs a head_dim of 64, 128 or 256 (got {shape.head_dim})"),
        (set(shape.features) <= {"sinks"}, f"takes 16-bit caches and sinks (got {', '.join(shape.features)})"),
        (params["tile"] in TILES, f"takes tiles of 64 or 128 (got {params['tile']})"),
        (params["team"] == params["warps"] == 0, "has neither team nor warps; leave them planned"),
        (params["solo"] in ("planned", 0), "has no warps by themselves; leave solo planned"),
        (params["copy"] in ("planned", "async"), f"copies by async (got {params['copy']})"),
        (params["opening"] in ("planned", "plain"), f"begins the plain way (got opening={params['opening']})"),
        (params["closing"] in ("planned", "fences"), f"ends with fences (got closing={params['closing']})"),
    )
    return next((text for holds, text in rules if not holds), None)


def cta_bytes(shape: Shape, plan: Warpgroups) -> int:
    """A CTA's queries and rings in shared memory."""
    return plan.tiles.shared_bytes(shape.head_dim)


def shared_bytes(shape: Shape, asked: general.Asked, plan: Warpgroups, max_num_seqs: int) -> int:
    """What a CTA takes, with the list of sequences."""
    return cta_bytes(shape, plan) + general.list_bytes(asked, max_num_seqs)


def build(shape: Shape, asked: general.Asked, plan: Warpgroups, max_num_seqs: int) -> Build:
    """The kernel for `shape`."""
    sizes = {"PA_SHARED": plan.tiles.shared_bytes(shape.head_dim)}
    macros = shape.macros() | asked.macros() | plan.macros() | sizes
    return Build(
        source="verify.cu", entry="verify", macros=macros, shared_bytes=shared_bytes(shape, asked, plan, max_num_seqs), only="a"
    )


def builds(arch: str) -> list[Build]:
    """Builds that stand for all, at most 64 sequences; none but on Hopper."""
    if arch != prefill.ARCH:
        return []
    swizzled = HND_SWIZZLED.name
    listed = (
        (Shape(layout=swizzled, group=8), general.Asked(queries=8)),
        (Shape(layout=swizzled, group=16), general.Asked(queries=8)),
        (Shape(layout="NHD", group=7, dtype="f16", block_size=1, features=("sinks",)), general.Asked(queries=6)),
        (Shape(group=8, block_size=24), general.Asked()),
        (Shape(head_dim=64, group=8), general.Asked(queries=5)),
        (Shape(head_dim=256, group=4), general.Asked(queries=8)),
        (Shape(head_dim=64, group=24, layout="NHD"), general.Asked(queries=8)),
    )
    found = [(shape, asked, fitting(shape, asked, 64, SHARED_LIMIT[arch])) for shape, asked in listed]
    return [build(shape, asked, plan, 64) for shape, asked, plan in found if plan is not None]

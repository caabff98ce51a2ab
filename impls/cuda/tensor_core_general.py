"""cuda.tensor_core where more is asked than plain decode: several query tokens, 8-bit caches, windows, softcap, ALiBi, sinks.

As tensor_core.py, but that query rows (a head of a query token each) take the place of heads, that several warps may share a
ring, each for rows of its own, and that a tile may have 32 tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from harness.ops.dtypes import ITEMSIZE
from harness.ops.layouts import HND_SWIZZLED
from harness.registry import Unsupported
from impls.cuda import fragments
from impls.cuda.attention import Shape
from impls.cuda.builds import SHARED_LIMIT, Build, has_bulk_copies
from impls.cuda.tensor_core import (
    LONG_SHARE,
    STATIC_BYTES,
    WARPS,
    Grid,
    TensorCore,
    choose_copy,
    choose_ends,
    ends,
    longest_of,
    may_be_alike,
    row_bytes,
)

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec

ROWS_IN_REGISTERS = 16  # query rows of a warp of which registers hold the query, too; half of it above a head_dim of 128
CREWS = (1, 2, 4)       # warps that may share a ring
TILES = (0, 16, 32)     # tokens that may be asked for
SHORT_SHARE = 1         # tiles of a crew, below which they are cut smaller
LONG_SEQUENCE = 32      # tiles of each warp in one sequence, from which on all warps of a CTA take it together
WHOLE_SHARE = 4         # tiles of a warp, from which on two teams are better where every share is whole sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What is compiled in besides a shape; the defaults ask for nothing.

    queries    query tokens of a sequence, at most
    window     keys that each sees; 0 without a window
    softcap    0 without one
    """

    queries: int = 1
    window: int = 0
    softcap: float = 0.0

    @classmethod
    def of(cls, spec: AttentionSpec) -> Asked:
        """What `spec` asks."""
        return cls(queries=max(spec.max_q_len, 1), window=spec.window or 0, softcap=spec.softcap or 0.0)

    def macros(self) -> dict[str, str | int]:
        """The macros of scores.cuh and, of shares.cuh, some."""
        return {"PA_QUERIES": self.queries, "PA_WINDOW_TOKENS": self.window, "PA_CAP": f"{float(self.softcap)!r}f"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crews:
    """How a kernel's warps share the work.

    rows      query rows of a part; `parts` cover those of a KV head
    crew      warps that share a ring and read the same tiles, each for `rows` / `crew` of the rows
    warps     of a CTA, of which there is at most one an SM
    tile      tokens of K and V
    stages    of a crew's ring, each a tile
    team      warps that share a segment of a sequence: a multiple of `crew` that divides `warps`
    copy      how tiles come: "bulk" copies of whole runs, or 16 bytes a lane, "async"
    opening, closing    as in Teams
    """

    rows: int
    parts: int
    crew: int
    warps: int
    tile: int
    stages: int
    team: int
    copy: str
    opening: str = "plain"
    closing: str = "fences"
    arrivals: ClassVar[int] = 1

    @property
    def heads(self) -> int:
        """As Teams has it."""
        return self.rows

    def macros(self) -> dict[str, str | int]:
        """The macros of shares.cuh, partials.cuh and ring.cuh."""
        return {
            "PA_ROWS": self.rows, "PA_CREW": self.crew, "PA_WARPS": self.warps, "PA_TILE": self.tile, "PA_STAGES": self.stages,
            "PA_TEAM": self.team, "PA_COPY": self.copy.upper(), "PA_AT_ONCE": 16,
        } | ends(self.opening, self.closing)


def plan_crews(shape: Shape, spec: AttentionSpec, num_sms: int, arch: str) -> Crews:
    """Choose for `spec` on a GPU of `num_sms` SMs of `arch`.

    The parameters override; 0 and "planned" leave it to us. As many warps as shared memory holds, up to 8. Raises Unsupported
    where nothing fits, teams do not consist of crews or CTAs of teams, or `arch` and the kernel have no such copies.
    """
    params = {"team": 0, "warps": 0, "stages": 0, "tile": 0, "copy": "planned", "solo": "planned", **spec.params}
    asked = Asked.of(spec)
    rows, parts, crew = plan_rows(shape, asked)
    copy = choose_copy(shape, arch) if params["copy"] == "planned" else params["copy"]
    if copy == "bulk" and not has_bulk_copies(arch):
        raise Unsupported(f"copy=bulk needs compute capability 9.0 or newer (got {arch})")
    if copy in fragments.LOADS:
        raise Unsupported(f"copy={copy} is for plain decode of 16-bit caches; leave it planned, or set bulk or async")
    if params["solo"] not in ("planned", 0):
        raise Unsupported(f"solo={params['solo']} is for plain decode of 16-bit caches; leave it planned")
    if params["tile"] not in TILES:
        raise Unsupported(f"tile must be 16 or 32 where warps multiply (got {params['tile']})")
    tile = params["tile"] or choose_tile(shape, rows // crew, count_share(spec, parts, crew, 32, num_sms * WARPS[0]))

    opening, closing = choose_ends(spec)

    def made(warps: int, stages: int) -> Crews:
        team = params["team"] or choose_team(spec, parts, crew, tile, num_sms, warps)
        return Crews(
            rows=rows, parts=parts, crew=crew, warps=warps, tile=tile, stages=stages, team=team, copy=copy, opening=opening,
            closing=closing,
        )

    numbers = [warps for warps in ((params["warps"],) if params["warps"] else WARPS) if warps >= crew]
    if not numbers:
        raise Unsupported(f"warps must be at least the {crew} that share a ring (got {params['warps']})")
    shared_limit = SHARED_LIMIT.get(arch, min(SHARED_LIMIT.values()))
    least = params["stages"] or 2
    depths = (count_stages(shape, crew, tile, least), least)  # as much for each warp, else for each ring
    candidates = [made(warps, stages) for stages in depths for warps in numbers]
    crews = fit(shape, asked, candidates, spec.max_num_seqs, shared_limit)
    if crews is None:
        taken = shared_bytes(shape, asked, candidates[-1], spec.max_num_seqs)
        raise Unsupported(f"shared memory must hold {taken + STATIC_BYTES} bytes a CTA (got {shared_limit}); set fewer stages")
    if crews.team > crews.warps or crews.warps % crews.team:
        raise Unsupported(f"team must divide the {crews.warps} warps of a CTA (got {crews.team})")
    if crews.team % crew:
        raise Unsupported(f"team must be a multiple of the {crew} warps that share a ring (got {crews.team})")
    return crews


def plan_rows(shape: Shape, asked: Asked) -> tuple[int, int, int]:
    """Query rows of a part, how many parts cover those of a KV head, and the warps of a crew.

    A warp's sums fit its registers with the query for ROWS_IN_REGISTERS, with the query in shared memory for twice as many.
    """
    total = shape.group * asked.queries
    most = ROWS_IN_REGISTERS if shape.head_dim <= 128 else ROWS_IN_REGISTERS // 2
    if total <= most:
        return total, 1, 1
    parts = math.ceil(total / (2 * most * CREWS[-1]))
    rows = math.ceil(total / parts)
    crew = next(crew for crew in CREWS if rows <= 2 * most * crew)
    rows = round_up(math.ceil(rows / crew), 8) * crew
    return rows, math.ceil(total / rows), crew


def choose_tile(shape: Shape, rows: int, share: float = math.inf) -> int:
    """As many bytes of 8-bit caches as of others, where a warp's rows leave registers for the scores, and shares have enough
    of such tiles to be equal."""
    return 32 if ITEMSIZE[shape.cache_dtype] == 1 and rows <= ROWS_IN_REGISTERS and share >= SHORT_SHARE else 16


def count_stages(shape: Shape, crew: int, tile: int, stages: int) -> int:
    """Of a ring that holds as much for each warp as `stages` of 16 tokens in 16 bits."""
    return stages * crew * 32 // (tile * ITEMSIZE[shape.cache_dtype])


def choose_team(spec: AttentionSpec, parts: int, crew: int, tile: int, num_sms: int, most: int) -> int:
    """As in tensor_core.py, by the tiles of a crew; but all warps also where rows are many or keys of 8 bits, all sequences are
    long, and warps work alone: docs/kernels.md."""
    half, share = max(min(most // 2, 4), crew), count_share(spec, parts, crew, tile, num_sms * most)
    whole = Grid.of(spec, parts, num_sms, most // half).holds_whole(spec)
    if share < (WHOLE_SHARE if whole and crew == 1 else LONG_SHARE):
        return most
    busy = spec.max_q_len > 1 or spec.kv_dtype is not None
    long = seen_tokens(spec, tile) >= LONG_SEQUENCE * most * tile
    return most if busy and crew == 1 and may_be_alike(spec) and long else half


def count_share(spec: AttentionSpec, parts: int, crew: int, tile: int, num_warps: int) -> float:
    """Tiles of a crew, at most: the pool, windows and lengths bound how much there is."""
    longest = seen_tokens(spec, tile)
    tiles = min(spec.max_num_seqs * math.ceil(longest / tile), math.ceil(spec.num_blocks * spec.block_size / tile))
    return tiles * spec.num_kv_heads * parts * crew / num_warps


def seen_tokens(spec: AttentionSpec, tile: int) -> int:
    """Tokens of the longest sequence that some query token sees, as far as a spec tells, in whole tiles."""
    longest = longest_of(spec)
    return longest if spec.window is None else min(longest, spec.window + spec.max_q_len - 1 + tile)


def fit(shape: Shape, asked: Asked, candidates: Iterable[Crews], max_num_seqs: int, shared_limit: int) -> Crews | None:
    """The first for which shared memory has room."""
    room = shared_limit - STATIC_BYTES
    return next((crews for crews in candidates if shared_bytes(shape, asked, crews, max_num_seqs) <= room), None)


def cta_bytes(shape: Shape, crews: Crews) -> int:
    """A CTA's rings, partials and queries in shared memory."""
    row = row_bytes(shape)
    pitch = row if shape.layout == HND_SWIZZLED.name or row // 16 % 2 else row + 16
    rows = crews.rows // crews.crew  # of a warp
    partials = round_up((rows if rows <= 16 else 8) * (4 * (shape.head_dim + 4) + 8), 16)
    in_registers = math.ceil(rows / 8) * (shape.head_dim // 16) <= ROWS_IN_REGISTERS
    queries = 0 if in_registers else round_up(crews.rows * (2 * shape.head_dim + 16 + 4), 16)
    rings = crews.warps // crews.crew * crews.stages * 2 * crews.tile * pitch
    return rings + crews.warps * partials + crews.warps // crews.team * queries


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return math.ceil(number / multiple) * multiple


def shared_bytes(shape: Shape, asked: Asked, crews: Crews, max_num_seqs: int) -> int:
    """What a CTA takes, with the list of sequences."""
    return cta_bytes(shape, crews) + list_bytes(asked, max_num_seqs)


def list_bytes(asked: Asked, max_num_seqs: int) -> int:
    """The list of sequences of shares.cuh."""
    return (8 if asked.queries == 1 else 16) * (max_num_seqs + 1)


class GeneralTensorCore(TensorCore):
    """As TensorCore, by warps or by warpgroups."""

    def _choose(self, shape: Shape, arch: str) -> tuple[Any, Build]:
        from impls.cuda import verify  # it builds on this page

        asked, most = Asked.of(self._spec), self._spec.max_num_seqs
        if (warpgroups := verify.plan_warpgroups(shape, self._spec, arch)) is not None:
            self.ledger["tiles"] = str(warpgroups)
            return warpgroups, verify.build(shape, asked, warpgroups, most)
        crews = plan_crews(shape, self._spec, self._num_ctas, arch)
        return crews, build(shape, asked, crews, most)


def build(shape: Shape, asked: Asked, crews: Crews, max_num_seqs: int) -> Build:
    """The kernel for `shape`."""
    cta = {"PA_CTA_BYTES": cta_bytes(shape, crews)}
    return Build(
        source="tensor_core_general.cu", entry="tensor_core_general",
        macros=shape.macros() | asked.macros() | crews.macros() | cta,
        shared_bytes=shared_bytes(shape, asked, crews, max_num_seqs),
    )


def builds(arch: str) -> list[Build]:
    """Builds that stand for all, at most 256 sequences; as many warps as `arch` has room for, one `part`-th of them a team."""
    swizzled, bulk = HND_SWIZZLED.name, "bulk" if has_bulk_copies(arch) else "async"
    listed = (
        (Shape(layout=swizzled, features=("e4m3",)), Asked(), 2, bulk),
        (Shape(layout=swizzled, group=16, dtype="f16", features=("e5m2",), kv_scales="head"), Asked(), 1, bulk),
        (Shape(layout="NHD", group=8, features=("window", "sinks", "e4m3")), Asked(window=1024), 1, "async"),
        (Shape(layout=swizzled), Asked(queries=8), 2, bulk),
        (Shape(layout=swizzled, group=8), Asked(queries=8), 1, bulk),
        (Shape(layout=swizzled, group=8, features=("sinks", "e4m3")), Asked(queries=8), 1, bulk),
        (Shape(layout="NHD", group=8, head_dim=256, features=("window", "softcap")),
         Asked(queries=4, softcap=50.0, window=4096), 1, "async"),
        (Shape(layout=swizzled, features=("softcap", "alibi", "sinks")), Asked(softcap=30.0), 2, bulk),
        (Shape(layout="NHD", group=7, head_dim=80, block_size=24, dtype="f16", features=("e5m2",)), Asked(queries=3), 1, bulk),
    )
    made = [(shape, asked, fitting(shape, asked, part, arch, copy)) for shape, asked, part, copy in listed]
    shape, asked, crews = made[0]
    made.append((shape, asked, dataclasses.replace(crews, team=crews.warps, opening="quick", closing="release")))
    return [build(shape, asked, crews, 256) for shape, asked, crews in made]


def fitting(shape: Shape, asked: Asked, part: int, arch: str, copy: str = "") -> Crews:
    """Of all warps that shared memory has room for, one `part`-th a team."""
    rows, parts, crew = plan_rows(shape, asked)
    tile = choose_tile(shape, rows // crew)
    candidates = [
        Crews(
            rows=rows, parts=parts, crew=crew, warps=warps, tile=tile, stages=stages, team=max(warps // part, crew),
            copy=copy or choose_copy(shape, arch),
        )
        for stages in (count_stages(shape, crew, tile, 2), 2) for warps in WARPS if warps >= crew
    ]
    found = fit(shape, asked, candidates, 256, SHARED_LIMIT[arch])
    assert found is not None, f"{shape}, {asked} must fit a CTA of {arch}"
    return found

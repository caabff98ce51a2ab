"""cuda.tensor_core: persistent CTAs that take equal shares of all sequences, heads packed into the tensor cores' tile.

How the work is shared follows on the device from the lengths it finds there (shares.cuh); fixed at prepare, from
capacities, are only the number of CTAs and how many warps make a team. So a captured launch stays right when lengths change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from harness.ops.dtypes import ITEMSIZE
from harness.ops.layouts import HND_SWIZZLED
from harness.registry import Unsupported
from impls.cuda import fragments, jit
from impls.cuda.attention import Attention, Shape, load
from impls.cuda.builds import SHARED_LIMIT, Build, has_bulk_copies
from impls.cuda.parts import Parts
from impls.cuda.split_kv import count_sms
from impls.cuda.toolkit import why_older

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep
    from impls.cuda.prefix import Prefixes

TILE = 16            # tokens, the rows of an MMA tile
MAX_HEADS = 16       # query heads of a warp whose sums fit its registers; half of it above a head_dim of 128
LOAD_SHARE = 2       # tiles of a warp, of a CTA's eight, from which on loads to registers beat cp.async into a ring
LONG_SHARE = 48      # tiles of a warp, from which on the CTA's warps make two teams and not one
MANY = 8             # sequences of a CTA, from which on its warps make several teams, too
SHORT = 32           # tiles of a sequence, at most, on average, where short ones are left to single warps
SOLO = 16            # tiles of such a short one
EVEN_SHARE = 6       # tiles of a warp, from which on two teams are better, too, where shares are as many as fit the sequences
IDLE = 0.05          # of all teams, at most, that may go without work: for more heads side by side, then for whole sequences
SHORT_RUN = 1024     # bytes of adjacent tokens, below which 16 bytes a lane beat bulk copies
FEW_SEQS = 32        # that a warp lists: a quick opening
WARPS = (8, 4, 2, 1)  # of a CTA, the most that fit
STATIC_BYTES = 1024  # of shared memory, for barriers and the like

#: after what every attention kernel takes: sums, stats, arrived | lanes
OWN_SIGNATURE = "PPPi"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teams:
    """How a kernel's warps share the work.

    heads     query heads of a warp; `parts` warps, of different teams, share a larger group
    warps     of a CTA, of which there is at most one an SM
    stages    of a warp's ring, each a tile of K and V; 0 without one
    team      warps that share a segment of a sequence: a divisor of `warps`
    copy      how a warp's tiles come: to its ring by "bulk" copies of whole runs, or 16 bytes a lane, "async"; to registers by
              "load", or by "load_once", which leaves L2 first
    opening   how a launch begins: shares.cuh
    closing   how partials of other shares are counted: partials.cuh
    solo      tiles of a sequence, up to which one warp of a team takes it by itself; 0 for none
    arrivals  parts of a team that count the shares of a sequence, each for itself
    """

    heads: int
    parts: int
    warps: int
    stages: int
    team: int
    copy: str
    solo: int = 0
    opening: str = "plain"
    closing: str = "fences"
    arrivals: ClassVar[int] = 1

    def macros(self) -> dict[str, str | int]:
        """The macros of shares.cuh, partials.cuh and ring.cuh."""
        at_once = fragments.partials_at_once(self.warps) if self.copy in fragments.LOADS else 16
        return {
            "PA_ROWS": self.heads, "PA_WARPS": self.warps, "PA_STAGES": self.stages, "PA_TEAM": self.team,
            "PA_COPY": self.copy.upper(), "PA_AT_ONCE": at_once,
            "PA_QUERIES": 1, "PA_WINDOW_TOKENS": 0, "PA_CREW": 1, "PA_TILE": TILE,
        } | ({"PA_SOLO": self.solo} if self.solo else {}) | ends(self.opening, self.closing)


def plan_teams(shape: Shape, spec: AttentionSpec, num_sms: int, arch: str) -> Teams:
    """Choose for `spec` on a GPU of `num_sms` SMs of `arch`.

    The parameters override; 0 and "planned" leave it to us. As many warps as shared memory holds, up to 8, or, without rings,
    as registers do. Raises Unsupported where nothing fits, the team does not divide the warps, `arch` has no bulk copies to be
    asked for, or loads cannot read the layout.
    """
    params = {"team": 0, "warps": 0, "tile": 0, "stages": 0, "copy": "planned", "solo": "planned", **spec.params}
    parts = count_parts(shape)
    heads = math.ceil(shape.group / parts)
    share = count_tiles(spec, parts) / (num_sms * max(WARPS))
    copy, stages = params["copy"], params["stages"] or 2
    if copy == "planned":
        copy = choose_copy(shape, arch, parts, share, stages)
    if copy == "bulk" and not has_bulk_copies(arch):
        raise Unsupported(f"copy=bulk needs compute capability 9.0 or newer (got {arch})")
    if params["tile"] not in (0, TILE):
        raise Unsupported(f"tile must be {TILE} for plain decode of 16-bit caches (got {params['tile']})")
    most: Sequence[int] = WARPS
    if copy in fragments.LOADS:
        fragments.refuse(shape, copy, stages)
        stages = 0
        if share >= LONG_SHARE:  # more of them only make a short one more to merge
            most = (fragments.count_warps(shape, heads), *WARPS)
    shared_limit, asked = SHARED_LIMIT.get(arch, min(SHARED_LIMIT.values())), params["warps"]

    def fitting(solo: int) -> int:
        return count_warps(shape, heads, stages, spec.max_num_seqs, shared_limit, (asked,) if asked else most, solo)

    solo = choose_solo(spec, parts, num_sms) if params["solo"] == "planned" else params["solo"]
    if params["solo"] == "planned" and fitting(solo) < fitting(0):
        solo = 0  # their list is not worth a warp
    warps = fitting(solo)
    if not warps:
        least = shared_bytes(shape, heads, asked or 1, stages, spec.max_num_seqs, solo)
        raise Unsupported(f"shared memory must hold {least + STATIC_BYTES} bytes a CTA (got {shared_limit}); set fewer stages")
    team = params["team"] or (warps if solo else choose_team(spec, parts, num_sms, warps, is_bulk=copy == "bulk"))
    if team > warps or warps % team:
        raise Unsupported(f"team must divide the {warps} warps of a CTA (got {team})")
    opening, closing = choose_ends(spec, solo)
    return Teams(
        heads=heads, parts=parts, warps=warps, stages=stages, team=team, copy=copy, solo=solo, opening=opening, closing=closing,
    )


def ends(opening: str, closing: str) -> dict[str, str | int]:
    """The macros of what shares.cuh and partials.cuh do at both ends of a launch, where it is not the plain way."""
    macros: dict[str, str | int] = {} if opening == "plain" else {"PA_OPENING": opening.upper()}
    return macros if closing == "fences" else macros | {"PA_CLOSING": closing.upper()}


def choose_ends(spec: AttentionSpec, solo: int = 0) -> tuple[str, str]:
    """How a launch begins, and how it ends: the quick way where sequences are few, as measured, docs/kernels.md."""
    params = {"opening": "planned", "closing": "planned", **spec.params}
    opening, closing = params["opening"], params["closing"]
    if solo and (opening == "quick" or closing == "release"):
        raise Unsupported(f"opening=quick and closing=release are for solo=0 (got solo={solo})")
    few = spec.max_num_seqs <= FEW_SEQS and not solo
    chosen = ("quick", "release") if few else ("plain", "fences")
    return chosen[0] if opening == "planned" else opening, chosen[1] if closing == "planned" else closing


def choose_copy(shape: Shape, arch: str, parts: int = 1, share: float = 0, stages: int = 2) -> str:
    """Bulk copies need runs of some length, which only a swizzled cache of not too small blocks has: rows of others are padded
    one by one.

    Plain rows come by loads to registers where that was measured to be faster, and from LOAD_SHARE tiles a warp on; what other
    parts of a group are to read again is not asked to leave L2.
    """
    if not has_bulk_copies(arch):
        return "async"
    if shape.layout == HND_SWIZZLED.name:
        return "bulk" if math.gcd(shape.block_size, TILE) * row_bytes(shape) >= SHORT_RUN else "async"
    if shape.head_dim != 128 or stages != 2 or share < LOAD_SHARE:  # measured at a head_dim of 128 only
        return "async"
    return "load_once" if parts == 1 else "load"


def count_warps(
    shape: Shape, heads: int, stages: int, max_num_seqs: int, shared_limit: int, numbers: Sequence[int] = WARPS, solo: int = 0
) -> int:
    """The first of `numbers` of warps for which shared memory has room; 0 where there is none."""
    room = shared_limit - STATIC_BYTES
    return next((n for n in numbers if shared_bytes(shape, heads, n, stages, max_num_seqs, solo) <= room), 0)


def count_parts(shape: Shape) -> int:
    """How many warps share a group."""
    return math.ceil(shape.group / (MAX_HEADS if shape.head_dim <= 128 else MAX_HEADS // 2))


def choose_team(spec: AttentionSpec, parts: int, num_sms: int, most: int, is_bulk: bool) -> int:
    """All warps of a CTA, up to `most`, where shares are short and of few sequences, else half of them, up to 4; as measured,
    docs/kernels.md."""
    half, share = max(min(most // 2, 4), 1), count_tiles(spec, parts) / (num_sms * most)
    if share >= LONG_SHARE or has_many(spec, parts, num_sms):
        return half
    one, two = (Grid.of(spec, parts, num_sms, teams) for teams in (1, most // half))
    even = two.holds_whole(spec) or (is_bulk and two.is_even(spec) and not one.holds_whole(spec))
    return half if even and share >= EVEN_SHARE else most


def choose_solo(spec: AttentionSpec, parts: int, num_sms: int) -> int:
    """Leave short sequences to single warps where a pool of this size says that many must be short, if all are there, and no
    end of a launch is asked for that is without them."""
    if spec.params.get("opening") == "quick" or spec.params.get("closing") == "release":
        return 0
    average = spec.num_blocks * spec.block_size / max(spec.max_num_seqs, 1)
    return SOLO if has_many(spec, parts, num_sms) and average <= SHORT * TILE else 0


def has_many(spec: AttentionSpec, parts: int, num_sms: int) -> bool:
    """Whether a CTA may have to begin and to end many sequences."""
    return spec.max_num_seqs * spec.num_kv_heads * parts >= MANY * num_sms


def count_tiles(spec: AttentionSpec, parts: int) -> int:
    """The most tiles of a step. The pool bounds how much there is in all: in a small one, few sequences are long."""
    longest = math.ceil(longest_of(spec) / TILE)
    tiles = min(spec.max_num_seqs * longest, math.ceil(spec.num_blocks * spec.block_size / TILE))
    return tiles * spec.num_kv_heads * parts


def longest_of(spec: AttentionSpec) -> int:
    """Tokens of a sequence, at most."""
    return min(spec.max_seq_len, spec.max_blocks_per_seq * spec.block_size)


def may_be_alike(spec: AttentionSpec) -> bool:
    """Whether about all sequences may be as long as the longest: a smaller pool is for few long ones."""
    return 2 * spec.num_blocks * spec.block_size >= spec.max_num_seqs * longest_of(spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """How many CTAs are launched, and what their teams are to them.

    lanes      parts of groups side by side
    columns    shares of a line: as many as teams allow, or, of at most IDLE fewer, so many that every share is whole sequences,
               or every sequence whole shares, if all are alike: then nothing is merged, or the less
    ctas       no more than have work: those without would hold SMs that others are better off on
    """

    lanes: int
    columns: int
    ctas: int

    @classmethod
    def of(cls, spec: AttentionSpec, parts: int, num_ctas: int, teams: int) -> Grid:
        """For up to `num_ctas` CTAs of `teams` teams each."""
        lanes = count_lanes(num_ctas * teams, spec.num_kv_heads * parts)
        most = num_ctas * teams // lanes
        columns = most
        if may_be_alike(spec):
            fewest = math.ceil((1 - IDLE) * most)
            fitting = (n for n in range(most, fewest - 1, -1) if n * lanes % teams == 0 and fit_evenly(n, spec.max_num_seqs))
            columns = next(fitting, most)
        return cls(lanes=lanes, columns=columns, ctas=math.ceil(columns * lanes / teams))

    def is_even(self, spec: AttentionSpec) -> bool:
        """Whether shares and sequences fit evenly, if all are alike."""
        return may_be_alike(spec) and fit_evenly(self.columns, spec.max_num_seqs)

    def holds_whole(self, spec: AttentionSpec) -> bool:
        """Whether shares hold whole sequences, if all are alike."""
        return may_be_alike(spec) and spec.max_num_seqs > 0 and spec.max_num_seqs % self.columns == 0


def fit_evenly(columns: int, num_seqs: int) -> bool:
    """Whether one is a multiple of the other."""
    return num_seqs > 0 and (num_seqs % columns == 0 or columns % num_seqs == 0)


def count_lanes(num_teams: int, num_heads: int) -> int:
    """How many parts teams take side by side: as many as leave no more than IDLE of the teams without work."""
    return max(lanes for lanes in range(1, num_heads + 1) if num_heads % lanes == 0 and num_teams % lanes <= IDLE * num_teams)


def row_bytes(shape: Shape) -> int:
    """Of a token's key, or its value, for one KV head."""
    return shape.head_dim * ITEMSIZE[shape.cache_dtype]


def warp_bytes(shape: Shape, heads: int, stages: int) -> int:
    """A warp's ring and partials in shared memory."""
    row = row_bytes(shape) + (0 if shape.layout == HND_SWIZZLED.name else 16)
    return stages * 2 * TILE * row + math.ceil(heads * (4 * (shape.head_dim + 4) + 8) / 16) * 16


def shared_bytes(shape: Shape, heads: int, warps: int, stages: int, max_num_seqs: int, solo: int = 0) -> int:
    """What all warps take, and the list of sequences, and that of those that are `solo`."""
    return warps * warp_bytes(shape, heads, stages) + (12 if solo else 8) * (max_num_seqs + 1)


class TensorCore(Attention):
    """At most one CTA an SM, as many whatever the step is."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        import torch

        from harness.guards import workspace
        from impls.cuda import prefix  # it builds on this page

        asked, shape = spec.params.get("ctas", 0), Shape.of(spec)
        num_sms = count_sms(spec.device)
        if asked > num_sms:
            raise Unsupported(f"ctas must be at most one for each of the {num_sms} SMs (got {asked})")
        self._num_ctas = asked or num_sms
        self._teams, built = self._choose(shape, jit.arch_of(spec.device))
        self._kernel, resources = load(built, spec.device, shape.signature + OWN_SIGNATURE)
        self.kernels = (resources,)

        num_heads, teams = spec.num_kv_heads * self._teams.parts, self._teams.warps // self._teams.team
        grid = Grid.of(spec, self._teams.parts, self._num_ctas, teams)
        num_ctas, self._lanes = asked or grid.ctas, grid.lanes
        num_teams = num_ctas * teams
        rows = num_teams * 2 * self._teams.heads  # two ends of every share
        counters = max(spec.max_num_seqs * num_heads * self._teams.arrivals, 1)
        self._workspace = workspace(rows * (spec.head_dim + 2), torch.float32, spec.device)
        self._arrived = workspace(counters, torch.int32, spec.device).zero_()  # every launch leaves zeros
        self.workspace_bytes = self._own_bytes = 4 * (self._workspace.numel() + counters)
        sums = self._workspace.data_ptr()
        own = (sums, sums + 4 * rows * spec.head_dim, self._arrived.data_ptr(), self._lanes)
        self._parts = Parts(self._kernel.parameters.buffer, shape, own)
        self._grid, self._threads = (num_ctas, 1, 1), 32 * self._teams.warps
        self.ledger["teams"] = f"{num_teams} of {self._teams.team} warps, {self._lanes} heads side by side"

        self._prefixes: Prefixes | None = None
        if prefix.may_share(spec):
            with contextlib.suppress(Unsupported):  # too many sequences for the lists of two kernels: each reads all of its own
                self._prefixes = prefix.Prefixes(spec, self._num_ctas, jit.arch_of(spec.device))
        self._shares = False

    def _choose(self, shape: Shape, arch: str) -> tuple[Any, Build]:
        """How warps share the work, and the kernel."""
        teams = plan_teams(shape, self._spec, self._num_ctas, arch)
        return teams, build(shape, teams, self._spec.max_num_seqs)

    def plan(self, step: AttentionStep) -> None:
        """As Attention.plan; and find prefixes that are worth sharing."""
        super().plan(step)
        self._parts.plan(*self._planned)
        if self._prefixes is None:
            return
        self._shares = self._prefixes.plan(step)
        if self._shares:
            self.kernels = (*self.kernels[:1], *self._prefixes.resources)
            self.workspace_bytes = self._own_bytes + self._prefixes.workspace_bytes
            self.ledger["prefixes"] = self._prefixes.remark

    def _pack(self, pointers: tuple[int, ...], tail: tuple[Any, ...]) -> tuple[bytes, ...]:
        return self._parts.pack(pointers, tail)

    def _submit(self, stream: int, pointers: tuple[int, ...], tail: tuple[Any, ...], packed: tuple[bytes, ...]) -> None:
        if self._shares:
            super()._submit(stream, pointers, tail, packed)
            return
        self._parts.pointers[:], self._parts.verified[:] = packed
        self._kernel.enqueue(self._grid, self._threads, stream)

    def _enqueue(self, stream: int, values: tuple[Any, ...]) -> None:
        """Of shared prefixes."""
        assert self._prefixes is not None
        self._prefixes.enqueue(stream, values)


def build(shape: Shape, teams: Teams, max_num_seqs: int) -> Build:
    """The kernel for `shape`."""
    warp = {"PA_WARP_BYTES": warp_bytes(shape, teams.heads, teams.stages)}
    return Build(
        source="tensor_core.cu", entry="tensor_core", macros=shape.macros() | teams.macros() | warp,
        shared_bytes=shared_bytes(shape, teams.heads, teams.warps, teams.stages, max_num_seqs, teams.solo),
    )


def why_no_tensor_cores(device_kind: str) -> str | None:
    """Return why this machine cannot run the kernel, or None."""
    return why_older(device_kind, (8, 0), "mma of bf16")


def builds(arch: str) -> list[Build]:
    """Builds that stand for all, at most 256 sequences; as many warps as `arch` has room for, one `part`-th of them a team."""
    swizzled, bulk = HND_SWIZZLED.name, "bulk" if has_bulk_copies(arch) else "async"
    loads = (
        (Shape(), 12, 4, "load", 0),
        (Shape(layout="NHD", group=8), 12, 12, "load_once", 0),
        (Shape(layout="NHD", group=8), 12, 4, "load_once", SOLO),
        (Shape(layout="NHD", group=16), 8, 4, "load", 0),
        (Shape(group=8, head_dim=64, block_size=8, dtype="f16"), 16, 4, "load", 0),
        (Shape(layout="NHD", group=7, head_dim=80, block_size=24), 8, 4, "load", 0),
        (Shape(layout="NHD", group=8, head_dim=256, block_size=1), 8, 8, "load", 0),
    )
    listed = (
        (Shape(layout=swizzled), 8, bulk, 0),
        (Shape(layout=swizzled), 2, bulk, SOLO),
        (Shape(layout=swizzled, group=8), 1, bulk, 0),
        (Shape(layout=swizzled, group=16, head_dim=64, block_size=8, dtype="f16"), 4, bulk, 0),
        (Shape(layout=swizzled, group=1, head_dim=96, block_size=1), 2, bulk, 0),
        (Shape(layout=swizzled, block_size=1), 1, "async", 0),
        (Shape(group=8), 8, "async", 0),
        (Shape(layout="NHD", group=16), 1, "async", SOLO),
        (Shape(layout="NHD", group=7, head_dim=80, block_size=24, dtype="f16"), 8, bulk, 0),
        (Shape(group=16, head_dim=256), 1, "async", 0),
    )
    short = ((Shape(layout=swizzled, group=8), bulk), (Shape(), "async"), (Shape(group=16, block_size=24), "async"))
    made = []
    for shape, part, copy, solo in listed:
        parts = count_parts(shape)
        heads = math.ceil(shape.group / parts)
        warps = count_warps(shape, heads, 2, 256, SHARED_LIMIT[arch])
        teams = Teams(heads=heads, parts=parts, warps=warps, stages=2, team=max(warps // part, 1), copy=copy, solo=solo)
        made.append(build(shape, teams, 256))
    for shape, warps, team, copy, solo in loads:
        teams = Teams(heads=shape.group, parts=1, warps=warps, stages=0, team=team, copy=copy, solo=solo)
        made.append(build(shape, teams, 256))
    for shape, copy in short:
        warps = count_warps(shape, shape.group, 2, 256, SHARED_LIMIT[arch])
        teams = Teams(
            heads=shape.group, parts=1, warps=warps, stages=2, team=warps, copy=copy, opening="quick", closing="release",
        )
        made.append(build(shape, teams, 256))
    return made


def prepare(spec: AttentionSpec) -> TensorCore:
    """Plain decode by tensor_core.cu, all else by tensor_core_general.cu."""
    if spec.max_q_len <= 1 and not spec.features and spec.params.get("products") != "warpgroups":
        return TensorCore(spec)
    from impls.cuda.tensor_core_general import GeneralTensorCore

    return GeneralTensorCore(spec)

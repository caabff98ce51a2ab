"""Prefixes that several sequences share, and the two kernels that read them once. See prefix.cuh.

A step's tables, on the host, say which runs of blocks several sequences have at the same place (runs.py). `Prefixes` compiles
the kernels when it first finds any that are worth a launch of their own, and tells them by arrays on the device, which a
captured launch reads anew. Where nothing is shared, nothing of this page is launched.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.guards import workspace
from harness.ops.dtypes import ITEMSIZE
from harness.ops.layouts import HND_SWIZZLED
from harness.registry import Unsupported
from impls.cuda import prefill, verify
from impls.cuda import tensor_core_general as general
from impls.cuda.attention import Shape, load
from impls.cuda.builds import SHARED_LIMIT, Build, has_bulk_copies
from impls.cuda.prefill import Tiles, plan_tiles
from impls.cuda.runs import WASTE, Cut, Listing, Run, find_runs, list_pieces
from impls.cuda.tensor_core import OWN_SIGNATURE, STATIC_BYTES, WARPS, choose_copy, count_lanes
from impls.cuda.verify import Warpgroups

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

LAUNCH_BYTES = 4e7  # what memory gives in the time of one more launch, with its first and last bytes
PREFIX = "@PPPPPPP"  # `Prefix` of prefix.cuh
NOTHING: tuple[list[Run], list[int]] = ([], [])  # is shared
HEAD_DIMS = {64, 128, 256}  # that warpgroups take, as in cuda.prefill
ALONE = ("team", "warps", "stages", "copy", "solo", "opening", "closing")  # parameters of launches that share nothing
UNASKED = (None, 0, "planned", "plain", "fences")


def may_share(spec: AttentionSpec) -> bool:
    """Whether sharing could ever pay, or is asked for, and all rows would see all of a run, whatever their positions."""
    if spec.window or spec.alibi or spec.max_num_seqs < 2:
        return False
    longest = min(spec.max_seq_len, spec.max_blocks_per_seq * spec.block_size)
    pays = longest * (spec.max_num_seqs - 1 - WASTE) * token_bytes(spec) > LAUNCH_BYTES
    return {"planned": pays, "always": True, "never": False}[spec.params.get("prefix", "planned")]


def token_bytes(spec: AttentionSpec) -> int:
    """K and V of one token, all heads."""
    return 2 * spec.num_kv_heads * spec.head_dim * ITEMSIZE[spec.cache_dtype]


def plan_pieces(shape: Shape, arch: str) -> Tiles | None:
    """The tiles of warpgroups, or None where warps do it; sinks are the second launch's."""
    if arch != prefill.ARCH or shape.head_dim not in HEAD_DIMS or set(shape.features) - {"sinks"}:
        return None
    tiles = plan_tiles(shape.head_dim, {})
    return tiles if shape.group <= tiles.rows else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel with its workspace. `extra` are its parameters after `Prefix`."""

    launcher: Any
    resources: dict[str, Any]
    threads: int
    extra: tuple[int, ...]
    held: tuple[Any, ...]


class Prefixes:
    """What a step's sequences share, and the launches that read it once."""

    def __init__(self, spec: AttentionSpec, num_ctas: int, arch: str) -> None:
        self._spec, self._num_ctas, self._arch, self._shape = spec, num_ctas, arch, Shape.of(spec)
        tile, own = spec.params.get("tile", 0), verify.plan_warpgroups(self._shape, spec, arch) if spec.max_q_len > 1 else None
        lists = []
        if own is None:
            plain = {"opening": "plain", "closing": "fences", "tile": tile if tile in general.TILES else 0}
            spec_of_crews = dataclasses.replace(spec, params=plain)
            own = general.plan_crews(self._shape, spec_of_crews, num_ctas, arch)
            lists.append((own, spec.max_num_seqs))
        self._own = own
        self._unit = math.lcm(spec.block_size, own.tile)
        self._tiles = plan_pieces(self._shape, arch)
        if self._tiles is None:
            self._crews = plan_shared(self._shape, spec, arch)
            self._cut = Cut(at_once=max(self._crews.rows // spec.group, 1))
            self._unit = math.lcm(self._unit, self._crews.tile)
            lists.append((self._crews, self._cut.most_pieces(spec.max_num_tokens, spec.max_num_seqs)))
        else:
            columns = max(num_ctas // spec.num_kv_heads, 1)
            self._cut = Cut(at_once=self._tiles.rows // spec.group, tile=self._tiles.tile, columns=columns)
        for crews, count in lists:
            if (taken := list_bytes(count) + general.cta_bytes(self._shape, crews) + STATIC_BYTES) > shared_limit(arch):
                raise Unsupported(f"shared memory must hold {taken} bytes a CTA (got {shared_limit(arch)})")
        self._most_pieces = self._cut.most_pieces(spec.max_num_tokens, spec.max_num_seqs)
        self._most_places = self._cut.most_places(spec.max_num_tokens)
        self._always = spec.params.get("prefix") == "always"
        self._kernels: tuple[Kernel, Kernel] | None = None
        self.runs: list[Run] = []
        self._told = NOTHING
        self._apart = b""

    @property
    def workspace_bytes(self) -> int:
        """Taken when something was first shared."""
        if self._kernels is None:
            return 0
        tensors = [self._sums, self._table, *(tensor for kernel in self._kernels for tensor in kernel.held)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def resources(self) -> list[dict[str, Any]]:
        """Of the compiled kernels."""
        return [kernel.resources for kernel in self._kernels or ()]

    @property
    def remark(self) -> str:
        """For a ledger: what is read once, and what is set that these kernels plan for themselves."""
        read = f"{len(self.runs)} runs of blocks read once"
        alone = [name for name in ALONE if name != "stages" or not isinstance(self._own, Warpgroups)]
        given = [(name, self._spec.params.get(name)) for name in alone]
        asked = [f"{name}={value}" for name, value in given if value not in UNASKED]
        return f"{read}, by two launches not told of {', '.join(asked)}" if asked else read

    def plan(self, step: AttentionStep) -> bool:
        """Find what is shared, and tell the kernels. Returns whether they are to be launched."""
        self.runs = [] if self._begin_apart(step.host_block_tables) else self._find(step)
        if self.runs and self._kernels is None:
            self._prepare()
        shared = (self.runs, step.host_query_start_loc.tolist()) if self.runs else NOTHING
        if shared != self._told:  # nothing, too: a captured launch of before reads it
            self._tell(list_pieces(self.runs, step.host_query_start_loc, self._cut))
            self._told = shared
        return bool(self.runs)

    def _begin_apart(self, tables: np.ndarray) -> bool:
        """Whether no two sequences begin with the same block: nearly always, and mostly they are those of the step before."""
        if not tables.size:
            return True
        first = tables[:, 0].tobytes()
        if first != self._apart:
            ids = tables[:, 0].tolist()
            if len(set(ids)) < len(ids):
                return False
            self._apart = first
        return True

    def _find(self, step: AttentionStep) -> list[Run]:
        tables, seq_lens = step.host_block_tables, step.host_seq_lens
        q_lens = np.diff(step.host_query_start_loc)
        most = np.where(q_lens > 0, np.minimum(seq_lens - q_lens, tables.shape[1] * self._spec.block_size), 0)
        ids = tables[most >= self._unit, 0].tolist()
        if len(set(ids)) == len(ids):  # those that begin alike are empty, or pad a batch
            return []
        runs = find_runs(tables, np.maximum(most, 0).tolist(), self._spec.block_size, self._unit, self._always)
        pays = sum(run.saved for run in runs) * token_bytes(self._spec) > LAUNCH_BYTES
        return runs if pays or self._always else []

    def _prepare(self) -> None:
        import torch

        spec = self._spec
        self._rows = self._most_places * spec.num_q_heads
        self._sums = workspace(self._rows * (spec.head_dim + 2), torch.float32, spec.device)
        self._sizes = {
            "starts": self._most_pieces + 1, "ends": self._most_pieces, "firsts": self._most_pieces,
            "table_rows": self._most_pieces, "tokens": self._most_places, "own_firsts": spec.max_num_seqs,
            "lists": spec.max_num_seqs + 1, "left": self._most_places,
        }
        self._table = workspace(sum(self._sizes.values()), torch.int32, spec.device)
        self._point()
        own = self._of_teams(general.Asked.of(spec), self._own, "OWN", spec.max_num_seqs)
        if self._tiles is not None:
            self._kernels = (self._of_tiles(self._tiles), own)
        else:
            runs = general.Asked(queries=self._cut.at_once, softcap=spec.softcap or 0.0)
            self._kernels = (self._of_teams(runs, self._crews, "SHARED", self._most_pieces), own)

    def _load(self, built: Build, extra: str) -> tuple[Any, dict[str, Any]]:
        return load(built, self._spec.device, f"{self._shape.signature}{struct.calcsize(PREFIX)}s{extra}")

    def _of_tiles(self, tiles: Tiles) -> Kernel:
        import torch

        launcher, resources = self._load(build_pieces(self._shape, tiles), "P")
        counters = workspace(2, torch.int32, self._spec.device).zero_()  # every launch leaves zeros
        return Kernel(
            launcher=launcher, resources=resources, threads=tiles.threads, extra=(counters.data_ptr(),), held=(counters,)
        )

    def _of_teams(self, asked: general.Asked, teams: general.Crews | Warpgroups, role: str, count: int) -> Kernel:
        import torch

        spec = self._spec
        built = build(self._shape, asked, teams, role, count)
        early = role == "OWN" and has_bulk_copies(self._arch)  # both came with sm_90
        launcher, resources = self._load(dataclasses.replace(built, early=early), OWN_SIGNATURE)
        num_teams = self._num_ctas * teams.warps // teams.team
        parts, rows = spec.num_kv_heads * teams.parts, num_teams * 2 * teams.heads
        partials = workspace(rows * (spec.head_dim + 2), torch.float32, spec.device)
        arrived = workspace(max(count * parts * teams.arrivals, 1), torch.int32, spec.device).zero_()
        sums = partials.data_ptr()
        extra = (sums, sums + 4 * rows * spec.head_dim, arrived.data_ptr(), count_lanes(num_teams, parts))
        return Kernel(
            launcher=launcher, resources=resources, threads=32 * teams.warps, extra=extra, held=(partials, arrived)
        )

    def _tell(self, listing: Listing) -> None:
        """Write the listing to the device, on the current stream. What is past its end repeats the last entry."""
        import torch

        parts = []
        for name, size in self._sizes.items():
            part = getattr(listing, name)
            parts.append(np.pad(part, (0, size - len(part)), mode="edge" if name in ("starts", "lists") else "constant"))
        self._table.copy_(torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="same_kind")))

    def _point(self) -> None:
        """Where each array is."""
        offsets = np.cumsum([0, *self._sizes.values()]).tolist()
        at = {name: self._table.data_ptr() + 4 * offset for name, offset in zip(self._sizes, offsets, strict=False)}
        sums = self._sums.data_ptr()
        rest = (at["table_rows"], at["tokens"], at["lists"], at["left"], sums, sums + 4 * self._rows * self._spec.head_dim)
        self._of_pieces = (at["starts"], at["ends"], self._most_pieces)  # in place of query_start_loc, seq_lens and num_seqs
        self._shared_prefix = struct.pack(PREFIX, at["firsts"], *rest)
        self._own_prefix = struct.pack(PREFIX, at["own_firsts"], *rest)

    def enqueue(self, stream: int, values: tuple[Any, ...]) -> None:
        """Launch both, with `values` as Attention._enqueue has them."""
        assert self._kernels is not None
        shared, own = self._kernels
        grid = (self._num_ctas, 1, 1)
        of_pieces = (*values[:6], *self._of_pieces, *values[9:])
        shared.launcher(grid, shared.threads, stream, *of_pieces, self._shared_prefix, *shared.extra)
        own.launcher(grid, own.threads, stream, *values, self._own_prefix, *own.extra)


def plan_shared(shape: Shape, spec: AttentionSpec, arch: str) -> general.Crews:
    """As many rows as a CTA holds, all its warps one team."""
    most = 2 * general.ROWS_IN_REGISTERS * general.CREWS[-1] // (1 if shape.head_dim <= 128 else 2)
    queries = max(min(most // shape.group, spec.max_num_tokens), 1)
    rows, parts, crew = general.plan_rows(shape, general.Asked(queries=queries))
    tile = spec.params.get("tile", 0)
    if tile not in general.TILES[1:]:
        tile = general.choose_tile(shape, rows // crew)
    copy = choose_copy(shape, arch)
    candidates = [
        general.Crews(rows=rows, parts=parts, crew=crew, warps=warps, tile=tile, stages=stages, team=warps, copy=copy)
        for stages in (general.count_stages(shape, crew, tile, 2), 2) for warps in WARPS if warps >= crew
    ]
    listed = Cut(at_once=max(rows // shape.group, 1)).most_pieces(spec.max_num_tokens, spec.max_num_seqs)
    found = general.fit(shape, general.Asked(queries=max(queries, 2)), candidates, listed, shared_limit(arch))
    if found is None:
        raise Unsupported(f"shared memory must hold a list of {listed} runs beside a ring (got {shared_limit(arch)} bytes)")
    return found


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a CTA may take."""
    return SHARED_LIMIT.get(arch, min(SHARED_LIMIT.values()))


def list_bytes(count: int) -> int:
    """The list of so many pieces or sequences."""
    return 16 * (count + 1)


def build(shape: Shape, asked: general.Asked, teams: general.Crews | Warpgroups, role: str, count: int) -> Build:
    """The kernel of such teams in one of its roles, for `count` pieces or sequences."""
    if isinstance(teams, Warpgroups):
        built, taken = verify.build(shape, asked, teams, count), verify.cta_bytes(shape, teams)
    else:
        built, taken = general.build(shape, asked, teams, count), general.cta_bytes(shape, teams)
    return dataclasses.replace(built, macros={**built.macros, "PA_ROLE": role}, shared_bytes=taken + list_bytes(count))


def build_pieces(shape: Shape, tiles: Tiles) -> Build:
    """The kernel of warpgroups."""
    return dataclasses.replace(prefill.build(shape, tiles), source="prefix.cu", entry="prefix_pieces")


def builds(arch: str) -> list[Build]:
    """Builds that stand for all: Llama 3 8B, 64 sequences."""
    made = []
    for features in ((), ("e4m3",)):
        shape = Shape(layout=HND_SWIZZLED.name, features=features)
        made += [
            build(shape, general.Asked(queries=32), general.fitting(shape, general.Asked(queries=32), 1, arch), "SHARED", 200),
            build(shape, general.Asked(), general.fitting(shape, general.Asked(), 2, arch), "OWN", 64),
        ]
    shapes = (
        Shape(layout=HND_SWIZZLED.name), Shape(layout="NHD", group=7, dtype="f16", block_size=1, features=("sinks",)),
        Shape(head_dim=64, group=8), Shape(head_dim=256, group=2, layout="NHD"),
    )
    return made + [build_pieces(shape, tiles) for shape in shapes if (tiles := plan_pieces(shape, arch))]

"""Prefixes that several sequences share, found on block ids, and the two kernels that read them once. See prefix.cuh.

A step's tables, on the host, say which runs of blocks several sequences have at the same place. `find_runs` takes those that
are worth a launch of their own; `Prefixes` compiles the kernels when it first finds any, and tells them by arrays on the
device, which a captured launch reads anew. Where nothing is shared, nothing of this page is launched.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.guards import workspace
from harness.ops.dtypes import ITEMSIZE
from harness.registry import Unsupported
from impls.cuda import tensor_core_general as general
from impls.cuda.attention import Shape, load
from impls.cuda.builds import SHARED_LIMIT, Build
from impls.cuda.tensor_core import OWN_SIGNATURE, STATIC_BYTES, WARPS, choose_copy, count_lanes

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

MAX_DEPTH = 3        # runs that a sequence may have, one after another
LAUNCH_BYTES = 4e7   # what memory gives in the time of one more launch, with its first and last bytes
WASTE = 1.5          # what reading a run costs more than its bytes: few sequences leave warps without rows
PREFIX = "@PPPPPPq"  # `Prefix` of prefix.cuh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Tokens begin .. end - 1 of `seqs`, whose tables are the same there; `depth` runs come before it."""

    seqs: tuple[int, ...]
    begin: int
    end: int
    depth: int

    @property
    def saved(self) -> float:
        """Tokens that are not read, less what it costs."""
        return (self.end - self.begin) * (len(self.seqs) - 1 - WASTE)


def find_runs(tables: np.ndarray, most: Sequence[int], block_size: int, unit: int, always: bool = False) -> list[Run]:
    """Find runs of shared blocks that are worth it.

    tables    [num_seqs, max_blocks_per_seq] block ids
    most      tokens of each sequence that all of its query tokens see; no run goes further
    unit      tokens of which a run is a whole number; a multiple of block_size
    always    any run is worth it

    Runs of a sequence follow one another from its first token on.
    """
    blocks = unit // block_size
    limits = np.asarray(most) // unit * blocks
    found: list[Run] = []

    def visit(seqs: np.ndarray, begin: int, reached: int, depth: int) -> None:
        """`seqs` have the same blocks up to `reached`, and runs up to `begin`."""
        for members in _alike(tables, seqs[limits[seqs] > reached], reached):
            end = reached + _common(tables[members, reached : int(limits[members].min())]) // blocks * blocks
            if end == reached:
                continue
            run = Run(seqs=tuple(members.tolist()), begin=begin * block_size, end=end * block_size, depth=depth)
            taken = always or run.saved > 0
            if taken:
                found.append(run)
            if depth + taken < MAX_DEPTH:
                visit(members, end if taken else begin, end, depth + taken)

    visit(np.arange(len(tables)), 0, 0, 0)
    return found


def _alike(tables: np.ndarray, seqs: np.ndarray, at: int) -> Iterator[np.ndarray]:
    """Those of `seqs`, two at least, whose tables have the same block there."""
    if len(seqs) < 2:
        return
    order = seqs[np.argsort(tables[seqs, at], kind="stable")]
    ids = tables[order, at]
    for members in np.split(order, np.flatnonzero(ids[1:] != ids[:-1]) + 1):
        if len(members) > 1:
            yield members


def _common(rows: np.ndarray) -> int:
    """How many first columns are the same in all rows."""
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else rows.shape[1]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel with its workspace. `extra` are the values of OWN_SIGNATURE."""

    launcher: Any
    resources: dict[str, Any]
    threads: int
    extra: tuple[int, ...]
    held: tuple[Any, ...]


class Prefixes:
    """What a step's sequences share, and the launches that read it once."""

    def __init__(self, spec: AttentionSpec, num_ctas: int, arch: str) -> None:
        self._spec, self._num_ctas, self._arch, self._shape = spec, num_ctas, arch, Shape.of(spec)
        self._crews = plan_shared(self._shape, spec, arch)
        own = dataclasses.replace(spec, params={name: spec.params[name] for name in ("tile",) if name in spec.params})
        self._own_crews = general.plan_crews(self._shape, own, num_ctas, arch)
        self._at_once = max(self._crews.rows // spec.group, 1)  # query tokens of a run that a CTA's rows hold
        self._unit = math.lcm(spec.block_size, self._crews.tile, self._own_crews.tile)
        self._most_parts = MAX_DEPTH * (math.ceil(spec.max_num_tokens / self._at_once) + spec.max_num_seqs // 2)
        for crews, count in ((self._crews, self._most_parts), (self._own_crews, spec.max_num_seqs)):
            if (taken := list_bytes(count) + general.cta_bytes(self._shape, crews) + STATIC_BYTES) > shared_limit(arch):
                raise Unsupported(f"shared memory must hold {taken} bytes a CTA (got {shared_limit(arch)})")
        self._always = spec.params.get("prefix") == "always"
        self._kernels: tuple[Kernel, Kernel] | None = None
        self.runs: list[Run] = []

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

    def plan(self, step: AttentionStep) -> bool:
        """Find what is shared, and tell the kernels. Returns whether they are to be launched."""
        was_shared = bool(self.runs)
        self.runs = self._find(step)
        if self.runs and self._kernels is None:
            self._prepare()
        if self.runs or was_shared:  # a captured launch of before reads that nothing is shared
            self._tell(step)
        return bool(self.runs)

    def _find(self, step: AttentionStep) -> list[Run]:
        tables, seq_lens = step.host_block_tables, step.host_seq_lens
        if len(tables) < 2 or not tables.shape[1]:
            return []
        first = np.sort(tables[seq_lens > 0, 0])
        if not (first[1:] == first[:-1]).any():  # nearly always: no two sequences begin alike
            return []
        q_lens = np.diff(step.host_query_start_loc)
        most = np.where(q_lens > 0, np.minimum(seq_lens - q_lens, tables.shape[1] * self._spec.block_size), 0)
        runs = find_runs(tables, np.maximum(most, 0).tolist(), self._spec.block_size, self._unit, self._always)
        pays = sum(run.saved for run in runs) * token_bytes(self._spec) > LAUNCH_BYTES
        return runs if pays or self._always else []

    def _prepare(self) -> None:
        import torch

        spec = self._spec
        self._depth_rows = spec.max_num_tokens * spec.num_q_heads
        rows = MAX_DEPTH * self._depth_rows
        self._sums = workspace(rows * (spec.head_dim + 2), torch.float32, spec.device)
        size = 5 * self._most_parts + 1 + MAX_DEPTH * spec.max_num_tokens + 2 * spec.max_num_seqs
        self._table = workspace(size, torch.int32, spec.device)
        runs = general.Asked(queries=self._at_once, softcap=spec.softcap or 0.0)
        self._kernels = (
            self._kernel(runs, self._crews, "SHARED", self._most_parts),
            self._kernel(general.Asked.of(spec), self._own_crews, "OWN", spec.max_num_seqs),
        )

    def _kernel(self, asked: general.Asked, crews: general.Crews, role: str, count: int) -> Kernel:
        import torch

        spec = self._spec
        built = build(self._shape, asked, crews, role, count)
        launcher, resources = load(built, spec.device, f"{self._shape.signature}{struct.calcsize(PREFIX)}s{OWN_SIGNATURE}")
        num_teams = self._num_ctas * crews.warps // crews.team
        parts, rows = spec.num_kv_heads * crews.parts, num_teams * 2 * crews.rows
        partials = workspace(rows * (spec.head_dim + 2), torch.float32, spec.device)
        arrived = workspace(max(count * parts, 1), torch.int32, spec.device).zero_()
        sums = partials.data_ptr()
        extra = (sums, sums + 4 * rows * spec.head_dim, arrived.data_ptr(), count_lanes(num_teams, parts))
        return Kernel(
            launcher=launcher, resources=resources, threads=32 * crews.warps, extra=extra, held=(partials, arrived)
        )

    def _tell(self, step: AttentionStep) -> None:
        """Write the arrays of prefix.cuh to the device, on the current stream."""
        import torch

        spec, count = self._spec, self._most_parts
        starts, tokens = [0], []
        parts: list[tuple[int, int, int, int]] = []
        own = np.zeros((2, spec.max_num_seqs), np.int32)
        for run in self.runs:
            members = list(run.seqs)
            own[0, members], own[1, members] = run.end, run.depth + 1
            queries = np.concatenate([np.arange(*step.host_query_start_loc[seq : seq + 2]) for seq in run.seqs])
            for begin in range(0, len(queries), self._at_once):
                part = queries[begin : begin + self._at_once]
                tokens.append(part)
                starts.append(starts[-1] + len(part))
                parts.append((run.end, run.begin, run.seqs[0], run.depth))
        begins = np.full(count + 1, starts[-1], np.int32)
        begins[: len(starts)] = starts
        columns = np.zeros((4, count), np.int32)
        if parts:
            columns[:, : len(parts)] = np.array(parts, np.int32).T
        listed = np.zeros(MAX_DEPTH * spec.max_num_tokens, np.int32)
        listed[: starts[-1]] = np.concatenate(tokens) if tokens else 0
        self._table.copy_(torch.from_numpy(np.concatenate([begins, columns.ravel(), listed, own.ravel()])))
        self._point()

    def _point(self) -> None:
        """Where each array is."""
        spec, count, at = self._spec, self._most_parts, self._table.data_ptr()
        ends = at + 4 * (count + 1)
        firsts, table_rows, depths, tokens = (ends + 4 * count * i for i in range(1, 5))
        own_firsts = tokens + 4 * MAX_DEPTH * spec.max_num_tokens
        own_depths = own_firsts + 4 * spec.max_num_seqs
        sums = self._sums.data_ptr()
        results = (sums, sums + 4 * MAX_DEPTH * self._depth_rows * spec.head_dim, self._depth_rows)
        self._runs_of = (at, ends, count)  # in place of query_start_loc, seq_lens and num_seqs
        self._shared_prefix = struct.pack(PREFIX, firsts, table_rows, depths, tokens, *results)
        self._own_prefix = struct.pack(PREFIX, own_firsts, 0, own_depths, 0, *results)

    def enqueue(self, stream: int, values: tuple[Any, ...]) -> None:
        """Launch both, with `values` as Attention._enqueue has them."""
        assert self._kernels is not None
        shared, own = self._kernels
        grid = (self._num_ctas, 1, 1)
        of_runs = (*values[:6], *self._runs_of, *values[9:])
        shared.launcher(grid, shared.threads, stream, *of_runs, self._shared_prefix, *shared.extra)
        own.launcher(grid, own.threads, stream, *values, self._own_prefix, *own.extra)


def plan_shared(shape: Shape, spec: AttentionSpec, arch: str) -> general.Crews:
    """As many rows as a CTA holds, all its warps one team."""
    most = 2 * general.ROWS_IN_REGISTERS * general.CREWS[-1] // (1 if shape.head_dim <= 128 else 2)
    queries = max(min(most // shape.group, spec.max_num_tokens), 1)
    rows, parts, crew = general.plan_rows(shape, general.Asked(queries=queries))
    tile = spec.params.get("tile") or general.choose_tile(shape, rows // crew)
    copy = choose_copy(shape, arch)
    candidates = [
        general.Crews(rows=rows, parts=parts, crew=crew, warps=warps, tile=tile, stages=stages, team=warps, copy=copy)
        for stages in (general.count_stages(shape, crew, tile, 2), 2) for warps in WARPS if warps >= crew
    ]
    listed = MAX_DEPTH * (math.ceil(spec.max_num_tokens / max(rows // shape.group, 1)) + spec.max_num_seqs // 2)
    found = general.fit(shape, general.Asked(queries=max(queries, 2)), candidates, listed, shared_limit(arch))
    if found is None:
        raise Unsupported(f"shared memory must hold a list of {listed} runs beside a ring (got {shared_limit(arch)} bytes)")
    return found


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a CTA may take."""
    return SHARED_LIMIT.get(arch, min(SHARED_LIMIT.values()))


def list_bytes(count: int) -> int:
    """The list of so many runs or sequences."""
    return 16 * (count + 1)


def build(shape: Shape, asked: general.Asked, crews: general.Crews, role: str, count: int) -> Build:
    """The kernel in one of its roles, for `count` runs or sequences."""
    built = general.build(shape, asked, crews, count)
    return dataclasses.replace(
        built, macros={**built.macros, "PA_ROLE": role}, shared_bytes=general.cta_bytes(shape, crews) + list_bytes(count)
    )


def builds(arch: str) -> list[Build]:
    """Builds that stand for all: Llama 3 8B, 64 sequences."""
    made = []
    for features in ((), ("e4m3",)):
        shape = Shape(layout="HND_SWIZZLED", features=features)
        made += [
            build(shape, general.Asked(queries=32), general.fitting(shape, general.Asked(queries=32), 1, arch), "SHARED", 200),
            build(shape, general.Asked(), general.fitting(shape, general.Asked(), 2, arch), "OWN", 64),
        ]
    return made

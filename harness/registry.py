"""The contract of an implementation: an `Impl` says what it is, its `prepare` returns a `Prepared` that runs.

The harness knows implementations only through this page. They are found in the table `IMPLS` of the package `impls`, in
installed packages that name a table under the entry-point group "pagedbench.impls", and in files given by the user.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from harness.names import UsageError, nearest
from harness.ops import OP_NAMES
from harness.ops.features import FEATURES
from harness.ops.layouts import HND, Layout
from harness.rehearsal import rehearse
from harness.rooms import load_room
from harness.words import of_error, of_value

if TYPE_CHECKING:
    import torch

    from harness.ops.case import Case

ENTRY_POINT_GROUP = "pagedbench.impls"
TAILS = ("anything", "window", "finite")
ROLES = ("implementation", "control", "reader", "floor")
#: relations (harness/relations.py) and how far an entry claims each unless it says otherwise
RELATIONS = {
    "repeat": "bitwise",
    "two_plans": "tolerance",
    "graph": "tolerance",
    "side_stream": "tolerance",
    "block_permutation": "tolerance",
    "clean_pool": "tolerance",
    "same_addresses": "tolerance",
    "replay": "tolerance",
    "batch_order": "tolerance",
    "shared_prefix": "tolerance",
    "layers": "tolerance",
    "halves": "tolerance",
    "strided_query": "tolerance",
    "strided_cache": "tolerance",
    "block_size": "tolerance",
    "splits": "tolerance",
}
#: what a kernel may claim whose answer depends on the tokens of a sequence alone, and on nothing that chance decides
DETERMINISTIC = {relation: "bitwise" for relation in RELATIONS if relation not in ("halves", "block_size", "splits")}


class Unsupported(Exception):
    """Raised by `prepare` or `plan` for a case that the entry's limits could not rule out; the message is the reason."""


class Prepared:
    """One compiled implementation with its workspace, for one spec. Subclass it, or return any object with these names.

    workspace_bytes    device memory held besides the tensors that the harness passes in; checked against the allocator
    ledger             remarks on what `launch` does inside the timed region, by topic: {"casts": "query to f32"}
    kernels            compiled kernels, each a mapping with name, registers, shared_bytes, spill_bytes, digest
    """

    workspace_bytes: int = 0
    ledger: Mapping[str, str] = {}
    kernels: Sequence[Mapping[str, Any]] = ()

    def plan(self, step: Any) -> None:
        """Take one step's tables and lengths; called once for all layers. May use the host; is timed apart."""

    def launch(self, *tensors: Any, **layer: Any) -> None:
        """Run once, on the current stream, into the tensors given.

        attention      launch(query, key_cache, value_cache, out, lse, **layer)
        cache_write    launch(key, value, key_cache, value_cache, **layer)
        block_copy     launch(key_caches, value_caches), a tuple of caches each, one a layer

        `layer` holds the tensors that the spec's `layer_shapes` names, float32: sinks, alibi_slopes, k_scale, v_scale. An
        entry whose limits declare no features gets none.

        Allocates nothing, synchronises nothing, and can be captured in a CUDA graph unless the entry says `graph=False`.
        """
        raise NotImplementedError


class PreparedReader(Prepared):
    """What an entry with the role "reader" prepares: its launch reads K and V of every token once, and nothing else.

    checksum    integers whose sum is that of all 32-bit words read in the last launch, modulo 2**32
    """

    checksum: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What an implementation takes, as data, so that it can be asked without loading it. None is "any".

    head_dim_multiple    head_dim must be a multiple of it
    max_q_len            1 for decode only
    features             what it implements of harness/ops/features.py, besides softmax(scale * q.k) v
    """

    dtypes: frozenset[str] | set[str] | None = None
    head_dims: frozenset[int] | set[int] | None = None
    head_dim_multiple: int = 1
    max_head_dim: int | None = None
    block_sizes: frozenset[int] | set[int] | None = None
    max_block_size: int | None = None
    groups: frozenset[int] | set[int] | None = None
    max_group: int | None = None
    max_q_len: int | None = None
    max_seq_len: int | None = None
    features: frozenset[str] | set[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.features) - set(FEATURES)):
            raise UsageError(f"features must be of {', '.join(FEATURES)} (got {', '.join(unknown)})")

    def why_not(self, case: Case) -> str | None:
        """Return the first rule that `case` breaks, as a sentence, or None. Fields that a case lacks break no rule."""
        one_of = (
            ("dtype", self.dtypes),
            ("head_dim", self.head_dims),
            ("block_size", self.block_sizes),
            ("group", self.groups),
        )
        for field, allowed in one_of:
            value = getattr(case, field, None)
            if allowed is not None and value is not None and value not in allowed:
                return f"{field} must be one of {', '.join(map(str, sorted(allowed)))} (got {value})"
        head_dim = getattr(case, "head_dim", None)
        if head_dim is not None and head_dim % self.head_dim_multiple:
            return f"head_dim must be a multiple of {self.head_dim_multiple} (got {head_dim})"
        at_most = (
            ("head_dim", self.max_head_dim),
            ("block_size", self.max_block_size),
            ("group", self.max_group),
            ("max_q_len", self.max_q_len),
            ("max_seq_len", self.max_seq_len),
        )
        for field, most in at_most:
            value = getattr(case, field, None)
            if most is not None and value is not None and value > most:
                return f"{field} must be at most {most} (got {value})"
        lacks = next((name for name in getattr(case, "features", ()) if name not in self.features), None)
        if lacks:
            has = ", ".join(name for name in FEATURES if name in self.features) or "none"
            return f"{lacks} is not implemented (implements: {has})"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Impl:
    """One entry of a table of implementations.

    name         dotted, for ever: it keys results
    op           "attention", "cache_write" or "block_copy"
    prepare      "module:function", loaded on first use: prepare(spec) -> Prepared
    layouts      cache layouts it takes; each is measured as a row of its own
    devices      kinds of device it runs on: "cpu", "cuda"
    graph        whether `launch` can be captured in a CUDA graph
    replays      whether a captured launch, replayed, follows a later `plan` of as many query tokens in the same tensors: its
                 grid and addresses depend on capacities alone. An engine replays decode steps of such entries only
    lse          whether `launch` writes lse; without, attention is judged by its output alone, and the ledger says so
    tails        "finite" where NaN or infinity in a slot that holds no token would reach its output, which multiplies what
                 it masks by 0: its rows have ordinary values there, and their ledger says so; "window" where that is so of
                 the slots before a window alone
    quantises    what it rounds below the case's dtype ("query", "probabilities"), which the tolerance then allows for
    claims       relations, and whether they hold "bitwise" or within "tolerance", where that is not the default of RELATIONS
    params       tunable parameters: name -> values worth trying, the default first
    timed        kinds of device on which its time says something; on others it is checked only
    timed_from   query tokens of a case's longest sequence from which on its time says something; with fewer it is checked only
    max_work     by device kind, the most operations (flops or bytes of a case) worth waiting for; more is "skipped"
    available    "module:function", loaded on first use: f(device_kind) -> None, or why it cannot run on this machine
    on_request   comes only when it is named: a run of everything would wait for it
    role         "implementation"; "control": wrong on purpose; "reader": reads the case's bytes only, sets the ceiling;
                 "floor": launches and does nothing, and has no rows
    note         one line for `pagedbench list`
    """

    name: str
    op: str
    prepare: str
    layouts: tuple[Layout, ...] = (HND,)
    limits: Limits = Limits()
    devices: tuple[str, ...] = ("cpu", "cuda")
    graph: bool = True
    replays: bool = False
    lse: bool = True
    tails: str = "anything"
    quantises: frozenset[str] = frozenset()
    claims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    params: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    timed: tuple[str, ...] = ("cpu", "cuda")
    timed_from: int = 1
    max_work: Mapping[str, float] = dataclasses.field(default_factory=dict)
    available: str | None = None
    on_request: bool = False
    role: str = "implementation"
    note: str = ""

    def __post_init__(self) -> None:
        rules = (
            (
                bool(self.name) and not set(self.name) & set(" ,[]*?\t\n"),
                "name must hold no spaces, commas or brackets",
                self.name,
            ),
            (self.op in OP_NAMES, f"op must be one of {', '.join(OP_NAMES)}", self.op),
            (self.role in ROLES, f"role must be one of {', '.join(ROLES)}", self.role),
            (self.tails in TAILS, f"tails must be one of {', '.join(TAILS)}", self.tails),
            (":" in self.prepare, "prepare must read 'module:function'", self.prepare),
            (_is_tuple_of(self.layouts, Layout), "layouts must be a tuple of at least one Layout", self.layouts),
            (bool(self.devices) and set(self.devices) <= {"cpu", "cuda"}, "devices must be of 'cpu', 'cuda'", self.devices),
            (set(self.claims) <= set(RELATIONS), f"claims must name relations: {', '.join(RELATIONS)}", dict(self.claims)),
            (set(self.claims.values()) <= {"bitwise", "tolerance"}, "claims are 'bitwise' or 'tolerance'", dict(self.claims)),
            (_are_numbers(self.max_work), "max_work must give numbers by device kind", self.max_work),
            (_are_params(self.params), "params must name tuples of numbers or words, the default first", self.params),
        )
        for holds, rule, got in rules:
            if not holds:
                raise UsageError(f"implementation {self.name!r}: {rule} (got {got!r})")

    def why_not(self, case: Case, device_kind: str) -> str | None:
        """Return why this entry cannot run `case` on a "cpu" or "cuda" device, or None."""
        if case.op != self.op:
            return f"it implements {self.op} (got a case of {case.op})"
        if device_kind not in self.devices:
            return f"runs on {' or '.join(self.devices)} only (got {device_kind})"
        return self.limits.why_not(case) or self.why_missing(device_kind)

    def why_missing(self, device_kind: str) -> str | None:
        """Return why this machine lacks what the entry needs, or None."""
        return load(self.available)(device_kind) if self.available else None

    def is_absent_peer(self) -> bool:
        """Whether it is another project's, by its name, and its library is not there; `doctor` says how to get it."""
        return self.name.startswith("peer.") and self.why_missing(self.devices[0]) is not None

    def claim(self, relation: str) -> str:
        """Return how far the entry claims a relation to hold: "bitwise" or "tolerance"."""
        return self.claims.get(relation, RELATIONS[relation])

    def resolve_params(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the declared parameters at their defaults, `overrides` applied; unknown names raise UsageError."""
        for name in overrides:
            if name not in self.params:
                raise UsageError(f"{self.name} has no parameter {name!r}; it has: {', '.join(self.params) or 'none'}")
        return {name: overrides.get(name, values[0]) for name, values in self.params.items()}

    def load(self) -> Callable[[Any], Any]:
        """Import and return `prepare`."""
        return load(self.prepare)


def _is_tuple_of(value: object, *kinds: type) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(item, kinds) for item in value)


def _are_numbers(values: object) -> bool:
    return isinstance(values, Mapping) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()
    )


def _are_params(params: object) -> bool:
    """Records and workers carry parameters as JSON."""
    return isinstance(params, Mapping) and all(
        isinstance(name, str) and _is_tuple_of(values, int, float, str) for name, values in params.items()
    )


def load(reference: str) -> Callable[..., Any]:
    """Return what "module:function" names."""
    module, _, attribute = reference.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return loaded


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of the matrix: an implementation in one of its layouts, its parameters at their defaults or as given."""

    impl: Impl
    layout: Layout
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.impl.name}[{self.layout.name}]"

    def variants(self) -> list[Entry]:
        """This entry with every combination of its declared parameters, the defaults first."""
        combinations = itertools.product(*self.impl.params.values())
        return [dataclasses.replace(self, params=dict(zip(self.impl.params, values, strict=True))) for values in combinations]


class Registry:
    """The implementations at hand, in the order of their tables; names are unique."""

    def __init__(self, impls: Iterable[Impl] = ()) -> None:
        self._impls: dict[str, Impl] = {}
        self.add(impls)

    def add(self, impls: Iterable[Impl]) -> None:
        """Add entries; a name taken already raises UsageError."""
        for impl in impls:
            if impl.name in self._impls:
                raise UsageError(f"two implementations are named {impl.name!r}; rename one")
            self._impls[impl.name] = impl

    def __iter__(self) -> Any:
        return iter(self._impls.values())

    def entries(self, patterns: Sequence[str] = (), roles: Sequence[str] = ("implementation",)) -> list[Entry]:
        """Rows whose `name` or `name[LAYOUT]` matches one of the globs; none given is all of `roles`.

        A pattern that matches nothing raises UsageError with the nearest names. Naming an entry overrides `roles`. A peer
        whose library is missing, and what is `on_request`, come only when they are named.
        """
        rows = [Entry(impl, layout) for impl in self._impls.values() for layout in impl.layouts]
        if not patterns:
            rows = [row for row in rows if row.impl.role in roles and not row.impl.on_request]
            return [row for row in rows if not row.impl.is_absent_peer()]
        chosen: dict[str, Entry] = {}
        for pattern in patterns:
            found = [row for row in rows if matches(row.impl.name, pattern) or matches(str(row), pattern)]
            if not found:
                known = [*self._impls, *map(str, rows)]
                raise UsageError(f"no implementation matches {pattern!r}{nearest(pattern, known)}")
            chosen.update((str(row), row) for row in found if row.impl.role in roles or pattern in (row.impl.name, str(row)))
        return list(chosen.values())


def matches(name: str, pattern: str) -> bool:
    """Glob match in which brackets stand for themselves, since row names carry them."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def default_registry(impl_files: Sequence[str] = (), rehearsed: bool = False) -> Registry:
    """The table of `impls`, then installed entry points, then `impl_files`, imported apart first unless `rehearsed`."""
    registry = Registry(load_room("impls").IMPLS)
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        registry.add(_load_point(point))
    for path in impl_files:
        if not rehearsed:
            rehearse(path)
        registry.add(load_file(path))
    return registry


def _load_point(point: importlib.metadata.EntryPoint) -> Sequence[Impl]:
    who = f"entry point {point.name!r} ({point.value}) of the group {ENTRY_POINT_GROUP}"
    try:
        table = point.load()
    except Exception as error:
        raise UsageError(f"{who}: {of_error(error)}") from error
    if not _is_table(table):
        raise UsageError(f"{who}: must name a tuple of harness.registry.Impl (got {of_value(table)})")
    return table


def _is_table(table: object) -> TypeGuard[Sequence[Impl]]:
    return isinstance(table, list | tuple) and all(isinstance(impl, Impl) for impl in table)


def load_file(path: str) -> Sequence[Impl]:
    """Run the user's file and return its `IMPLS`. Its own functions are named "MODULE:function", MODULE the file's stem.

    Raises UsageError, with the file and the reason, when there is no such file, it fails, or it has no table.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"--impl-file {path}: no such file")
    name = file.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(file.resolve()):
        raise UsageError(f"--impl-file {path}: a module named {name!r} is loaded already; rename the file")
    known = importlib.util.find_spec(name) if "." not in name else None
    if known and known.origin and Path(known.origin).resolve() != file.resolve():
        raise UsageError(f"--impl-file {path}: Python has another module named {name!r} ({known.origin}); rename the file")
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"--impl-file {path}: not a Python file (it must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"--impl-file {path}: {of_error(error)}") from error
    table = getattr(module, "IMPLS", None)
    if not _is_table(table):
        raise UsageError(f"--impl-file {path}: must define IMPLS, a tuple of harness.registry.Impl (got {of_value(table)})")
    for impl in table:
        module_named = impl.prepare.partition(":")[0]
        if module_named != name and "." not in module_named:  # some other file that happens to lie in the folder
            raise UsageError(
                f"--impl-file {path}: {impl.name} names its prepare {impl.prepare!r}, which is not in this file"
            )
    return table

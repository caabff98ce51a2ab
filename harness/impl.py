"""The contract of an implementation: an `Impl` says what it is, its `prepare` returns a `Prepared` that runs.

Implementations, ours and others', import it from harness.registry.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from harness.limits import Limits
from harness.names import UsageError
from harness.ops import OP_NAMES
from harness.ops.layouts import HND, Layout

if TYPE_CHECKING:
    import torch

    from harness.ops.case import Case

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
    "smaller_step": "tolerance",
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
    limits: Limits = dataclasses.field(default_factory=Limits)
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
                isinstance(self.name, str) and bool(self.name) and not set(self.name) & set(" ,[]*?\t\n"),
                "name must hold no spaces, commas or brackets",
                self.name,
            ),
            (self.op in OP_NAMES, f"op must be one of {', '.join(OP_NAMES)}", self.op),
            (self.role in ROLES, f"role must be one of {', '.join(ROLES)}", self.role),
            (self.tails in TAILS, f"tails must be one of {', '.join(TAILS)}", self.tails),
            (isinstance(self.prepare, str) and ":" in self.prepare, "prepare must read 'module:function'", self.prepare),
            (_is_tuple_of(self.layouts, Layout), "layouts must be a tuple of at least one Layout", self.layouts),
            (isinstance(self.limits, Limits), "limits must be Limits", self.limits),
            (bool(self.devices) and _are_kinds(self.devices), "devices must be a tuple of 'cpu', 'cuda'", self.devices),
            (_are_kinds(self.timed), "timed must be a tuple of 'cpu', 'cuda'", self.timed),
            (isinstance(self.quantises, Set), "quantises must be a set of names", self.quantises),
            (_are_claims(self.claims), f"claims must say 'bitwise' or 'tolerance' of {', '.join(RELATIONS)}", self.claims),
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


def _are_kinds(values: object) -> bool:
    return isinstance(values, tuple | list) and all(kind in ("cpu", "cuda") for kind in values)


def _are_claims(claims: object) -> bool:
    return isinstance(claims, Mapping) and all(
        relation in RELATIONS and how in ("bitwise", "tolerance") for relation, how in claims.items()
    )


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

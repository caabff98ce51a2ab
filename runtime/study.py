"""Which allocators are held against each other, over which traces; the records and what the articles claim beside them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from runtime.contiguous import grow_and_copy, oracle, reserve_max, reserve_power_of_two
from runtime.counting import Count
from runtime.manager import BlockManager
from runtime.replay import Replay
from runtime.stores import ContiguousStore, PagedStore, Store
from runtime.tokens import as_integer
from runtime.traces import Trace, with_prefixes
from runtime.waste import Waste

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BLOCK_SIZE = 16  # where one stands for all


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A utilisation that somebody published."""

    who: str
    what: str
    utilisation: float


CLAIMS = (
    Claim(who="the Ascend article", what="contiguous", utilisation=0.40),
    Claim(who="the Ascend article", what="paged", utilisation=0.90),
    Claim(who="the vLLM paper, figure 2", what="reserve-max", utilisation=0.204),
    Claim(who="the vLLM paper, figure 2", what="power of two", utilisation=0.268),
    Claim(who="the vLLM paper, figure 2", what="oracle", utilisation=0.382),
    Claim(who="the vLLM paper, figure 2", what="paged", utilisation=0.963),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One study.

    num_slots      slots of the pool: 65,536 of LLaMA-7B are 34 GB
    max_length     what reserve-max reserves, and the longest request that any row lets in (its system prompt not counted)
    step_s         seconds a step, where a trace has arrivals
    num_prefixes, prefix_length
                   system prompts put before every prompt, for the rows on sharing
    num_samples    answers to each prompt, for the rows on parallel sampling
    """

    num_slots: int = 65_536
    max_length: int = 4096
    step_s: float = 0.03
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    num_prefixes: int = 8
    prefix_length: int = 512
    num_samples: int = 4

    def __post_init__(self) -> None:
        for rule in ("num_slots", "max_length", "num_prefixes", "prefix_length", "num_samples"):
            as_integer(getattr(self, rule), f"Plan: {rule}", 1)
        if self.num_slots < BLOCK_SIZE:
            raise ValueError(f"Plan: num_slots must be at least a block of {BLOCK_SIZE}, got {self.num_slots}")
        if not 1e-6 <= self.step_s < math.inf:
            raise ValueError(f"Plan: step_s must be at least a microsecond, got {self.step_s} s")
        if not self.block_sizes:
            raise ValueError("Plan: block_sizes must be at least one, got none")
        for size in self.block_sizes:
            as_integer(size, "Plan: one of block_sizes", 1, self.num_slots)
        if len(set(self.block_sizes)) != len(self.block_sizes):
            raise ValueError(f"Plan: block_sizes must be different, got {', '.join(map(str, self.block_sizes))}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One replay to be done: its name, its trace, and how to make its allocator."""

    name: str
    trace: Trace
    make: Callable[[], Store]


def rows(trace: Trace, plan: Plan) -> Iterator[Row]:
    """All replays of a trace, from the most wasteful to sharing."""
    for name, manager in (
        ("reserve-max", lambda: reserve_max(plan.num_slots, plan.max_length)),
        ("power of two", lambda: reserve_power_of_two(plan.num_slots)),
        ("grow-and-copy", lambda: grow_and_copy(plan.num_slots)),
        ("oracle", lambda: oracle(plan.num_slots)),
    ):
        yield Row(name=name, trace=trace, make=lambda make=manager: ContiguousStore(make(), max_length=plan.max_length))  # type: ignore[misc]
    for size in plan.block_sizes:
        yield Row(name=f"paged {size}", trace=trace, make=lambda size=size: _paged(plan, size))  # type: ignore[misc]
    shared = with_prefixes(trace, num_prefixes=plan.num_prefixes, prefix_length=plan.prefix_length)
    longest = plan.max_length + plan.prefix_length
    yield Row(name="prefixes, held apart", trace=shared, make=lambda: _paged(plan, max_length=longest))
    yield Row(name="prefixes, shared", trace=shared, make=lambda: _paged(plan, max_length=longest, prefixes=shared))
    for name, forked in ((f"{plan.num_samples} samples, held apart", False), (f"{plan.num_samples} samples, forked", True)):
        yield Row(
            name=name,
            trace=trace,
            make=lambda forked=forked: _paged(plan, num_samples=plan.num_samples, forked=forked),  # type: ignore[misc]
        )


def measure(row: Row, plan: Plan) -> Waste:
    """Replay one row."""
    return Replay(row.trace, row.make(), step_s=plan.step_s).run(row.name)


def count(trace: Trace, plan: Plan, block_size: int = BLOCK_SIZE) -> Waste:
    """The row `paged <block_size>` by counting: for a million requests."""
    return Count(trace, num_blocks=plan.num_slots // block_size, block_size=block_size).run(f"paged {block_size}")


def _paged(plan: Plan, block_size: int = BLOCK_SIZE, **options: Any) -> PagedStore:
    manager = BlockManager(plan.num_slots // block_size, block_size)
    return PagedStore(manager, **{"max_length": plan.max_length} | options)

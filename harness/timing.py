"""Seconds a launch takes: CUDA graphs and events on a GPU, the wall clock on a CPU.

A `Timer` is made once for a row and then visited several times, other rows between: `visit` returns one median.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from harness.device import Device

Launch = Callable[[], object]

#: Seconds of work in one graph, so that what its launch costs is below a hundredth.
GRAPH_S = 1e-3
#: Seconds of work in one visit, at least three replays.
VISIT_S = 20e-3
#: More nodes in a graph cost more to build than they add.
MAX_NODES = 4096


class Timer(Protocol):
    """Times one row. `how` says by what means, for the ledger."""

    how: str

    def visit(self, during: Callable[[], None] | None = None) -> float:
        """Return the median seconds a launch over one visit; `during` is called while the device works."""

    def relaunch(self, sets: Sequence[int]) -> None:
        """Launch again, in the way that is timed, at least on these sets of inputs."""

    def slope(self) -> float | None:
        """Seconds a launch by another way that shares no fixed cost with `visit`, or None where there is none."""

    def run_for(self, seconds: float, during: Callable[[], None]) -> int:
        """Keep the device busy for about so long, calling `during` again and again; return the launches made."""


def make_timer(launches: Sequence[Launch], device: Device, graph: bool) -> Timer:
    """Return the timer for these launches, one for each set of inputs, which are rotated in order."""
    if device.kind == "cpu":
        return WallTimer(launches)
    for launch in launches[:2]:
        launch()
    seconds = _estimate(launches)
    rounds = max(1, min(round(GRAPH_S / (seconds * len(launches)) + 0.5), MAX_NODES // len(launches)))
    if graph:
        return GraphTimer(launches, rounds)
    return StreamTimer(launches, rounds)


def _event() -> torch.cuda.Event:
    made: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has no types here
    return made


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) * 1e-3


def _estimate(launches: Sequence[Launch]) -> float:
    """Seconds a launch, roughly: one round between two events."""
    begin, end = _event(), _event()
    begin.record()
    for launch in launches:
        launch()
    end.record()
    end.synchronize()
    return max(_seconds(begin, end) / len(launches), 1e-6)


class StreamTimer:
    """Rounds of launches on the stream, timed by events: for what cannot be captured. Host time may show."""

    def __init__(self, launches: Sequence[Launch], rounds: int) -> None:
        self._launches, self._rounds = launches, rounds
        self._per_replay = rounds * len(launches)
        self.how = f"stream of {self._per_replay} launches, events"

    def _replay(self) -> None:
        for _ in range(self._rounds):
            for launch in self._launches:
                launch()

    def visit(self, during: Callable[[], None] | None = None) -> float:
        return _between_events(self._replay, during) / self._per_replay

    def relaunch(self, sets: Sequence[int]) -> None:
        self._replay()

    def slope(self) -> float | None:
        return None

    def run_for(self, seconds: float, during: Callable[[], None]) -> int:
        return _run_for(self._replay, seconds, during) * self._per_replay


class GraphTimer:
    """A CUDA graph of launches over rotated inputs, timed by events between replays.

    `slope` is the difference between a graph of twice the launches and this one, which a fixed cost cannot enter.
    """

    def __init__(self, launches: Sequence[Launch], rounds: int) -> None:
        self._launches = launches
        self._per_replay = rounds * len(launches)
        self._graph = _capture(launches, self._per_replay)
        self.how = f"graph of {self._per_replay} launches, events"

    def visit(self, during: Callable[[], None] | None = None) -> float:
        return _between_events(self._graph.replay, during) / self._per_replay

    def relaunch(self, sets: Sequence[int]) -> None:
        self._graph.replay()

    def slope(self) -> float | None:
        twice = _capture(self._launches, 2 * self._per_replay)
        # Alternating, so that a change of clocks hits both.
        pairs = [(_between_events(self._graph.replay), _between_events(twice.replay)) for _ in range(3)]
        return statistics.median(long - short for short, long in pairs) / self._per_replay

    def run_for(self, seconds: float, during: Callable[[], None]) -> int:
        return _run_for(self._graph.replay, seconds, during) * self._per_replay


def _capture(launches: Sequence[Launch], count: int) -> torch.cuda.CUDAGraph:
    """Capture `count` launches, in rotation. What a launch allocates comes from the graph's own pool."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for launch in itertools.islice(itertools.cycle(launches), count):
            launch()
    return graph


def _between_events(replay: Launch, during: Callable[[], None] | None = None) -> float:
    """Median seconds of a replay. Replays follow each other without a gap, so the host's own time does not enter."""
    events = [_event() for _ in range(4)]
    replay()
    for event in events[:2]:
        event.record()
        replay()
    events[2].record()
    events[2].synchronize()
    seconds = _seconds(events[0], events[1])
    count = max(3, min(200, round(VISIT_S / max(seconds, 1e-6))))
    events = [_event() for _ in range(count + 1)]
    replay()  # not timed: it hides the time the host takes to get ahead
    for event in events[:-1]:
        event.record()
        replay()
    events[-1].record()
    if during is not None:
        during()
    events[-1].synchronize()
    return statistics.median(_seconds(a, b) for a, b in itertools.pairwise(events))


def _run_for(replay: Launch, seconds: float, during: Callable[[], None]) -> int:
    """Replay for about `seconds`, never more than a few replays ahead of the device."""
    count, start = 0, time.perf_counter()
    in_flight: list[torch.cuda.Event] = []
    while time.perf_counter() - start < seconds:
        for _ in range(8):
            replay()
        count += 8
        event = _event()
        event.record()
        in_flight.append(event)
        during()
        if len(in_flight) > 2:
            in_flight.pop(0).synchronize()
    torch.cuda.synchronize()
    return count


class WallTimer:
    """The wall clock around launches on a CPU, inputs rotated."""

    how = "wall clock"

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._sets = launches
        self._launches = itertools.cycle(launches)
        next(self._launches)()

    def visit(self, during: Callable[[], None] | None = None) -> float:
        """The median of launches over at least VISIT_S, three at least where one takes less than a tenth of a second."""
        samples: list[float] = []
        while sum(samples) < VISIT_S or (len(samples) < 3 and sum(samples) < 0.1):
            launch = next(self._launches)
            begin = time.perf_counter()
            launch()
            samples.append(time.perf_counter() - begin)
        return statistics.median(samples)

    def relaunch(self, sets: Sequence[int]) -> None:
        for index in sets:
            self._sets[index]()

    def slope(self) -> float | None:
        return None

    def run_for(self, seconds: float, during: Callable[[], None]) -> int:
        raise NotImplementedError("a CPU has no energy counter to hold a window for")


def host_seconds(launches: Sequence[Launch], device: Device) -> float:
    """Median seconds the host needs to enqueue one launch, the device idle at the start."""
    device.synchronize()
    samples = []
    for launch in itertools.islice(itertools.cycle(launches), 32):
        begin = time.perf_counter()
        launch()
        samples.append(time.perf_counter() - begin)
    device.synchronize()
    return statistics.median(samples)


def plan_seconds(plan: Callable[[], None], device: Device, count: int = 5) -> list[float]:
    """Wall seconds of single plans, until the device has finished each."""
    samples = []
    for _ in range(count):
        device.synchronize()
        begin = time.perf_counter()
        plan()
        device.synchronize()
        samples.append(time.perf_counter() - begin)
    return samples

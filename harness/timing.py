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
#: Seconds of work in one visit on a CPU; on a GPU, where visits differ by 0.2% and replays of one by 0.03%; and in each of the
#: six measurements of a second opinion.
VISIT_S, REPLAYS_S, SECOND_S = 20e-3, 10e-3, 6e-3
#: Seconds that the host may take to capture one graph: it bounds the sets that a row of many small kernels rotates over.
CAPTURE_S = 0.1
#: More launches in a graph cost more to build than they add.
MAX_LAUNCHES = 4096
#: A graph so long needs no replay before the one that is timed, and no slope: its launch is below a thousandth of it.
LONG_S = 10e-3

#: Calls in a row whose time on the host is taken, as of a model's layers: a stream holds many more, so none waits for room.
#: And seconds that all bursts of a row may take, their number at most.
BURST, BURSTS_S, MOST_BURSTS = 32, 50e-3, 16

#: Seconds of work enqueued at a time while power is read: a few NVML queries take longer than a short graph.
AHEAD_S = 50e-3


class Timer(Protocol):
    """Times one row. `how` says by what means, for the ledger; `num_sets` over how many sets of inputs."""

    how: str
    num_sets: int

    def visit(self, during: Callable[[], None] | None = None) -> float:
        """Return the median seconds a launch over one visit; `during` is called while the device works."""

    def relaunch(self, sets: Sequence[int]) -> Sequence[int]:
        """Launch again, in the way that is timed, at least on these sets of inputs; return on which."""

    def second_opinion(self) -> float | None:
        """Seconds a launch by another way than `visit`, or None where there is none."""

    def run_for(self, seconds: float, during: Callable[[], None]) -> int:
        """Keep the device busy for about so long, calling `during` again and again; return the launches made."""


def make_timer(launches: Sequence[Launch], device: Device, graph: bool) -> Timer:
    """Return the timer for these launches, one for each set of inputs, which are rotated in order.

    A row whose launches cost the host much (many small kernels each) rotates over the first sets only, 8 at least;
    `num_sets` says over how many.
    """
    if device.kind == "cpu":
        return WallTimer(launches)
    for launch in launches[:2]:
        launch()
    device.synchronize()
    affordable = max(8, int(CAPTURE_S / statistics.median(_burst(launches[:8], 8))))
    device.synchronize()
    sets = launches[:affordable]
    seconds = _estimate(sets)
    rounds = max(1, min(round(GRAPH_S / (seconds * len(sets)) + 0.5), min(affordable, MAX_LAUNCHES) // len(sets)))
    return GraphTimer(sets, rounds, seconds) if graph else StreamTimer(sets, rounds, seconds)


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

    def __init__(self, sets: Sequence[Launch], rounds: int, estimate: float) -> None:
        self._sets, self._rounds = sets, rounds
        self.num_sets = len(sets)
        self._per_replay = rounds * len(sets)
        self._estimate = estimate * self._per_replay
        self.how = f"stream of {self._per_replay} launches, events"

    def _replay(self) -> None:
        for _ in range(self._rounds):
            for launch in self._sets:
                launch()

    def visit(self, during: Callable[[], None] | None = None) -> float:
        return _between_events(self._replay, self._estimate, during) / self._per_replay

    def relaunch(self, sets: Sequence[int]) -> Sequence[int]:
        self._replay()
        return range(self.num_sets)

    def second_opinion(self) -> float | None:
        return _by_wall_clock(self._replay) / self._per_replay

    def run_for(self, seconds: float, during: Callable[[], None]) -> int:
        return _run_for(self._replay, self._estimate, seconds, during) * self._per_replay


class GraphTimer:
    """A CUDA graph of launches over rotated inputs, timed by events between replays.

    The second opinion on a short graph is the difference between one of twice the launches and this one, which a fixed
    cost cannot enter; on a long one it is the wall clock.
    """

    def __init__(self, sets: Sequence[Launch], rounds: int, estimate: float) -> None:
        self._sets = sets
        self.num_sets = len(sets)
        self._per_replay = rounds * len(sets)
        self._estimate = estimate * self._per_replay
        self._graph = _capture(sets, self._per_replay)
        self.how = f"graph of {self._per_replay} launches, events"

    def visit(self, during: Callable[[], None] | None = None) -> float:
        return _between_events(self._graph.replay, self._estimate, during) / self._per_replay

    def relaunch(self, sets: Sequence[int]) -> Sequence[int]:
        self._graph.replay()
        return range(self.num_sets)

    def second_opinion(self) -> float | None:
        if self._estimate > LONG_S:
            return _by_wall_clock(self._graph.replay) / self._per_replay
        twice = _capture(self._sets, 2 * self._per_replay)
        # In turn, so that a change of clocks hits both; a median, since one pair may lie on either side of such a change.
        pairs = [
            (
                _between_events(self._graph.replay, self._estimate, seconds=SECOND_S),
                _between_events(twice.replay, 2 * self._estimate, seconds=SECOND_S),
            )
            for _ in range(3)
        ]
        return statistics.median(both - once for once, both in pairs) / self._per_replay

    def run_for(self, seconds: float, during: Callable[[], None]) -> int:
        return _run_for(self._graph.replay, self._estimate, seconds, during) * self._per_replay


def _capture(launches: Sequence[Launch], count: int) -> torch.cuda.CUDAGraph:
    """Capture `count` launches, in rotation. What a launch allocates comes from the graph's own pool."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for launch in itertools.islice(itertools.cycle(launches), count):
            launch()
    # The first replay uploads the graph, which takes the host longer than the device takes to run it.
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _between_events(
    replay: Launch, estimate: float, during: Callable[[], None] | None = None, seconds: float = REPLAYS_S
) -> float:
    """Median seconds of a replay, over about `seconds` of them.

    Replays follow each other without a gap, so the host's own time does not enter.
    """
    if estimate < LONG_S:
        replay()  # not timed: it hides the time the host takes to get ahead
    count = max(1 if estimate > LONG_S else 3, min(200, round(seconds / estimate)))
    events = [_event() for _ in range(count + 1)]
    for event in events[:-1]:
        event.record()
        replay()
    events[-1].record()
    if during is not None:
        during()
    events[-1].synchronize()
    return statistics.median(_seconds(a, b) for a, b in itertools.pairwise(events))


def _by_wall_clock(replay: Launch) -> float:
    """Seconds of one replay, from an idle device until it is idle again."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    replay()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _run_for(replay: Launch, estimate: float, seconds: float, during: Callable[[], None]) -> int:
    """Replay for about `seconds`, far enough ahead of the device that `during` never leaves it idle."""
    count, start, batch = 0, time.perf_counter(), max(1, round(AHEAD_S / estimate))
    in_flight: list[torch.cuda.Event] = []
    while time.perf_counter() - start < seconds:
        for _ in range(batch):
            replay()
        count += batch
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
        self.num_sets = len(launches)
        self._launches = itertools.cycle(launches)
        next(self._launches)()

    def visit(self, during: Callable[[], None] | None = None) -> float:
        """The median of launches over at least VISIT_S, three at least where one takes less than a tenth of a second."""
        samples: list[float] = []
        total = 0.0  # summed as it grows: a launch of a microsecond makes twenty thousand samples
        while total < VISIT_S or (len(samples) < 3 and total < 0.1):
            launch = next(self._launches)
            begin = time.perf_counter()
            launch()
            samples.append(time.perf_counter() - begin)
            total += samples[-1]
        return statistics.median(samples)

    def relaunch(self, sets: Sequence[int]) -> Sequence[int]:
        for index in sets:
            self._sets[index]()
        return sets

    def second_opinion(self) -> float | None:
        return None

    def run_for(self, seconds: float, during: Callable[[], None]) -> int:
        raise NotImplementedError("a CPU has no energy counter to hold a window for")


def host_seconds(calls: Sequence[Launch], device: Device) -> float:
    """Median seconds after which a call has returned to the host, in steady state.

    Bursts of BURST calls, each from an idle device on, which nobody waits for until the burst is over. All are of the same
    calls, so that what they touch is as warm as a loop over a model's layers leaves it; the first is not counted.
    """
    begin, samples, bursts = time.perf_counter(), [], 0
    while bursts < 2 or (bursts < MOST_BURSTS and time.perf_counter() - begin < BURSTS_S):
        device.synchronize()
        taken = _burst(calls, BURST)
        bursts += 1
        if bursts > 1:
            samples += taken
    device.synchronize()
    return statistics.median(samples)


def _burst(calls: Sequence[Launch], count: int) -> list[float]:
    """Seconds of each of `count` calls, in rotation; fewer of such as take the host BURSTS_S and more."""
    taken: list[float] = []
    for call in itertools.islice(itertools.cycle(calls), count):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
        if sum(taken) > BURSTS_S:
            break
    return taken


def plan_seconds(plan: Callable[[], None], device: Device, count: int = 5) -> list[float]:
    """Wall seconds of single plans, the first ones, until the device has finished each: asking it is part of that."""
    samples = []
    for _ in range(count):
        device.synchronize()
        begin = time.perf_counter()
        plan()
        device.synchronize()
        samples.append(time.perf_counter() - begin)
    return samples

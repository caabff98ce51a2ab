"""The clock on a CPU, and what timers of a GPU work out before they touch one."""

from __future__ import annotations

import dataclasses
import itertools
import time
from types import SimpleNamespace

import pytest

from harness import selftest, timing
from harness.device import find_device
from harness.hazards import PLAIN
from harness.ops.attention import AttentionCase
from harness.ops.attention_tensors import AttentionOperator
from harness.ops.layouts import HND
from harness.registry import Entry, Impl
from harness.row import Row
from harness.timing import BURST, VISIT_S, WallTimer, host_seconds, make_timer, plan_seconds

CPU = find_device("cpu")


class Clock:
    """A wall clock that only launches move on; what is asked of it in between costs nothing."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def launch(self, seconds, log=None, name=None):
        def launch():
            self.now += seconds() if callable(seconds) else seconds
            if log is not None:
                log.append(name)

        return launch


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_visit_is_the_median_of_its_launches(clock):
    """Of single launches, so that one that was interrupted does not count."""
    durations = iter([9.0, 0.010, 0.500, 0.011, 0.012, 0.013])  # the first warms up; the visit ends beyond VISIT_S and at three

    assert WallTimer([clock.launch(lambda: next(durations))]).visit() == pytest.approx((0.010 + 0.500) / 2)


@pytest.mark.parametrize(
    ("seconds", "count"), [(1.0, 1), (0.2, 1), (0.04, 3), (0.0401, 3), (VISIT_S / 5.5, 6), (VISIT_S / 1000.5, 1001)]
)
def test_a_visit_lasts_long_enough_and_no_longer(clock, seconds, count):
    """At least VISIT_S; three launches where three are cheap; one where a launch takes a tenth of a second."""
    log = []
    timer = WallTimer([clock.launch(seconds, log)])
    log.clear()

    assert timer.visit() == pytest.approx(seconds)
    assert len(log) == count


def test_inputs_are_rotated_over_all_visits(clock):
    """Every launch takes the next set, also from one visit to the next."""
    log = []
    timer = WallTimer([clock.launch(0.009, log, name) for name in "abcd"])
    timer.visit()
    timer.visit()

    assert "".join(log) == "abcdabc"
    assert timer.num_sets == 4


def test_the_first_launch_is_not_timed(clock):
    """What is compiled or cached at first use is no part of a sample."""
    durations = iter([5.0, *[0.01] * 10])

    assert WallTimer([clock.launch(lambda: next(durations))]).visit() == pytest.approx(0.01)


def test_relaunch_takes_the_sets_it_is_told(clock):
    """What is judged after timing is what was timed."""
    log = []
    timer = WallTimer([clock.launch(0.01, log, name) for name in "abcd"])
    log.clear()
    timer.relaunch([0, 3])

    assert log == ["a", "d"]


def test_a_visit_of_tiny_launches_costs_little_more_than_they_take():
    """Thousands of samples are not summed again and again."""
    timer = WallTimer([lambda: None])
    begin = time.perf_counter()
    seconds = timer.visit()

    assert seconds < 1e-4
    assert time.perf_counter() - begin < 20 * VISIT_S


def test_a_real_sleep_is_timed_as_long_as_it_is():
    """The clock is the system's own."""
    seconds = WallTimer([lambda: time.sleep(0.004)]).visit()

    assert 0.004 <= seconds < 0.02


def test_a_cpu_is_timed_by_the_wall_clock():
    """No graph, no second way to ask, no energy to read, no self-test."""
    timer = make_timer([lambda: None], CPU, graph=True)

    assert isinstance(timer, WallTimer)
    assert timer.how == "wall clock"
    assert timer.second_opinion() is None
    with pytest.raises(NotImplementedError, match="a CPU has no energy counter"):
        timer.run_for(1.0, lambda: None)
    assert selftest.selftest(CPU, None) == {}


def test_plans_are_timed_singly(clock):
    """Five samples, in order."""
    durations = iter([0.5, 0.1, 0.2, 0.3, 0.4])

    assert plan_seconds(clock.launch(lambda: next(durations)), CPU) == pytest.approx([0.5, 0.1, 0.2, 0.3, 0.4])


def test_host_time_is_the_median_of_rotated_calls(clock):
    """Half of them are slow: the median lies between."""
    assert host_seconds([clock.launch(10e-6), clock.launch(30e-6)], CPU) == pytest.approx(20e-6)


def test_the_first_burst_of_calls_is_not_counted(clock):
    """What is compiled, cached or paged in then is no part of a steady state."""
    durations = itertools.chain([1e-3] * BURST, itertools.repeat(5e-6))

    assert host_seconds([clock.launch(lambda: next(durations))], CPU) == pytest.approx(5e-6)


def test_host_time_does_not_wait_for_the_device(gpu, monkeypatch):
    """It is synchronised between bursts only, and what that takes is nobody's time; a row takes BURSTS_S and no longer."""
    waits, log = [], []
    monkeypatch.setattr(type(gpu.device), "synchronize", lambda self: waits.append(len(log)) or gpu.launch(0.020)())

    assert host_seconds([gpu.launch(5e-6, log)], gpu.device) == pytest.approx(5e-6)
    assert waits == [0, BURST, 2 * BURST, 3 * BURST]


def test_calls_that_take_the_host_long_are_few(clock):
    """One to warm up and one that counts."""
    log = []

    assert host_seconds([clock.launch(0.3, log)], CPU) == pytest.approx(0.3)
    assert len(log) == 2


@pytest.mark.parametrize(
    ("spin_hz", "clock_hz", "doubted"),
    [(1.98e9, 1.98e9, False), (1.98e9, 2.07e9, False), (1.98e9, 2.2e9, True), (2.2e9, 1.98e9, True), (1.0, None, False)],
)
def test_a_spin_of_known_length_tells_a_wrong_clock(spin_hz, clock_hz, doubted):
    """Five percent from what NVML says is doubt, with both numbers; no NVML, no doubt."""
    doubt = selftest.doubts({"spin_hz": spin_hz, "sm_clock_hz": clock_hz})

    assert (doubt is not None) == doubted
    if doubted:
        assert f"{spin_hz / 1e6:.0f} MHz" in doubt
        assert f"{clock_hz / 1e6:.0f}" in doubt


def test_a_cpu_run_is_never_in_doubt():
    """Nothing was asked."""
    assert selftest.doubts({}) is None


class Event:
    """A CUDA event on a clock of the test's own."""

    def __init__(self, clock):
        self._clock = clock

    def record(self):
        self.at = self._clock.now

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3

    def synchronize(self):
        pass


@pytest.fixture
def gpu(clock, monkeypatch):
    """A device whose launches run when they are enqueued, and whose graphs replay them; `gpu.graphs` lists how long each is."""
    device = dataclasses.replace(CPU, name="cuda:0", kind="cuda")
    graphs = []

    class Graph:
        def __init__(self, sets, count):
            graphs.append(count)
            self.replay = lambda: [sets[i % len(sets)]() for i in range(count)]

    for waits in ("synchronize", "settle"):
        monkeypatch.setattr(type(device), waits, lambda self: None)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(timing, "_event", lambda: Event(clock))
    monkeypatch.setattr(timing, "_capture", Graph)
    clock.device, clock.graphs = device, graphs
    return clock


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "stream"])
@pytest.mark.parametrize("seconds", [3e-6, 50e-6, 2e-3, 0.3])
@pytest.mark.parametrize("num_sets", [1, 2, 37])
def test_seconds_are_a_launch_whatever_is_replayed(gpu, graph, seconds, num_sets):
    """However many launches a graph or a stream holds, a visit and the second opinion say what one takes."""
    timer = make_timer([gpu.launch(seconds) for _ in range(num_sets)], gpu.device, graph)

    assert timer.visit() == pytest.approx(seconds)
    assert timer.second_opinion() == pytest.approx(seconds)
    assert ("graph of " if graph else "stream of ") in timer.how


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "stream"])
def test_a_replay_holds_every_set_equally_often(gpu, graph):
    """Rounds over all sets: none is warmer than another."""
    log = []
    timer = make_timer([gpu.launch(20e-6, log, name) for name in "abc"], gpu.device, graph)
    log.clear()
    timer.relaunch([0, 2])

    assert len(log) >= 3
    assert log == list("abc") * (len(log) // 3)


def test_launches_that_cost_the_host_much_rotate_over_fewer_sets(gpu):
    """Eight sets at least, and the timer says over how many."""
    timer = make_timer([gpu.launch(0.1) for _ in range(50)], gpu.device, graph=True)

    assert timer.num_sets == 8


def test_running_for_a_while_counts_its_launches(gpu):
    """For power: about as long as asked for, `during` called again and again."""
    log, looks = [], []
    timer = make_timer([gpu.launch(1e-3, log) for _ in range(4)], gpu.device, graph=True)
    log.clear()
    launches = timer.run_for(1.0, lambda: looks.append(gpu.now))

    assert launches == len(log)
    assert 1000 <= launches <= 1200
    assert len(looks) >= 5


@pytest.mark.parametrize(
    ("role", "seconds"),
    [("implementation", (5e-6, 3e-6)), ("control", (5e-6, 3e-6)), ("reader", (None, None)), ("floor", (None, None))],
)
def test_host_time_is_of_rows_and_not_of_what_stands_beside_them(gpu, role, seconds):
    """Eight readers a case are tried in every run; how long they keep the host nobody asks."""
    case = AttentionCase(name="tiny", num_q_heads=1, num_kv_heads=1, head_dim=8, block_size=4, seq_lens=(5,), dtype="f32")
    impl = Impl(name="toy.any", op="attention", prepare="toys:prepare", role=role, devices=("cuda",))
    row = Row(case, Entry(impl, HND), gpu.device, None)
    row.prepared = SimpleNamespace(plan=lambda step: gpu.launch(3e-6)(), launch=lambda *_: gpu.launch(5e-6)(), ledger={})
    row.trial = SimpleNamespace(damage=lambda staged: None)
    staged = AttentionOperator().build(case, PLAIN, layers=2, device="cpu").stage(HND)

    assert row.make_timer(lambda: staged), row.reason
    assert (row.fields.get("host_s"), row.fields.get("plan_host_s")) == pytest.approx(seconds)
    assert row.fields["plan_s"].median == pytest.approx(3e-6)

"""Cases are spread over lanes: every row has one record, a case's rows one lane, whatever becomes of lanes."""

from __future__ import annotations

import threading

import pytest

from harness.names import UsageError
from harness.ops.block_copy import BlockCopyCase
from harness.ops.layouts import HND
from harness.options import Options
from harness.record import unit_of
from harness.registry import Entry, Impl
from harness.spread import TRIES, LaneLost, Spread
from harness.work import Work, lost_record

CASES = [
    BlockCopyCase(name=f"copy.{i}", num_kv_heads=1, head_dim=16, block_size=4, num_copies=4, num_blocks=16) for i in range(6)
]
ENTRIES = [Entry(Impl(name=f"toy.{name}", op="block_copy", prepare="toys:prepare"), HND) for name in "abc"]
TOOLCHAIN = {"torch": "2.13.0", "system": "Linux 6", "revision": "aa"}


def work(cases=CASES, **fields):
    rows = [(case, entry) for case in cases for entry in ENTRIES]
    return Work(options=Options(), device=None, run="r", impl_files=(), rows=rows, **fields)


class ToyLane:
    """Measures at once; `acts` says what it does instead at a case, or as it introduces itself."""

    def __init__(self, crew, name, slug="toy", toolchain=TOOLCHAIN, acts=None):
        self.crew, self.name, self.acts = crew, name, acts or {}
        self.facts = {"device": {"slug": slug, "kind": "cpu", "name": name}, "toolchain": toolchain, "selftest": {"by": name}}
        self.stopped, self.is_closed = threading.Event(), False
        self.threads = set()

    def introduce(self):
        return self._act("hello") or dict(self.facts)

    def measure(self, rows, say):
        case = rows[0][0].name
        say(f"{self.name}: {case}")
        self.crew.handed.append((case, self.name))
        self._act(case)
        records = [lost_record(work(), self.facts, "failed", "a toy", *row) for row in rows]
        return records, {"check": 1.0}

    def _act(self, at):
        self.threads.add(threading.get_ident())
        act = self.acts.get(at, self.acts.get("*"))
        return act(self) if act else None

    def stop(self):
        self.stopped.set()

    def close(self):
        self.is_closed = True


class ToyCrew:
    """Two lanes, x and y, unless told otherwise; `spares` take the place of lost ones."""

    option = "--toys"

    def __init__(self, lanes=(("x", {}), ("y", {})), spares=()):
        self.handed, self.is_closed, self.num_wanted = [], False, None
        self.given = [ToyLane(self, name, **fields) for name, fields in lanes]
        self._spares = [ToyLane(self, name, **fields) for name, fields in spares]
        self.all = [*self.given, *self._spares]

    def lanes(self, at_most):
        self.num_wanted = at_most
        return self.given[:at_most]

    def replacement(self):
        return self._spares.pop(0) if self._spares else None

    def close(self):
        self.is_closed = True


def lose(lane):
    raise LaneLost("the node has died")


def refuse(lane):
    raise UsageError("no such device")


def wait(lane):
    """As a lane at work: until it is stopped."""
    assert lane.stopped.wait(20)
    raise LaneLost("stopped")


def names(records):
    return [(record.case, record.impl) for record in records]


ALL = [(case.name, entry.impl.name) for case in CASES for entry in ENTRIES]


def test_every_row_has_one_record_and_every_case_one_lane():
    """Rows of a case come together, in the order of its lane; all lanes take part."""
    crew = ToyCrew()
    records = list(Spread(work(), crew).records())
    by_case = [names(records)[at : at + 3] for at in range(0, len(records), 3)]

    assert sorted(names(records)) == ALL
    assert sorted(by_case) == [ALL[at : at + 3] for at in range(0, len(ALL), 3)]
    assert {lane for _, lane in crew.handed} == {"x", "y"}
    assert all(len({r.unit["name"] for r in records if r.case == case.name}) == 1 for case in CASES)
    assert not any(record.flags for record in records)
    assert all(lane.is_closed and len(lane.threads) == 1 for lane in crew.all)
    assert crew.is_closed


def test_facts_are_the_runs_and_each_devices_own():
    """What readers of run.json know stands where it stood; self-tests and devices of all lanes stand beside it."""
    engine = Spread(work(), ToyCrew())
    list(engine.records())

    assert (engine.facts["device"]["slug"], engine.facts["toolchain"]) == ("toy", TOOLCHAIN)
    assert [(own["lane"], own["selftest"]) for own in engine.facts["devices"]] == [("x", {"by": "x"}), ("y", {"by": "y"})]
    assert engine.facts["spent_s"] == {"check": 6.0}


def test_no_more_lanes_than_cases_are_begun():
    crew = ToyCrew()
    assert len(list(Spread(work(CASES[:1]), crew).records())) == 3
    assert crew.num_wanted == 1


def test_nothing_to_do_begins_nothing():
    """A resumed run that lacks no row."""
    crew = ToyCrew()
    assert list(Spread(work([]), crew).records()) == []
    assert crew.num_wanted is None


def test_what_lanes_say_is_passed_on_in_the_callers_thread():
    """A bar on a terminal is drawn by one thread."""
    said = []
    list(Spread(work(), ToyCrew(), lambda text: said.append((text, threading.get_ident()))).records())

    assert {text.partition(": ")[2] for text, _ in said} == {case.name for case in CASES}
    assert {thread for _, thread in said} == {threading.get_ident()}


def test_a_lost_lanes_case_is_run_again_elsewhere():
    """Once, whole, and its rows say so; nothing is doubled, and the lane is asked nothing more."""
    crew = ToyCrew([("x", {"acts": {"*": None, "copy.0": lose}}), ("y", {})])
    records = list(Spread(work(), crew).records())

    assert sorted(names(records)) == ALL
    assert {r.case for r in records if r.flags} == {"copy.0"}
    assert {r.flags for r in records if r.case == "copy.0"} == {("run again, lost with x: the node has died",)}
    assert [lane for case, lane in crew.handed if case == "copy.0"] == ["x", "y"]
    assert [case for case, lane in crew.handed if lane == "x"] == ["copy.0"]
    assert crew.given[0].is_closed


def test_another_lane_takes_a_lost_ones_place():
    """It introduces itself as the first ones did, and is among the run's devices."""
    crew = ToyCrew([("x", {"acts": {"copy.0": lose}})], spares=[("z", {})])
    engine = Spread(work(), crew)

    assert sorted(names(engine.records())) == ALL
    assert {lane for _, lane in crew.handed} == {"x", "z"}
    assert [own["lane"] for own in engine.facts["devices"]] == ["x", "z"]


def test_a_case_that_is_lost_each_time_is_given_up():
    """After so many lanes its rows have failed, with every lane's end; all other cases are measured."""
    deadly = {"acts": {"copy.2": lose}}
    crew = ToyCrew([("x", deadly)], spares=[(f"z{i}", deadly) for i in range(TRIES)])
    records = list(Spread(work(), crew).records())
    given_up = [record for record in records if record.case == "copy.2"]

    assert sorted(names(records)) == ALL
    assert [lane for case, lane in crew.handed if case == "copy.2"] == ["x", "z0", "z1"]
    assert {r.status for r in given_up} == {"failed"}
    assert given_up[0].reason == (
        "lost with its worker 3 times: x: the node has died; z0: the node has died; z1: the node has died"
    )


@pytest.mark.parametrize(
    ("spares", "says"),
    [
        ([], "no worker is left (x: the node has died)"),
        ([("z", {"acts": {"hello": wait}})], "no worker has come in 0 s"),
        ([("z", {"acts": {"hello": lose}})], "no worker is left (x: the node has died)"),
    ],
)
def test_when_the_last_lane_is_lost_the_run_ends_in_one_line(spares, says):
    """At once, or when none has come in its place for a while; what was measured has been handed over."""
    crew = ToyCrew([("x", {"acts": {"copy.1": lose}})], spares)
    with pytest.raises(UsageError) as caught:
        list(Spread(work(stall_s=0.1), crew).records())

    assert str(caught.value) == f"--toys: {says}; --resume r goes on"
    assert crew.is_closed
    assert [case for case, _ in crew.handed] == ["copy.0", "copy.1"]


def test_a_lane_that_never_comes_is_stopped():
    """One that waits for room in a cluster which has none holds up nobody."""
    crew = ToyCrew([("x", {"acts": {"copy.0": lose}}), ("y", {})], spares=[("z", {"acts": {"hello": wait}})])
    records = list(Spread(work(), crew).records())

    assert sorted(names(records)) == ALL
    assert crew.all[-1].stopped.is_set()
    assert crew.all[-1].is_closed


@pytest.mark.parametrize(
    ("lanes", "says"),
    [
        ([("x", {}), ("y", {"slug": "other"})], "--toys: a run has one kind of device; x has toy, y has other"),
        (
            [("x", {}), ("y", {"toolchain": {**TOOLCHAIN, "torch": "2.11.0"}})],
            "--toys: a run has one toolchain; x has torch 2.13.0, y has torch 2.11.0",
        ),
        (
            [("x", {}), ("y", {"toolchain": {**TOOLCHAIN, "triton": "3.6"}})],
            "--toys: a run has one toolchain; x has triton missing, y has triton 3.6",
        ),
        ([("x", {}), ("y", {"acts": {"hello": refuse}})], "no such device"),
        ([("x", {"acts": {"hello": lose}}), ("y", {"acts": {"hello": refuse}})], "x: the node has died; y: no such device"),
    ],
)
def test_lanes_that_do_not_go_together_measure_nothing(lanes, says):
    """The line names who differs in what."""
    crew = ToyCrew(lanes)
    with pytest.raises(UsageError) as caught:
        list(Spread(work(), crew).records())

    assert sorted(str(caught.value).split("; ")) == sorted(says.split("; "))
    assert crew.handed == []
    assert all(lane.is_closed for lane in crew.all)


def test_kernels_of_the_system_may_differ():
    """Nodes of one cluster seldom run one build of it."""
    crew = ToyCrew([("x", {}), ("y", {"toolchain": {**TOOLCHAIN, "system": "Linux 5"}})])

    assert sorted(names(Spread(work(), crew).records())) == ALL


def test_wrong_usage_found_late_ends_the_run():
    """As on one device: what a worker calls wrong usage is not tried elsewhere; the line says whose it is."""
    crew = ToyCrew([("x", {"acts": {"copy.0": refuse}}), ("y", {"acts": {"*": wait, "hello": lambda lane: None}})])
    with pytest.raises(UsageError, match="x: no such device"):
        list(Spread(work(), crew).records())

    assert all(lane.is_closed for lane in crew.all)


@pytest.mark.parametrize("how", ["interrupt", "close"])
def test_whoever_stops_listening_leaves_no_lane(how):
    """Ctrl-C, or a caller that takes no more records: lanes are stopped in the middle of their cases."""

    def interrupt(said):
        if how == "interrupt" and said == "y: copy.1":
            raise KeyboardInterrupt

    busy = {"hello": lambda lane: None, "copy.0": lambda lane: None, "*": wait}
    crew = ToyCrew([("x", {"acts": busy}), ("y", {"acts": busy})])
    coming = Spread(work(), crew, interrupt).records()
    if how == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            list(coming)
    else:
        next(coming)
        coming.close()

    assert all(lane.is_closed for lane in crew.all)
    assert any(lane.stopped.is_set() for lane in crew.all)
    assert crew.is_closed


def test_two_lanes_on_one_gpu_are_refused():
    """Whatever each calls it: they would time each other. Lanes whose devices have no UUID, as CPUs, may share."""
    crew = ToyCrew(lanes=(("x", {}), ("y", {}), ("z", {})))
    for lane, uuid in zip(crew.given, ("GPU-1", "GPU-2", "GPU-1"), strict=True):
        lane.facts["device"]["uuid"] = uuid

    with pytest.raises(UsageError, match="--toys: x and z are one GPU, GPU-1; name it once"):
        list(Spread(work(), crew).records())
    assert (crew.handed, crew.is_closed) == ([], True)

    crew = ToyCrew()
    for lane in crew.given:
        lane.facts["device"]["uuid"] = ""
    assert len(list(Spread(work(), crew).records())) == len(ALL)


def test_a_unit_is_the_device_and_its_uuid():
    assert unit_of({"name": "cuda:1", "uuid": "GPU-7", "slug": "toy"}) == {"name": "cuda:1", "uuid": "GPU-7"}
    assert unit_of({"name": "cpu", "uuid": ""}) == {"name": "cpu"}

"""A Ray cluster runs what one device would: same records, same order; what is lost with a worker or a node is run again."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from harness import cluster, node
from harness.cli import main
from harness.names import UsageError
from harness.options import Options
from harness.spread import LaneLost
from harness.store import load
from harness.work import Work

HOUSE = Path(node.__file__).parent.parent
needs_ray = pytest.mark.skipif(not cluster.has_ray(), reason="Ray is not installed: pip install '.[ray]'")

#: Two implementations that each end, once, something that the run stands on: its Ray worker, and the whole Ray node.
TOYS = """
import os, signal, time
from pathlib import Path
from harness.registry import Impl

def prepare(spec):
    from impls.torch_block_copy import prepare
    return prepare(spec)

def kill_once(name, pid):
    try:
        Path(os.environ["TOY_MARKS"], name).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(pid, signal.SIGKILL)
    time.sleep(60)

def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def prepare_worker(spec):
    kill_once("worker", os.getppid())
    return prepare(spec)

def prepare_node(spec):
    kill_once("node", parent_of(os.getppid()))
    return prepare(spec)

def toy(name, prepare):
    return Impl(name=f"toy.{name}", op="block_copy", prepare=prepare)

IMPLS = (toy("right", "toys:prepare"), toy("worker", "toys:prepare_worker"), toy("node", "toys:prepare_node"))
"""
CLUSTER = """
import os, sys
from ray.cluster_utils import Cluster
from harness.cli import main

quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": quick})
for _ in range(2):
    nodes.add_node(wait=False, num_cpus=1)
nodes.wait_for_nodes()
os.environ["RAY_ADDRESS"] = nodes.address
code = main(sys.argv[1:])
nodes.shutdown()
sys.exit(code)
"""


def case_file(folder, count):
    shape = {"op": "block_copy", "num_kv_heads": 1, "head_dim": 16, "block_size": 4, "num_blocks": 16}
    (folder / "cases.json").write_text(json.dumps([{**shape, "name": f"copy.{i}", "num_copies": i + 1} for i in range(count)]))
    return str(folder / "cases.json")


@needs_ray
def test_what_is_lost_with_a_worker_or_a_node_is_run_again(tmp_path):
    """Both are killed in the middle of a case; nothing is lost, nothing doubled, and the order is that of one device."""
    (tmp_path / "toys.py").write_text(TOYS)
    (tmp_path / "marks").mkdir()
    words = ["check", "--impl-file", str(tmp_path / "toys.py"), "--impl", "toy.*", "--case-file", case_file(tmp_path, 5)]
    env = {**os.environ, "TOY_MARKS": str(tmp_path / "marks"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOUSE)}
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER, *words, "--engine", "ray", "--out", str(tmp_path / "runs")],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    records, problems = load(folder)

    assert not problems
    names = ("toy.right", "toy.worker", "toy.node")
    assert [(r.case, r.impl, r.status) for r in records] == [(f"copy.{i}", name, "ok") for i in range(5) for name in names]
    assert sorted(mark.name for mark in (tmp_path / "marks").iterdir()) == ["node", "worker"]
    again = {r.case for r in records if r.flags}
    assert 1 <= len(again) <= 2
    assert all(flag.startswith("run again, lost with ") for r in records for flag in r.flags)
    assert all(r.unit["node"] for r in records)
    assert "ended_at" in json.loads((folder / "run.json").read_text())


# Ray as far as it is used here: what an actor is asked is answered, or its end is told.
class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class Answer:
    def __init__(self, found):
        self.found = found


class ToyRay:
    """A cluster of `whole` resources, `free` ones left; actors answer from `answers`, by what they are asked."""

    class exceptions:
        RayError, RayTaskError = RayError, RayTaskError

    def __init__(self, whole=None, free=None, answers=None):
        self.whole = whole or {"CPU": 4.0}
        self.free = self.whole if free is None else free
        self.answers = answers or {}
        self.options, self.killed, self.is_shut = [], [], False

    def init(self, **_):
        pass

    def cluster_resources(self):
        return self.whole

    def available_resources(self):
        return self.free

    def remote(self, kind):
        return Remote(self)

    def get(self, answer, timeout=None):
        if isinstance(answer.found, Exception):
            raise answer.found
        return answer.found

    def kill(self, actor):
        self.killed.append(actor)

    def shutdown(self):
        self.is_shut = True


class Remote:
    """An actor's class, the actor, and its method: each is asked one thing only."""

    def __init__(self, ray):
        self.ray, self.answer = ray, self

    def options(self, **options):
        self.ray.options.append(options)
        return self

    def remote(self, what, *_):
        return Answer(self.ray.answers.get(what, {})) if isinstance(what, str) else self


def work(device=None, impl_files=()):
    return Work(options=Options(), device=device, run="r", impl_files=impl_files, rows=())


@pytest.mark.parametrize(
    ("whole", "free", "device", "is_timed", "says"),
    [
        ({"CPU": 4.0}, None, "cuda", False, "--device cuda: no node of the cluster has a GPU"),
        ({"CPU": 4.0}, None, None, True, "workers on CPUs share cores and would time each other; there it can only `check`"),
        ({"CPU": 4.0, "GPU": 2.0}, None, "cpu", True, "can only `check`"),
        ({"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0}, None, True, "all 2 GPUs of the cluster are in use"),
    ],
)
def test_what_the_cluster_cannot_give_is_told(whole, free, device, is_timed, says):
    with pytest.raises(UsageError, match=says):
        cluster.Cluster(ToyRay(whole, free), work(device), is_timed).lanes(at_most=8)


def test_a_gpu_of_a_node_cannot_be_named():
    """Ray chooses it, and shows an actor that one only."""
    with pytest.raises(UsageError, match=r"Ray chooses the GPUs; --device may be cuda or cpu \(got 'cuda:1'\)"):
        cluster.Cluster(ToyRay(), work("cuda:1"), is_timed=True)


@pytest.mark.parametrize(("free", "at_most", "count"), [(8.0, 3, 3), (2.0, 3, 2)])
def test_each_lane_holds_a_gpu_to_itself(free, at_most, count):
    """No more lanes than free GPUs or cases, and Ray is not to run anything again by itself."""
    ray = ToyRay({"CPU": 64.0, "GPU": 8.0}, {"GPU": free})
    lanes = cluster.Cluster(ray, work(), is_timed=True).lanes(at_most)

    assert len(lanes) == len(ray.options) == count
    for options in ray.options:
        assert (options["num_gpus"], options["max_restarts"], options["max_task_retries"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        ({"error": "gpu-7 has another pagedbench"}, UsageError, "gpu-7 has another pagedbench"),
        (RayError("The actor died.\n\tclass_name: A\nIt is dead because its node has died."), LaneLost, "because its node"),
        (RayTaskError("KeyError: 'rows'"), RayTaskError, "KeyError"),
    ],
)
def test_what_becomes_of_an_actor_is_told_apart(answer, error, says):
    """What it refuses, that it is gone, and a fault of ours that it met."""
    (lane,) = cluster.Cluster(ToyRay(answers={"introduce": answer}), work(), is_timed=False).lanes(at_most=1)

    with pytest.raises(error, match=says):
        lane.introduce()


def test_a_lane_that_is_done_puts_its_things_away_and_a_lost_one_is_killed():
    """Nobody is asked who cannot answer; Ray is told to end each."""
    ray = ToyRay(answers={"introduce": {"node": "gpu-7/ab"}, "close": RayError("too late")})
    done, stopped = cluster.Cluster(ray, work(), is_timed=False).lanes(at_most=2)
    assert done.introduce() == {}
    done.close()
    stopped.stop()
    stopped.close()

    assert done.name == "gpu-7/ab"
    assert len(ray.killed) == 3


class NodeRay:
    """Ray as an actor sees it, on the GPU numbered 3 of a node."""

    @staticmethod
    def remote(kind):
        return kind

    @staticmethod
    def get_gpu_ids():
        return [3]

    @classmethod
    def get_runtime_context(cls):
        return cls

    @staticmethod
    def get_node_id():
        return "0123456789abcdef"


class ToyNode:
    def __init__(self, asked):
        self.asked = asked

    def introduce(self):
        return {"asked": self.asked}

    def measure(self, rows):
        raise UsageError(f"nothing is measured of {rows}")

    def close(self):
        pass


@pytest.fixture
def actor(monkeypatch):
    """Makes what runs on a node, told what the driver's code is."""
    monkeypatch.setitem(sys.modules, "ray", NodeRay)
    monkeypatch.setattr("platform.node", lambda: "gpu-7")
    monkeypatch.setattr(node, "Node", ToyNode)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return lambda identity: cluster._actor(NodeRay)({"run": "r"}, identity, str(HOUSE))


def test_an_actor_answers_for_its_node(actor):
    """With the node's name; what is wrong usage there is so here, and nothing is no error."""
    here = actor(node.identity())

    assert here.answer("introduce") == {"asked": {"run": "r"}, "node": "gpu-7/01234567:3"}
    assert here.answer("measure", "rows") == {"error": "nothing is measured of rows"}
    assert here.answer("close") == {"node": "gpu-7/01234567:3"}


def test_a_node_with_other_code_is_refused_by_name(actor):
    """Before it is sent anything to run."""
    here = actor({"version": "9.9.9", "code": "0"})

    assert here.answer("introduce") == {
        "error": f"gpu-7/01234567:3 has another pagedbench, {node.identity()}; here is {{'version': '9.9.9', 'code': '0'}}"
    }
    assert here.node is None


def test_a_node_without_pagedbench_is_refused_by_name(actor, monkeypatch):
    """It cannot say so with our code, so Ray sends the line along."""
    here = actor(node.identity())
    monkeypatch.delattr("harness.node")
    monkeypatch.setitem(sys.modules, "harness.node", None)

    assert here.answer("introduce")["error"].startswith("gpu-7/01234567:3 has no pagedbench of this revision: ")


@pytest.mark.parametrize("is_folder", [False, True], ids=["nothing", "a folder of that name"])
def test_without_ray_there_is_one_line(monkeypatch, capsys, tmp_path, is_folder):
    """It says how to get it, and no run is begun; a folder named ray where Python searches can be imported, and is not Ray."""
    (tmp_path / "ray").mkdir()
    folder = importlib.util.module_from_spec(PathFinder.find_spec("ray", [str(tmp_path)]))
    monkeypatch.setitem(sys.modules, "ray", folder if is_folder else None)

    assert main(["check", "--suite", "smoke", "--engine", "ray", "--out", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == f"pagedbench: --engine ray: Ray is not installed; {cluster.HOW}\n"
    assert not (tmp_path / "runs").exists()

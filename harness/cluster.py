"""The devices of a Ray cluster as lanes: an actor each, which holds a GPU and runs a node's end of it (node.py).

Ray is imported here alone, and only when it is asked for. It finds free GPUs, carries plain data and tells which actor
was lost; what a lost case means is said in spread.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from harness import node
from harness.names import UsageError
from harness.record import Record, parse_line
from harness.rooms import HOUSE
from harness.spread import Facts, LaneLost, Say
from harness.words import of_error, shortened
from harness.work import Rows, Work, rows_to_json

OPTION = "--engine ray"
HOW = "pip install 'pagedbench[ray]', here and on every node"
#: Seconds in which a cluster must be found at its address.
CONNECT_S = 10.0
#: Seconds that a node is given to put its things away.
CLOSE_S = 10.0


def find_ray() -> Any:
    """Return the module. Raises UsageError, saying how to get it, where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a measurement reports to nobody unasked
    if not has_ray():
        raise UsageError(f"{OPTION}: Ray is not installed; {HOW}")
    return importlib.import_module("ray")


def has_ray() -> bool:
    """Whether Ray is installed. A folder of that name, where Python searches, can be imported too, and has no file."""
    spec = importlib.util.find_spec("ray")
    return spec is not None and spec.origin is not None


class Cluster:
    """The free GPUs of the cluster that Ray finds: that of RAY_ADDRESS, or one on this machine, begun if need be.

    Where the cluster has no GPU, or `work` asks for the CPU, its free cores are lanes: these check and are not timed.
    """

    option = OPTION

    def __init__(self, ray: Any, work: Work, is_timed: bool) -> None:
        if work.device not in (None, "cpu", "cuda"):
            raise UsageError(f"{OPTION}: Ray chooses the GPUs; --device may be cuda or cpu (got {work.device!r})")
        self._ray, self._work, self._is_timed = ray, work, is_timed
        self._asked: dict[str, Any] = {}
        self._identity = node.identity()
        self._resource = "GPU"
        self._count = 0

    def lanes(self, at_most: int) -> Sequence[RayLane]:
        """Join the cluster; a lane for each GPU that is free now."""
        node.ask(self._work, "")  # before minutes may pass: files that cannot be sent
        self._join()
        whole, free = self._ray.cluster_resources(), self._ray.available_resources()
        has_gpus = whole.get("GPU", 0) >= 1
        if self._work.device == "cuda" and not has_gpus:
            raise UsageError(f"{OPTION} --device cuda: no node of the cluster has a GPU")
        self._resource = "CPU" if self._work.device == "cpu" or not has_gpus else "GPU"
        if self._resource == "CPU" and self._is_timed:
            raise UsageError(f"{OPTION}: workers on CPUs share cores and would time each other; there it can only `check`")
        count = min(at_most, int(free.get(self._resource, 0)))
        if not count:
            raise UsageError(f"{OPTION}: all {whole.get(self._resource, 0):.0f} {self._resource}s of the cluster are in use")
        self._asked = node.ask(self._work, "cpu" if self._resource == "CPU" else "cuda:0")
        return [self.replacement() for _ in range(count)]

    def _join(self) -> None:
        where = os.environ.get("RAY_ADDRESS", "")
        host, _, port = where.rpartition(":")
        try:
            if port.isdecimal() and "/" not in host:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), CONNECT_S).close()
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises what its parts raise: no such address, other versions, no room on the disk
            raise UsageError(f"{OPTION}: no cluster at {where or 'this machine'}: {of_error(error)}") from error

    def replacement(self) -> RayLane:
        """A new actor, wherever there is room for it, once there is."""
        self._count += 1
        actor = _actor(self._ray).options(
            num_cpus=1, num_gpus=int(self._resource == "GPU"), max_restarts=0, max_task_retries=0,
            scheduling_strategy="SPREAD",
        )  # fmt: skip
        return RayLane(self._ray, actor.remote(self._asked, self._identity, str(HOUSE)), f"worker {self._count}")

    def close(self) -> None:
        """Leave the cluster, and end one that was begun for this run."""
        self._ray.shutdown()


class RayLane:
    """One actor. `name` is the node's once the lane has introduced itself."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self.name = name
        self._ray, self._actor = ray, actor
        self._is_gone = False

    def introduce(self) -> Facts:
        facts = self._ask("introduce")
        self.name = facts.pop("node")
        return facts

    def measure(self, rows: Rows, say: Say) -> tuple[list[Record], Mapping[str, float]]:
        say(f"{self.name}: {rows[0][0].name}")
        answer = self._ask("measure", rows_to_json(dict(enumerate(rows))))
        records = [parse_line(line) for line in answer["records"]]
        records = [dataclasses.replace(record, unit={**record.unit, "node": self.name}) for record in records]
        return records, answer["spent_s"]

    def _ask(self, what: str, *given: Any) -> dict[str, Any]:
        """Wait for the actor's answer. Raises UsageError where it says so, LaneLost where it or its node is gone."""
        try:
            answer: dict[str, Any] = self._ray.get(self._actor.answer.remote(what, *given))
        except self._ray.exceptions.RayTaskError:  # the actor lives, and has met a fault of ours
            raise
        except self._ray.exceptions.RayError as error:
            self._is_gone = True
            raise LaneLost(_in_short(error)) from error
        if "error" in answer:
            raise UsageError(answer["error"])
        return answer

    def stop(self) -> None:
        self._is_gone = True
        self._ray.kill(self._actor)

    def close(self) -> None:
        if not self._is_gone:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(self._actor.answer.remote("close"), timeout=CLOSE_S)
        self._ray.kill(self._actor)  # it may be out of reach and not dead


def _actor(ray: Any) -> Any:
    """The actor's class. It stands in a function so that Ray sends its code: a node that lacks ours is to say so itself."""

    class Actor:
        def __init__(self, asked: dict[str, Any], identity: dict[str, str], house: str) -> None:
            self.asked, self.identity, self.house = asked, identity, house
            self.node: Any = None

        def answer(self, what: str, *given: Any) -> dict[str, Any]:
            import platform
            import sys

            here = importlib.import_module("ray")
            gpus = "".join(f":{index}" for index in here.get_gpu_ids())
            name = f"{platform.node()}/{here.get_runtime_context().get_node_id()[:8]}{gpus}"
            if self.house not in sys.path:
                sys.path.append(self.house)  # a checkout in the same place will do
            try:
                from harness import node
                from harness.names import UsageError
            except ImportError as error:
                return {"error": f"{name} has no pagedbench of this revision: {error}; install it there"}
            found = node.identity()
            if found != self.identity:
                return {"error": f"{name} has another pagedbench, {found}; here is {self.identity}"}
            try:
                if self.node is None:
                    self.node = node.Node(self.asked)
                return {**(getattr(self.node, what)(*given) or {}), "node": name}
            except UsageError as error:
                return {"error": str(error)}

    return ray.remote(Actor)


def _in_short(error: Exception) -> str:
    """Ray explains at length; what counts is the cause, in a line's beginning."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = next((line for line in lines if "because" in line), lines[0])
    return shortened(cause, 120)

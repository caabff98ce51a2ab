"""Options that say where rows are run, and the engine that they choose: one device's worker, unless told otherwise."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from harness.machine import Machine, devices_of
from harness.names import UsageError, above_0, text_of
from harness.record import Record
from harness.registry import Registry
from harness.sanitize import Sanitized, find_program
from harness.spread import Spread
from harness.supervisor import Supervisor
from harness.work import STALL_S, Engine, Work

Say = Callable[[str], None]
MakeEngine = Callable[[Work, Say], Engine]


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add --devices, --engine, --in-process and --stall."""
    add = parser.add_argument
    add(
        "--devices", type=text_of, metavar="NAMES",
        help="all GPUs of this machine ('all') or some ('cuda:0,cuda:1'), of one kind: each works at a case of its own",
    )
    add(
        "--engine", choices=("local", "ray"), default="local",
        help="ray: the GPUs of a Ray cluster, that of RAY_ADDRESS or of this machine (default: %(default)s)",
    )
    add("--in-process", action="store_true", help="no worker process, for debuggers: a crash ends the run")
    add(
        "--stall",
        type=above_0("seconds"),
        default=STALL_S,
        metavar="SECONDS",
        help="silence after which a worker is killed (default: %(default).0f)",
    )


def engine_of(arguments: argparse.Namespace, registry: Registry) -> MakeEngine:
    """Return what makes the engine that was asked for. Raises UsageError for what cannot be meant or is not there."""
    tool, devices = getattr(arguments, "sanitize", None), arguments.devices
    _refuse_several(arguments, tool)
    is_timed = arguments.command not in ("check", "audit")
    if arguments.in_process:
        return lambda work, say: InProcess(work, registry, say)
    if tool is not None:
        find_program(tool)
        return lambda work, say: Sanitized(work, tool, say)
    if devices is not None:
        names = devices_of(devices, is_timed)
        return lambda work, say: Spread(work, Machine(work, names), say)
    if arguments.engine == "ray":
        from harness.cluster import Cluster, find_ray

        ray = find_ray()
        return lambda work, say: Spread(work, Cluster(ray, work, is_timed), say)
    return Supervisor


def _refuse_several(arguments: argparse.Namespace, tool: str | None) -> None:
    """Each of these says how rows are run."""
    asked = {
        "--in-process": arguments.in_process,
        f"--sanitize {tool}": tool is not None,
        "--devices": arguments.devices is not None,
        "--engine ray": arguments.engine == "ray",
    }
    ways = [way for way, is_asked in asked.items() if is_asked]
    if len(ways) > 1:
        raise UsageError(f"{ways[0]} and {ways[1]}: each says how rows are run; leave out one")
    if arguments.devices is not None and arguments.device is not None:
        raise UsageError("--device and --devices: each says which devices work; leave out one")


class InProcess:
    """Rows measured in this process, for debuggers: a kernel that crashes takes the run with it."""

    def __init__(self, work: Work, registry: Registry, progress: Say) -> None:
        self.work, self.registry, self.progress = work, registry, progress
        self.facts: dict[str, Any] = {}

    def records(self) -> Iterator[Record]:
        """Yield a record for every row until the device is lost, which is a UsageError here."""
        from harness.session import DeviceLost, Session, Task

        session = Session(self.work.options, self.registry, self.work.device, self.work.run)
        self.work.require_device(session.facts())
        self.facts = session.facts()
        tasks = [Task(number=number, case=case, entry=entry) for number, (case, entry) in enumerate(self.work.rows)]
        try:
            for _, record in session.run_tasks(tasks, lambda doing, _: self.progress(doing)):
                yield record
        except DeviceLost as lost:
            raise UsageError(f"{lost}; without --in-process the rest of the run would go on") from lost

"""One arm of a comparison: a worker that prepares the rows of a case, then visits each when it is told to. See duel.py.

The harness is that of this checkout in both arms, one instrument; an arm's implementations are those of its tree.

Lines it reads: first what it is, then for each case {"case": ..., "rows": [{"number", "entry", "params"}]}. Once rows are
ready it says {"ready": numbers} and takes {"visit": number}, answered by {"seconds": one median, or null if the clock was
held down}, {"spin": {number: seconds}}, answered by {"ready": numbers}, and {"finish": true}. Between and after them come
{"record", "row"} for every row, and {"done": true} after a case. {"hello"}, {"doing"}, {"lost"}
and {"error"} are as in worker.py.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.channel import Channel, serve
from harness.device import find_device, revision
from harness.names import UsageError
from harness.ops import case_from_json
from harness.options import Options
from harness.registry import Entry, Registry, default_registry, load_file
from harness.rooms import HOUSE
from harness.row import Row
from harness.session import DeviceLost, Session, Task
from harness.strays import strays
from harness.trees import checkouts_of
from harness.words import of_error


def main(channel: int) -> None:
    """Be an arm until standard input ends; `channel` is the descriptor that the parent reads."""
    serve(channel, _work)


def _work(parent: Channel) -> None:
    lines = parent.asked()
    try:
        _serve(next(lines), lines, parent)
    except DeviceLost as lost:
        parent.give_up(lost=str(lost))


def _serve(asked: dict[str, Any], lines: Iterator[dict[str, Any]], parent: Channel) -> None:
    """Work through the cases that come, one after the other."""
    tree, tell = Path(asked["tree"]), parent.tell
    find_device(asked["device"]).make_current()  # before users' files are run: what they make on "cuda" is to lie there
    registry = registry_of(tree, asked["impl_files"])
    session = _ArmSession(asked, registry, parent, lines)
    version = revision(tree.resolve())
    rows = [str(Entry(impl, layout)) for impl in registry if impl.role == "implementation" for layout in impl.layouts]
    tell(hello={**session.facts(), "revision": version, "rows": rows})
    for work in lines:
        case = case_from_json(work["case"])
        tasks = [
            Task(number=row["number"], case=case, entry=entry)
            for row in work["rows"]
            if (entry := _entry(registry, row["entry"], row["params"])) is not None
        ]
        for number, record in session.run_tasks(tasks, lambda doing, row: tell(doing=doing, row=row)):
            toolchain = {**record.toolchain, "revision": version}
            tell(record=dataclasses.replace(record, toolchain=toolchain).to_line(), row=number)
        tell(done=True)


def registry_of(tree: Path, impl_files: Sequence[str]) -> Registry:
    """The table of implementations of a checkout, its own modules behind it. UsageError where it has none.

    For another checkout than this one it must be asked before anything has imported `impls`.
    """
    if tree.resolve() == HOUSE:
        return default_registry(impl_files, rehearsed=True)
    page = tree / "impls" / "__init__.py"
    if not page.is_file():
        raise UsageError(f"{tree} is no checkout of pagedbench: it has no impls/__init__.py")
    spec = importlib.util.spec_from_file_location("impls", page, submodule_search_locations=[str(page.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["impls"] = module
    try:
        spec.loader.exec_module(module)
        registry = Registry(module.IMPLS)
    except Exception as error:
        raise UsageError(f"the implementations of {tree} do not load: {of_error(error)}") from error
    for path in impl_files:
        registry.add(load_file(path))
    return registry


def _entry(registry: Registry, name: str, params: dict[str, Any]) -> Entry | None:
    """The entry called `name`, or None where this tree has none; the parent tells that it is missing."""
    try:
        (entry,) = registry.entries([name], roles=("implementation", "reader"))
        entry.impl.resolve_params(params)
    except UsageError:
        return None
    return dataclasses.replace(entry, params=params)


class _ArmSession(Session):
    """A session whose rows are visited when the parent says so."""

    def __init__(
        self, asked: dict[str, Any], registry: Registry, parent: Channel, lines: Iterator[dict[str, Any]]
    ) -> None:
        super().__init__(Options(**asked["options"]), registry, asked["device"], asked["run"])
        self._tell, self._lines = parent.tell, lines
        self._tree, self._state = Path(asked["tree"]), asked["state"]

    def visit(self, run: Any, rows: Sequence[Row]) -> None:
        """Do as told until told to finish. Raises UsageError where what is to be timed is not of this arm's state."""
        self._require_own()
        ready = {row.number: row for row in rows}
        self._tell(ready=[number for number, row in ready.items() if row.status == "ok"])
        for asked in self._lines:
            if "finish" in asked:
                for row in rows:
                    if not row.samples and not row.discarded:
                        row.visit()  # the other arm has no such row: one time is worth telling
                return
            if "visit" in asked:
                self._tell(seconds=_visit(ready[asked["visit"]]))
            elif "spin" in asked:
                for number, seconds in asked["spin"].items():
                    _slow_down(run, ready[int(number)], spin(self, seconds))
                self._tell(ready=[number for number, row in ready.items() if row.status == "ok"])
        raise BrokenPipeError("the parent has gone")

    def _require_own(self) -> None:
        """By now rows have been prepared and launched, and have loaded what they run."""
        if not self._state:
            return
        state, checkout = map(Path, self._state)
        # A package may be installed, to be edited, from another worktree of the repository than the one that one stands in.
        places = [place for place in dict.fromkeys((checkout, *checkouts_of(checkout))) if place != state]
        found = [(file, place) for place in places for file in strays(state, place, self._tree)]
        if found:
            (file, place), more = found[0], f" and {len(found) - 1} more" * (len(found) > 1)
            raise UsageError(
                f"the old arm, which is to run {state}, has loaded {file}{more}, which is of {place}: both sides would "
                "run the same; let Python find it within the checkout, by PYTHONPATH, and not by an installation, a link or "
                "a path to one place"
            )


def _visit(row: Row) -> float | None:
    """The seconds of one visit; None where it was discarded, or the row failed, which its record will tell."""
    before = len(row.samples)
    row.visit()
    return row.samples[-1] if len(row.samples) > before else None


class Spinning:
    """An implementation that spins for a while after each of its launches."""

    def __init__(self, prepared: Any, spin: Callable[[], object]) -> None:
        self.prepared, self._spin = prepared, spin

    def __getattr__(self, name: str) -> Any:
        return getattr(self.prepared, name)

    def launch(self, *tensors: Any, **layer: Any) -> None:
        self.prepared.launch(*tensors, **layer)
        self._spin()


def spin(session: Session, seconds: float) -> Callable[[], object]:
    """What keeps the device busy for so long: counted cycles on a GPU, capturable as any kernel; a loop on a CPU."""
    if session.device.kind == "cuda":
        return functools.partial(torch.cuda._sleep, round(seconds * session.selftest["spin_hz"]))

    def busy() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return busy


def _slow_down(run: Any, row: Row, spin: Callable[[], object]) -> None:
    """Let a row's launches spin, in place of what they did before, and make its timer again."""
    row.prepared = Spinning(getattr(row.prepared, "prepared", row.prepared), spin)
    row.samples.clear()
    run.make_timer(row)

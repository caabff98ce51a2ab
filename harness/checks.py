"""The checks of a row: launches on families of inputs, relations, wild block ids, late changes, and what was timed.

Each notes what it found in the row's field "check", ends the row where something is wrong, and returns whether it is right.
"""

from __future__ import annotations

import random

from harness.ops.contract import Staged
from harness.relations import SMALL_BYTES, Broken, Subject, check_relations
from harness.row import Row, Stage


def family(row: Row, stage: Stage, name: str, sets: int | None = None) -> bool:
    """Launch once on every set of a family, or the first `sets`, and judge. `stage` makes the tensors, which may fail."""

    def work() -> None:
        staged = stage()
        row.trial.plan(staged.step)
        for layer in range(staged.num_layers if sets is None else sets):
            row.trial.launch(staged, layer)
            row.measure_memory()
            why = row.trial.look(staged, [layer]) or _judge(row, staged, layer, name)
            covered = dict(staged.coverage())
            if "format_error" in covered:  # not the row's: it stands beside what the row errs
                row.fields["format_error"] = covered.pop("format_error")
            row.fields["check"][name] |= covered
            if why:
                row.end("wrong", f"{name} inputs: {row.trial.late() or why}")
                return

    row.fields.setdefault("check", {})[name] = {}
    return row.attempt(work, f"check with {name} inputs")


def _judge(row: Row, staged: Staged, layer: int, name: str) -> str | None:
    """Judge one layer's outputs and note the worst so far under `name`; return what is wrong."""
    is_reader = row.entry.impl.role == "reader"
    impl = row.entry.impl
    judged = staged.judge_reader(layer, row.prepared) if is_reader else staged.judge(layer, impl.quantises, impl.lse)
    noted, worst = row.fields["check"][name], max(judged.ratios.values(), default=0.0)
    if not judged.passed or worst >= max(noted.get("ratios", {}).values(), default=0.0):
        noted |= judged.to_json()
    return judged.reason


def relations(row: Row, stage: Stage, wanted: str) -> bool:
    """Hold the row to the relations of its operator, where `wanted` ("all", "small", "none") has them run."""
    held: dict[str, str] = {}

    def work() -> None:
        try:
            subject = Subject.of(row.case, row.entry, row.trial, stage(), thorough=wanted == "all")
            why = check_relations(subject, held)
        except Broken as how:
            why = f"one more launch on plain inputs: {how}"
        if why:
            row.end("wrong", why)

    row.fields["check"]["relations"] = held
    if wanted == "none":
        held["not run"] = "--relations none"
    elif wanted == "small" and row.case.cache_bytes > SMALL_BYTES:
        held["not run"] = f"a cache holds more than {SMALL_BYTES >> 20} MiB (--relations all)"
    else:
        return row.attempt(work, "check of relations")
    return True


def wild(row: Row, stage: Stage) -> bool:
    """Check once more with wild block ids in unused table entries: whoever looks one up loses the device."""

    def work() -> None:
        staged = stage()
        step = staged.wild_step()
        if step is None:
            return
        row.fields["check"]["wild"] = {}
        row.trial.plan(step)
        row.trial.launch(staged, 0)
        why = row.trial.look(staged, [0]) or _judge(row, staged, 0, "wild")
        if why:
            row.end("wrong", f"wild block ids in unused table entries: {why}")

    return row.attempt(work, "check with wild block ids in unused table entries")


def late(row: Row) -> bool:
    """Wait a little and see whether outputs still are what they were when their launches had ended."""

    def work() -> None:
        why = row.trial.late()
        if why:
            row.end("wrong", why)

    return row.attempt(work, "check again")


def timed(row: Row, stage: Stage) -> bool:
    """Soil every output, launch once more as was timed; scan all sets, and judge the first, the last and one more."""

    def work() -> None:
        staged = stage()
        assert row.timer is not None
        for layer in range(staged.num_layers):
            staged.soil(layer)
        last = row.timer.num_sets - 1
        judged_layers = sorted({0, last, random.Random(row.case.digest).randint(0, last)})
        launched = row.timer.relaunch(judged_layers)
        row.fields.setdefault("check", {})["timed"] = {}
        why = row.trial.look(staged, launched) or row.trial.late()
        if why:
            row.end("wrong", f"timed launches: {why}")
        scanned = staged.scan(launched, row.entry.impl.lse)
        if scanned:
            row.end("wrong", f"timed launches, {scanned}")
        for layer in judged_layers:
            reason = _judge(row, staged, layer, "timed") if row.status == "ok" else None
            if reason:
                row.end("wrong", f"timed launches, set {layer}: {reason}")
        if row.status == "ok":
            _remembered(row, staged, last)

    # A reader has no outputs; its checksum was judged before it was timed.
    return row.entry.impl.role == "reader" or row.attempt(work, "check of timed launches")


def _remembered(row: Row, staged: Staged, layer: int) -> None:
    """Change what was timed under its own addresses: whoever gathered or answered ahead of time shows."""
    if not staged.mirror(layer):
        return
    try:
        staged.soil(layer)
        assert row.timer is not None
        row.timer.relaunch([layer])
        row.device.synchronize()
        reason = _judge(row, staged, layer, "timed")
    finally:
        staged.mirror(layer)
    if reason:
        row.end("wrong", f"timed launches, set {layer}, other values at the same addresses: {reason}")

"""The checks of a row: launches on families of inputs, relations, wild block ids, late changes, and what was timed.

Each notes what it found in the row's field "check", ends the row where something is wrong, and returns whether it is right.
"""

from __future__ import annotations

import random

from harness.ops.contract import Staged
from harness.relations import SMALL_BYTES, Broken, Shelf, Subject, check_relations
from harness.row import Row, Stage


def family(row: Row, stage: Stage, name: str, sets: int | None = None) -> bool:
    """Launch once on every set of a family, or the first `sets`, and judge. `stage` makes the tensors, which may fail."""

    def work() -> None:
        staged = stage()
        row.trial.plan(staged.step)
        layers = range(staged.num_layers if sets is None else sets)
        why = None
        # A reader keeps the checksum of its last launch alone.
        for some in [[layer] for layer in layers] if row.entry.impl.role == "reader" else [layers]:
            for layer in some:
                row.trial.launch(staged, layer, busy=layer == 0)
                row.measure_memory()
            why = why or row.trial.look(staged, some)
            for layer in some:
                why = why or _judge(row, staged, layer, name)
        covered = dict(staged.coverage())
        if "format_error" in covered:  # not the row's: it stands beside what the row errs
            row.fields["format_error"] = covered.pop("format_error")
        row.fields["check"][name] |= covered
        if why:
            row.end("wrong", f"{name} inputs: {row.trial.late() or why}")

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


def relations(row: Row, stage: Stage, shelf: Shelf, wanted: str) -> bool:
    """Hold the row to its operator's relations where `wanted` ("all", "small", "none") has them run; `shelf` is the case's."""
    held: dict[str, str] = {}

    def work() -> None:
        try:
            subject = Subject.of(row.case, row.entry, row.trial, stage(), shelf, thorough=wanted == "all")
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
        row.trial.launch(staged, 0, busy=True)
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


def timed(row: Row) -> bool:
    """Soil every output, launch once more as was timed; scan all sets, and judge the first, the last and one more. Whether
    outputs stay as they are, `timed_late` looks, once all rows have come so far: it waits."""

    def work() -> None:
        assert row.timer is not None
        assert row.timed_on is not None
        staged = row.timed_on()
        for layer in range(staged.num_layers):
            staged.soil(layer)
        last = row.timer.num_sets - 1
        judged_layers = sorted({0, last, random.Random(row.case.digest).randint(0, last)})
        launched = row.timer.relaunch(judged_layers)
        row.fields.setdefault("check", {})["timed"] = {}
        why = row.trial.look(staged, launched)
        if why:
            row.end("wrong", f"timed launches: {why}")
        scanned = staged.scan(launched, row.entry.impl.lse)
        if scanned:
            row.end("wrong", f"timed launches, {scanned}")
        for layer in judged_layers:
            reason = _judge(row, staged, layer, "timed") if row.status == "ok" else None
            if reason:
                row.end("wrong", f"timed launches, set {layer}: {reason}")
        if row.status == "ok" and not row.owns_outputs:
            _late_and_remembered(row, staged)

    # A reader has no outputs; its checksum was judged before it was timed.
    return row.entry.impl.role == "reader" or row.attempt(work, "check of timed launches")


def timed_late(row: Row) -> bool:
    """Wait a little after `timed`, where the row's outputs are its own and are still there; then change what was timed."""

    def work() -> None:
        assert row.timed_on is not None
        _late_and_remembered(row, row.timed_on())

    is_done = row.entry.impl.role == "reader" or not row.owns_outputs
    return is_done or row.attempt(work, "check of timed launches")


def _late_and_remembered(row: Row, staged: Staged) -> None:
    assert row.timer is not None
    why = row.trial.late()
    if why:
        row.end("wrong", f"timed launches: {why}")
    else:
        _remembered(row, staged, row.timer.num_sets - 1)


def _remembered(row: Row, staged: Staged, layer: int) -> None:
    """Change what was timed under its own addresses, and launch over finite outputs: whoever gathered or answered ahead of
    time shows, and whoever does nothing where something is written already."""
    if not staged.mirror(layer):
        return
    try:
        staged.wear(layer, row.entry.impl.lse)
        assert row.timer is not None
        row.timer.relaunch([layer])
        row.device.synchronize()
        reason = _judge(row, staged, layer, "timed")
    finally:
        staged.mirror(layer)
    if reason:
        row.end("wrong", f"timed launches, set {layer}, other keys and values at the same addresses: {reason}")

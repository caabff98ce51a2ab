"""`profile`: what a kernel takes and waits for: registers, spills, shared memory, and the hardware's counters where ncu is."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import ncu
from harness.commands.selection import (
    add_device,
    apply_settings,
    cases_of,
    entries_of,
    parse_settings,
    registry_of,
    rows_of,
)
from harness.names import UsageError, path_of
from harness.ops.case import Case
from harness.registry import Entry, Registry, Unsupported
from harness.words import of_error

LAUNCHES = 3  # profiled, after as many that warm up
LIMIT_S = 600.0
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from harness.cli import main; sys.exit(main())"
MISSING = "counters: Nsight Compute is not on PATH (ncu, in the CUDA toolkit's folder bin); with it come DRAM bytes and stalls"


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("impl", metavar="IMPL", help="an implementation, e.g. cuda.split_kv or 'cuda.split_kv[NHD]'")
    add("case", metavar="CASE", nargs="?", help="a case; none where --shape or --case-file gives it")
    add("--impl-file", action="append", default=[], metavar="PATH", help="a Python file with a table IMPLS of your own")
    add("--layouts", metavar="NAMES", default="", help="layouts besides the implementation's first, or all (default: none)")
    add("--case-file", action="append", default=[], metavar="PATH", help="a JSON or TOML file of your own cases")
    add("--shape", action="append", default=[], metavar="SHAPE", help="one case, e.g. q=32,kv=8,d=128,bs=16,lens=8192x64")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="an entry's declared parameter")
    add_device(parser)
    add("--json", action="store_true", help="print a line of JSON a row")
    add("--launch-into", type=path_of, help=argparse.SUPPRESS)  # in the child: launch, and say what was prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """One row.

    device      a Device, as plain data
    compiled    what the entry says of its kernels: name, registers, spill_bytes, shared_bytes, ...
    kernels     what ncu counted, a launch; empty with a reason in `missing`
    """

    case: Case
    entry: Entry
    device: Mapping[str, Any]
    compiled: Sequence[Mapping[str, Any]]
    kernels: Sequence[ncu.Kernel] = ()
    missing: str | None = None


def main(arguments: argparse.Namespace) -> int:
    """Profile each row in a process of its own and print it; returns 1 where a row fails."""
    arguments.impl, arguments.suite = [arguments.impl], None
    arguments.case = [] if arguments.case is None else [arguments.case]
    if not (arguments.case or arguments.shape or arguments.case_file):
        raise UsageError("profile needs a case: name one, or give --shape; `pagedbench list --suite NAME` shows a suite's")
    registry = registry_of(arguments)
    arguments.layouts = arguments.layouts or _first_layouts(arguments.impl, registry)
    entries = apply_settings(parse_settings(arguments.set), entries_of(arguments, registry))
    rows = rows_of(cases_of(arguments)[1], entries)
    if arguments.launch_into is not None:
        return launch(*rows[0], arguments.device, arguments.launch_into)
    failed = False
    for case, entry in rows:
        try:
            profile = _profile(case, entry, arguments)
        except ChildFailed as error:
            failed = True
            print(f"{entry} on {case}: {error}", file=sys.stderr)
            continue
        _show(profile, arguments.json)
    return int(failed)


class ChildFailed(Exception):
    """The process that launches came to no end; the message has its last words."""


def _first_layouts(patterns: Sequence[str], registry: Registry) -> str:
    return ",".join({row.impl.layouts[0].name for row in registry.entries(patterns)})


def _show(profile: Profile, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(profile)))
    else:
        from harness.report.counters import profile_text

        print(profile_text(profile))


def _as_json(profile: Profile) -> dict[str, Any]:
    case, entry = profile.case, profile.entry
    return {
        "case": case.name, "case_digest": case.digest, "impl": entry.impl.name, "layout": entry.layout.name,
        "params": entry.impl.resolve_params(entry.params), "traffic_bytes": case.traffic_bytes,
        "device": profile.device["slug"], "compiled": profile.compiled,
        "kernels": [dataclasses.asdict(kernel) for kernel in profile.kernels], "missing": profile.missing,
    }  # fmt: skip


def _profile(case: Case, entry: Entry, arguments: argparse.Namespace) -> Profile:
    """Run the row's child, under ncu where there is one. Raises UsageError where the row, or ncu, cannot run here."""
    program = ncu.find_program()
    with tempfile.TemporaryDirectory(prefix="pagedbench.") as scratch:
        folder = Path(scratch)
        words = _child(folder, case, entry, arguments)
        log = folder / "log"
        code, said = _run(words if program is None else ncu.command(program, log, words), folder / "words")
        told = _told(folder / "told.json")
        if "refused" in told:
            raise UsageError(f"{entry} on {case}: {told['refused']}")
        counted = log.read_text(errors="replace") if log.exists() else ""
    if "compiled" not in told:
        raise ChildFailed(f"ended with exit code {code} before its launches; last words: {said}")
    profile = Profile(case=case, entry=entry, device=told["device"], compiled=told["compiled"], missing=MISSING)
    if not told.get("ended"):
        raise ChildFailed(f"ended with exit code {code} while it launched; last words: {said}")
    if program is None:
        return profile
    try:
        kernels = ncu.medians(ncu.parse(counted), LAUNCHES)
    except ncu.Unreadable as error:
        raise UsageError(f"ncu (exit code {code}) on {entry}, {case}: {error}") from None
    return dataclasses.replace(profile, kernels=kernels, missing=None)


def _child(folder: Path, case: Case, entry: Entry, arguments: argparse.Namespace) -> list[str]:
    """The command line of the process that launches, its case in a file of its own."""
    (folder / "case.json").write_text(json.dumps([case.to_json()]))
    words = [sys.executable, "-c", _START, json.dumps(sys.path), "profile", str(entry)]
    words += ["--case-file", str(folder / "case.json"), "--launch-into", str(folder / "told.json")]
    words += [word for path in arguments.impl_file for word in ("--impl-file", path)]
    words += [word for name, value in entry.params.items() for word in ("--set", f"{name}={value}")]
    return words + (["--device", arguments.device] if arguments.device else [])


def _run(command: Sequence[str], words: Path) -> tuple[int | None, str]:
    """Run a command; return its exit code, None where it was killed after LIMIT_S, and its last words."""
    with words.open("wb") as output:
        # Numbers as English writes them, whatever the locale.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
    return code, words.read_bytes()[-2000:].decode(errors="replace").strip() or "none"


def _told(file: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return told


def launch(case: Case, entry: Entry, device_name: str | None, into: Path) -> int:
    """In the child: prepare, warm up, and launch between the profiler's start and stop; tell `into` what was prepared."""
    import torch

    from harness.device import find_device
    from harness.hazards import TIMED
    from harness.ops import operator

    device = find_device(device_name)
    device.make_current()
    refused = entry.impl.why_not(case, device.kind) or entry.layout.why_not(case)
    try:
        if refused is None:
            params = entry.impl.resolve_params(entry.params)
            prepared = entry.impl.load()(operator(case.op).spec(case, entry.layout, device.name, params))
            staged = operator(case.op).build(case, TIMED, layers=1, device=device.name).stage(entry.layout)
            prepared.plan(staged.step)
    except Unsupported as error:
        refused = of_error(error)
    if refused is not None:
        into.write_text(json.dumps({"refused": refused}))
        return 0
    told = {"device": dataclasses.asdict(device), "compiled": [dict(kernel) for kernel in prepared.kernels]}
    into.write_text(json.dumps(told))
    for _ in range(LAUNCHES):
        prepared.launch(*staged.arguments(0), **staged.keywords(0))
    device.synchronize()
    if device.kind == "cuda":
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    for _ in range(LAUNCHES):
        prepared.launch(*staged.arguments(0), **staged.keywords(0))
    device.synchronize()
    if device.kind == "cuda":
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    into.write_text(json.dumps({**told, "ended": True}))
    return 0

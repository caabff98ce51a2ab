"""The command that runs one row again, quoted for a shell: made of its record, and of what run.json says of its run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.record import Record

#: Options of a run without which a row is not found, or is another one; True: takes a value.
KEPT: Mapping[str, bool] = {
    "--impl-file": True, "--case-file": True, "--shape": True, "--device": True, "--relations": True, "--sanitize": True,
    "--stall": True, "--patient": False,
}  # fmt: skip
#: By the command that made the run, the one that makes a row of it; any other is `run`. Some controls show when timed only.
_COMMANDS = {"check": "check", "bench": "bench", "audit": "bench"}


def command(record: Record, facts: Mapping[str, Any] | None = None) -> str:
    """Return the command that runs exactly this row again; `facts` is its run's run.json, where that is known."""
    facts = facts or {}
    given = facts.get("arguments")
    options = list(_kept(given if isinstance(given, list) else []))
    words = ["pagedbench", _COMMANDS.get(str(facts.get("command")), "run")]
    words += [*_option("--impl", record.row), *_option("--case", record.case)]
    for name, value in record.params.items():
        words += _option("--set", f"{name}={value}")
    if not any(name == "--device" for name, _ in options):
        words += _where(record)
    for name, value in options:
        words += [name] if value is None else _option(name, value)
    return shlex.join(words)


def _where(record: Record) -> list[str]:
    """The device, where it is not the one that would be taken: of a run on several GPUs, a row's own."""
    if record.device_kind == "cpu":
        return ["--device", "cpu"]
    name = record.unit.get("name", "cuda:0")
    return [] if name == "cuda:0" or "node" in record.unit else ["--device", name]


def _kept(arguments: Sequence[Any]) -> Iterator[tuple[str, str | None]]:
    """The options of KEPT among a command's words, whether they read "--name value" or "--name=value"."""
    words = iter(map(str, arguments))
    for word in words:
        name, equals, value = word.partition("=")
        if name in KEPT:
            yield name, (value if equals else next(words, "")) if KEPT[name] else None


def _option(name: str, value: str) -> list[str]:
    """An option's words; a value that begins with "-" would pass for an option."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]

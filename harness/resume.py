"""A run that broke off, continued in its folder: what has a record is not measured again."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.names import UsageError
from harness.record import Record
from harness.store import facts_of, load, run_of
from harness.words import printable, shortened

if TYPE_CHECKING:
    from harness.ops.case import Case
    from harness.registry import Entry

#: Options that say neither which rows there are nor what is measured of each.
MAY_DIFFER = {
    "--out", "--json", "--resume", "--strict-peers", "--device", "--devices", "--engine", "--in-process", "--stall",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """A run's folder, the records it has, of which there are some, and their device."""

    folder: Path
    records: Sequence[Record]
    device: str

    @classmethod
    def read(cls, folder: Path, rows: Sequence[tuple[Case, Entry]], words: Sequence[str]) -> Begun:
        """Read the run in `folder`, to be continued by the command `words` with `rows`.

        Raises UsageError, naming what stands in the way: no run, no record, another command's run, options of it that are not
        given again, records of several devices, or a case that was another one under the same name. What cannot be read, a
        line or run.json, is told on standard error.
        """
        if not folder.is_dir():
            raise UsageError(f"--resume {folder}: no such folder")
        folder = run_of(folder)
        records, problems = load(folder)
        for problem in problems:
            print(f"pagedbench: {problem}", file=sys.stderr)
        if not records:
            raise UsageError(f"--resume {folder}: holds no record that can be read; start a run of its own")
        _refuse_other_words(folder, words)
        _refuse_other_cases(folder, records, rows)
        devices = sorted({record.device for record in records})
        if len(devices) > 1:
            raise UsageError(f"--resume {folder}: holds records of {' and '.join(devices)}; start a run of its own")
        return cls(folder=folder, records=records, device=devices[0])

    def missing(self, rows: Sequence[tuple[Case, Entry]]) -> list[tuple[Case, Entry]]:
        """The rows that have no record yet."""
        done = {_key(record.case_digest, record.impl, record.layout, record.params) for record in self.records}
        return [row for row in rows if _key_of(*row) not in done]


def _key_of(case: Case, entry: Entry) -> tuple[str, ...]:
    return _key(case.digest, entry.impl.name, entry.layout.name, entry.impl.resolve_params(entry.params))


def _key(digest: str, impl: str, layout: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    return digest, impl, layout, json.dumps(params, sort_keys=True)


def _refuse_other_words(folder: Path, words: Sequence[str]) -> None:
    """`check` makes records without times, which would pass for measured ones; and without its options a run is another one.

    They are asked for and not taken from the file, which may be a stranger's: --impl-file runs what it names.
    """
    facts, problem = facts_of(folder)
    if problem is not None:
        print(f"pagedbench: {printable(problem)}", file=sys.stderr)
    command, begun = facts.get("command", words[0]), facts.get("arguments")
    if command != words[0]:
        raise UsageError(f"--resume {folder}: was begun by `pagedbench {command}` (got `pagedbench {words[0]}`)")
    given = _options(words) - MAY_DIFFER
    if begun is None:  # its records speak for themselves, but not for those it lacks
        if not given:
            raise UsageError(f"--resume {folder}: does not say what it was asked for; say it again, with --suite, --impl, ...")
    elif left_out := sorted(_options(begun) - given - MAY_DIFFER):
        was, them = shortened(shlex.join(["pagedbench", *begun])), shortened(", ".join(left_out))
        raise UsageError(printable(f"--resume {folder}: was begun by `{was}`; give its {them} again, too"))


def _options(words: Sequence[str]) -> set[str]:
    """The options among a command's words, without their values."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def _refuse_other_cases(folder: Path, records: Sequence[Record], rows: Sequence[tuple[Case, Entry]]) -> None:
    digests = {case.name: case.digest for case, _ in rows}
    for record in records:
        now = digests.get(record.case, record.case_digest)
        if now != record.case_digest:
            raise UsageError(
                f"--resume {folder}: the case {record.case} was {record.case_digest} there and is {now} now; "
                "start a run of its own"
            )

"""What a process of ours says, line by line, taken for nothing but bytes: a row can write to any descriptor that it has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.record import Record, RecordError, parse_line
from harness.words import of_value

#: For each kind of message, named by its first key: its keys, and the types that each one's value may have.
Kinds = Mapping[str, Mapping[str, tuple[type, ...]]]

#: Bytes of one line, at most.
LONGEST = 16 << 20


class Garbled(Exception):
    """What was said is no message, or none that can have been meant; says what it was."""


def message_of(line: bytes, kinds: Kinds) -> dict[str, Any]:
    """Return the message of a line, which is of one of these kinds. Raises Garbled."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict):
        for kind, types in kinds.items():
            if kind in message and message.keys() == types.keys() and all(type(message[key]) in types[key] for key in types):
                return message
    raise Garbled(f"no message of ours: {of_value(line)}")


class Lines:
    """Lines out of the chunks in which they come."""

    def __init__(self) -> None:
        self.whole: list[bytes] = []
        self._rest = b""

    def add(self, chunk: bytes) -> None:
        """Take what was read. Raises Garbled where no line ends for too long."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self.whole += lines
        if len(self._rest) > LONGEST:
            raise Garbled(f"a line of more than {LONGEST} bytes: {of_value(self._rest[:100])}")


class Script:
    """Rows that were asked for, each of which is owed one record. `rows` have "number" and "case"."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._cases = {row["number"]: row["case"] for row in rows}
        self._owed = set(self._cases)

    def require_row(self, row: object) -> None:
        """Raise Garbled where anything is named but a row that was asked for."""
        if type(row) is not int or row not in self._cases:
            raise Garbled(f"names row {of_value(row)}, which was not asked for")

    def record(self, line: str, row: int) -> Record:
        """Return the record of a row. Raises Garbled where it is none, or not this row's, or the row has one."""
        self.require_row(row)
        if row not in self._owed:
            raise Garbled(f"tells row {row} a second time")
        try:
            record = parse_line(line)
        except RecordError as error:
            raise Garbled(f"tells row {row} by no record: {error}") from error
        if record.case != self._cases[row]:
            raise Garbled(f"tells row {row} by a record of {of_value(record.case)}")
        self._owed.discard(row)
        return record

    def require_all(self) -> None:
        """Raise Garbled where rows are owed a record."""
        if self._owed:
            raise Garbled(f"is done, and {len(self._owed)} of {len(self._cases)} rows have no record")


def require_facts(facts: Mapping[str, Any], *of_device: str) -> None:
    """Raise Garbled unless a hello tells what records are made of: the device, by these of its fields, and the toolchain."""
    device, toolchain = facts.get("device"), facts.get("toolchain")
    if not isinstance(device, dict) or not isinstance(toolchain, dict):
        raise Garbled(f"hello without device or toolchain: {of_value(facts)}")
    if not all(isinstance(device.get(field), str) for field in of_device):
        raise Garbled(f"hello of no device: {of_value(device)}")

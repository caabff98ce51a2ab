"""results/: where records are appended and read back. Nothing read here is executed."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.names import UsageError, read_text
from harness.record import DEEPEST, Record, RecordError, is_deep, parse_line

RECORDS, FACTS = "records.jsonl", "run.json"


def new_run(out: Path) -> Path:
    """Make and return `out`/<stamp>, a folder of its own even when two runs start in one second."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    for suffix in ("", *(f".{n:02}" for n in range(2, 100))):
        folder = out / (stamp + suffix)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if not out.is_dir():
                raise UsageError(f"cannot write results to {out}: {error}") from error
        except OSError as error:
            raise UsageError(f"cannot write results to {out}: {error}") from error
    raise UsageError(f"cannot write results to {out}: a hundred runs started in one second")


@contextlib.contextmanager
def run_folder(out: Path) -> Iterator[Path]:
    """As new_run; the folder goes again where it is left with nothing in it."""
    folder = new_run(out)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # it holds something
            folder.rmdir()


class Appender:
    """Appends records to a file, a whole line at a time, so that a run that dies keeps what it had.

    Raises UsageError where another process appends to the same file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORDS
        self._file = _open_locked(self.path)
        self.count = 0
        self._end_torn_line()

    def _end_torn_line(self) -> None:
        """A run that was killed may leave half a line, which would swallow the next record."""
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def append(self, record: Record) -> None:
        """Write one line. Raises OSError, naming the file, where the disk is full or gone."""
        line = (record.to_line() + "\n").encode()
        try:
            written = os.write(self._file, line)
        except OSError as error:  # a descriptor knows no name
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if written != len(line):
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes could be written; is the disk full?")
        self.count += 1

    def arrange(self, key: Callable[[Record], Any]) -> None:
        """Sort the file's lines by `key`, the whole file or nothing; equal ones stay as they are, and no line is lost.

        A line that is no record stays behind the one before it.
        """
        head, found = b"", list[tuple[Any, bytes]]()
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                found.append((key(parse_line(line.decode(errors="replace"))), line))
            except RecordError:
                if found:
                    found[-1] = (found[-1][0], found[-1][1] + line)
                else:
                    head += line
        ordered = sorted(found, key=lambda pair: pair[0])
        if ordered == found:
            return
        scratch = self.path.with_name(f".{RECORDS}.{os.getpid()}")
        try:
            scratch.write_bytes(head + b"".join(line for _, line in ordered))
            file = _open_locked(scratch)
            os.replace(scratch, self.path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.close()
        self._file = file

    def close(self) -> None:
        os.close(self._file)


def _open_locked(path: Path) -> int:
    """Open a file for whole lines at its end. Raises UsageError where another process has it so."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):  # anything else is a file system without locks
                os.close(file)
                raise UsageError(f"{path}: another run is writing to it") from error
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file
        os.close(file)  # it was put in order, into a new file, between the two calls


def run_of(path: Path) -> Path:
    """The run that `path` names: itself, or the only one in a folder that a command's --out named.

    Raises UsageError where there are several.
    """
    if not os.path.isdir(path) or os.path.isfile(path / RECORDS):  # of a name too long, pathlib's own raise
        return path
    runs = sorted(file.parent for file in path.glob(f"*/{RECORDS}"))
    if len(runs) > 1:
        raise UsageError(f"{path} holds {len(runs)} runs; name one of them, the newest is {runs[-1]}")
    return runs[0] if runs else path


def load(path: Path) -> tuple[list[Record], list[str]]:
    """Read a run's folder or a .jsonl file: its records, and a line for each line that is none.

    Raises UsageError where there is nothing to read.
    """
    try:
        file = path / RECORDS if path.is_dir() else path
        if file != path and not file.exists():
            raise UsageError(f"cannot read records of {path}: the folder has no {RECORDS}, nor is there one a folder deeper")
        lines = read_text(file, errors="replace").split("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read records of {path}: {getattr(error, 'strerror', None) or error}") from error
    records, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(parse_line(line))
        except RecordError as error:
            problems.append(f"{file}:{number}: skipped, {_short(str(error))}")
    return records, problems


def facts_of(folder: Path) -> tuple[Mapping[str, Any], str | None]:
    """Read what a run's run.json says: nothing where there is none, nor where it is damaged, which the line beside it says.

    Of a stranger's, as of ours, "command" is a text and "arguments" a list of them, where they are there.
    """
    file = folder / FACTS
    try:
        facts = json.loads(read_text(file), parse_int=_whole)
        why = _why_no_facts(facts)
    except (FileNotFoundError, NotADirectoryError):
        return {}, None
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        why = f"not JSON: {error}"
    return ({}, f"{file}: skipped, {_short(why)}") if why else (facts, None)


def _why_no_facts(facts: Any) -> str | None:
    if not isinstance(facts, dict):
        return f"not an object (got {type(facts).__name__})"
    if is_deep(facts):
        return f"nested more than {DEEPEST} deep"
    command, words = facts.get("command", ""), facts.get("arguments", [])
    if not isinstance(command, str):
        return f"command must be a text (got {type(command).__name__})"
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return "arguments must be a list of texts"
    return None


def _whole(digits: str) -> int:
    """A whole number that a float could hold, too: who shows one divides it."""
    if len(digits) > 300:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _short(text: str) -> str:
    """An error quotes what it got, which may be as long as the line."""
    return text if len(text) <= 300 else f"{text[:300]}..."


def latest_run(out: Path) -> Path:
    """The newest run's folder under `out` that has records; raises UsageError where there is none."""
    files = [folder / RECORDS for folder in out.glob("*")] if out.is_dir() else []
    runs = sorted(file.parent for file in files if file.is_file() and file.stat().st_size)
    if not runs:
        raise UsageError(f"no run under {out}; `pagedbench run` makes one")
    return runs[-1]


def write_json(path: Path, data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a file of plain JSON, whole or not at all."""
    write_whole(path, json.dumps(data, indent=1, sort_keys=True) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all: what stood there stays until then. Raises OSError, naming the file."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error

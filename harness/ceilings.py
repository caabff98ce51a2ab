"""results/ceilings/: what a device reads at best, by bytes, chunk and layout: measured once, then known.

DEVICE.jsonl holds the record of the fastest reader of each case of the sweep (cases/ceilings.py); it is committed. A row
that was not held against readers of its own blocks is held against what is known here.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.baseline import baseline_of
from harness.ops.dtypes import ITEMSIZE
from harness.record import Record
from harness.store import load

CEILINGS = Path("results/ceilings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """One point of a sweep: `traffic_bytes` in chunks of `chunk_bytes`, in `seconds`, by the reader of `record`."""

    chunk_bytes: int
    traffic_bytes: int
    seconds: float
    record: Record

    @classmethod
    def of(cls, record: Record) -> Read | None:
        """The point that a reader's record is; None for any other record."""
        chunk = chunk_bytes(record.shape)
        if record.role != "reader" or not (record.launch_s and record.traffic_bytes and chunk):
            return None
        return cls(chunk_bytes=chunk, traffic_bytes=record.traffic_bytes, seconds=record.launch_s.median, record=record)


def fastest_readers(records: Iterable[Record]) -> list[Record]:
    """The fastest reader's record of each case, in the order of the cases; a case that none could read is left out."""
    best: dict[str, Read] = {}
    for read in map(Read.of, records):
        if read is not None and (known := best.get(read.record.case, read)).seconds >= read.seconds:
            best[read.record.case] = read if known.seconds > read.seconds else known
    return [read.record for read in best.values()]


def load_ceilings(device: str, folder: Path = CEILINGS) -> tuple[list[Record], list[str]]:
    """What is known of `device`, and a line for each line that is no record; nothing where there is no file."""
    file = baseline_of(device, folder)
    return load(file) if file.is_file() else ([], [])


def save_ceilings(records: Sequence[Record], folder: Path = CEILINGS) -> Path:
    """Write the file of the records' device, whole or not at all; of cases that are not among them, what was known stays."""
    file = baseline_of(records[0].device, folder)
    cases = {record.case for record in records}
    before = load(file)[0] if file.is_file() else []
    records = sorted([*records, *(record for record in before if record.case not in cases)], key=lambda record: record.case)
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text("".join(record.to_line() + "\n" for record in records))
    os.replace(scratch, file)
    return file


def chunk_bytes(shape: Mapping[str, Any]) -> int:
    """Bytes that lie together in one cache: a block of all heads, which readers, and kernels in step, read at a time.

    0 of a shape that is not attention's.
    """
    sizes = [shape.get(name) for name in ("block_size", "num_kv_heads", "head_dim")]
    sizes.append(ITEMSIZE.get(str(shape.get("kv_dtype") or shape.get("dtype"))))
    return math.prod(size if isinstance(size, int) else 0 for size in sizes)


def estimate(records: Sequence[Record], shape: Mapping[str, Any], traffic_bytes: int) -> tuple[float, str] | None:
    """The seconds that so many bytes of a case take to read, after the sweep's nearest chunk, and what that rests on.

    Between two sizes of the sweep the time is on the line through both, above the largest the rate is that of the largest.
    None below the smallest, where nothing was measured.
    """
    chunk = chunk_bytes(shape)
    reads = [read for read in map(Read.of, records) if read is not None]
    if not reads or not chunk:
        return None
    nearest = min((read.chunk_bytes for read in reads), key=lambda known: abs(math.log(known / chunk)))
    reads = sorted((read for read in reads if read.chunk_bytes == nearest), key=lambda read: read.traffic_bytes)
    below = [read for read in reads if read.traffic_bytes <= traffic_bytes]
    if not below:
        return None
    low, high = below[-1], next((read for read in reads if read.traffic_bytes > traffic_bytes), below[-1])
    seconds = low.seconds * traffic_bytes / low.traffic_bytes
    if high is not low:
        share = (traffic_bytes - low.traffic_bytes) / (high.traffic_bytes - low.traffic_bytes)
        seconds = low.seconds + share * (high.seconds - low.seconds)
    return seconds, f"{high.record.row} in chunks of {nearest >> 10} KB, as known since {high.record.started_at[:10]}"


def hold_against(known: Callable[[str], Sequence[Record]], record: Record) -> Record:
    """Give a timed attention record that has no ceiling of its own the one that is `known` of its device, if any is."""
    if record.launch_s is None or record.ceiling_s or record.op != "attention" or record.role != "implementation":
        return record
    found = estimate(known(record.device), record.shape, record.traffic_bytes or 0)
    if found is None:
        return record
    seconds, by = found
    return dataclasses.replace(record, ceiling_s=seconds, ceiling_by=by, ceiling_share=seconds / record.launch_s.median)

"""Nsight Compute from its command line: how it is called, and its CSV as numbers in SI units."""

from __future__ import annotations

import csv
import dataclasses
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAM = "ncu"
#: ours -> the counter, as Nsight Compute names it on compute capability 8.0 and 9.0
COUNTERS = {
    "elapsed_s": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "l2_hit_share": "lts__t_sector_hit_rate.pct",  # of all accesses, writes and atomics included
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",  # of the warps that an SM can hold
    "num_ctas": "launch__grid_size",
    "num_threads": "launch__block_size",  # of a CTA
    "registers": "launch__registers_per_thread",
    "static_bytes": "launch__shared_mem_per_block_static",
    "dynamic_bytes": "launch__shared_mem_per_block_dynamic",
    "local_loads": "smsp__sass_inst_executed_op_local_ld.sum",  # instructions of warps: spills, and arrays on the stack
    "local_stores": "smsp__sass_inst_executed_op_local_st.sum",
}
#: what a warp may wait for when it does not issue; "selected" issues
STALLS = (
    "selected", "not_selected", "long_scoreboard", "short_scoreboard", "wait", "barrier", "membar", "math_pipe_throttle",
    "mio_throttle", "lg_throttle", "tex_throttle", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "misc",
    "no_instruction", "sleeping",
)  # fmt: skip
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_PREFIX = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNIT = re.compile(r"([numKMGT]?)(bytes?|B|s|second|inst|%|register|thread|block|warp|)")
_NUMBER = re.compile(r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?([eE][-+]?\d+)?")


class Unreadable(Exception):
    """What ncu wrote is no table of counters; the message says why, in its own words where it has some."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of a launch.

    counters    by the names of COUNTERS; None where this device or this ncu has no such counter
    stalls      by the names of STALLS: the share of its warps' time; empty where there are none
    """

    name: str
    counters: Mapping[str, float | None]
    stalls: Mapping[str, float]


def find_program() -> str | None:
    """Where ncu is, or None."""
    return shutil.which(PROGRAM)


def command(program: str, log: Path, words: Sequence[str]) -> list[str]:
    """The command line that profiles what `words` launch between cudaProfilerStart and cudaProfilerStop.

    Caches are flushed before each pass, as in a timed run with rotated inputs; clocks are left as they are in one, too.
    """
    metrics = [*COUNTERS.values(), *map(_STALL.format, STALLS)]
    return [
        program, "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics),
        "--profile-from-start", "off", "--target-processes", "all", "--clock-control", "none", "--cache-control", "all",
        "--log-file", str(log), *words,
    ]  # fmt: skip


def parse(text: str) -> list[Kernel]:
    """Read the kernels of a log, in the order of their launches. Raises Unreadable where it holds no such table."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        errors = [line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))]
        raise Unreadable(" ".join(errors) or f"no table of counters in {len(lines)} lines")
    table = list(csv.reader(line for line in lines[begin:] if not line.startswith("==")))
    heads, rows = table[0], table[1:]
    if "Kernel Name" not in heads:
        raise Unreadable(f"its table has no column 'Kernel Name' (got {', '.join(heads)})")
    if len(rows) < 2:
        raise Unreadable("its table has no kernel")
    units = dict(zip(heads, rows[0], strict=False))
    return [_kernel(dict(zip(heads, row, strict=False)), units) for row in rows[1:]]


def medians(kernels: Sequence[Kernel], launches: int) -> list[Kernel]:
    """The kernels of one launch, each the median of `launches` equal ones. Raises Unreadable where they are not equal."""
    count, rest = divmod(len(kernels), launches)
    one = [kernel.name for kernel in kernels[:count]]
    if rest or one * launches != [kernel.name for kernel in kernels]:
        names = ", ".join(kernel.name for kernel in kernels)
        raise Unreadable(f"{launches} launches gave {len(kernels)} kernels that do not repeat: {names}")
    return [_median(kernels[index::count]) for index in range(count)]


def _median(kernels: Sequence[Kernel]) -> Kernel:
    def middle(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    counters = {name: middle([kernel.counters[name] for kernel in kernels]) for name in COUNTERS}
    stalls = {name: statistics.median(kernel.stalls.get(name, 0.0) for kernel in kernels) for name in kernels[0].stalls}
    return Kernel(name=kernels[0].name, counters=counters, stalls=stalls)


def _kernel(row: Mapping[str, str], units: Mapping[str, str]) -> Kernel:
    counters = {name: _value(counter, row, units) for name, counter in COUNTERS.items()}
    cycles = {name: _value(_STALL.format(name), row, units) for name in STALLS}
    known = {name: value for name, value in cycles.items() if value is not None}
    total = sum(known.values())
    shares = {name: value / total for name, value in known.items()} if total else {}
    return Kernel(name=row.get("Kernel Name", ""), counters=counters, stalls=shares)


def _value(counter: str, row: Mapping[str, str], units: Mapping[str, str]) -> float | None:
    """A counter in SI units, a share of one for percent; None where the column or its value is missing."""
    text = row.get(counter, "").strip()
    if text in ("", "n/a", "N/A", "nan"):
        return None
    if not _NUMBER.fullmatch(text):
        raise Unreadable(f"{counter} is no number as English writes it (got {text!r}); run with LC_ALL=C")
    unit = units.get(counter, "").strip()
    found = _UNIT.fullmatch(unit.partition("/")[0])
    if found is None:
        raise Unreadable(f"{counter} is in a unit unknown here (got {unit!r})")
    return float(text.replace(",", "")) * (0.01 if found[2] == "%" else _PREFIX[found[1]])

"""What `pagedbench profile` prints: a row's kernels, as the compiler and the hardware's counters see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.report import units
from harness.words import printable

if TYPE_CHECKING:
    from harness.commands.profile import Profile
    from harness.ncu import Kernel

_SHOWN = 4  # stall reasons


def profile_text(profile: Profile) -> str:
    """Return the text of a row: a block a kernel, then what all of a launch read of DRAM, or why that is not known."""
    lines = [f"{profile.entry} on {profile.case}, {profile.device['slug']}; moves {units.size(profile.case.traffic_bytes)}"]
    if not (profile.compiled or profile.kernels):
        lines.append("  the entry says nothing of its kernels")
    compiled = [dict(kernel) for kernel in profile.compiled]
    for kernel in profile.kernels:
        said = next((one for one in compiled if one.get("name") == kernel.name), {})
        lines += [f"  {kernel.name}", *_rows(_counted(kernel) | _spills(said, kernel))]
    if not profile.kernels:
        for said in compiled:
            lines += [f"  {said.get('name', '?')}", *_rows(_compiled(said))]
    lines += _sums(profile) if profile.kernels else [f"  {profile.missing}"]
    return printable("\n".join(lines), keep="\n")


def _rows(cells: Mapping[str, str]) -> list[str]:
    width = max(map(len, cells), default=0)
    return [f"    {name.ljust(width)}  {text}" for name, text in cells.items()]


def _compiled(said: Mapping[str, Any]) -> dict[str, str]:
    """What the compiler told; anything else that the entry says of its kernel has no place here."""
    return {
        "registers": units.plain(said.get("registers", units.MISSING)),
        "spills": units.size(said.get("spill_bytes")),
        "shared memory": units.size(said.get("shared_bytes")) + " static",
    }


def _spills(said: Mapping[str, Any], kernel: Kernel) -> dict[str, str]:
    counted = [kernel.counters["local_loads"], kernel.counters["local_stores"]]
    local = units.MISSING if None in counted else f"{sum(n for n in counted if n is not None):.0f} local loads and stores"
    return {"spills": f"{units.size(said['spill_bytes'])}, {local}" if "spill_bytes" in said else local}


def _counted(kernel: Kernel) -> dict[str, str]:
    found = kernel.counters
    shared = [found["static_bytes"], found["dynamic_bytes"]]
    stalls = sorted(((share, name) for name, share in kernel.stalls.items() if name != "selected"), reverse=True)[:_SHOWN]
    return {
        "time": f"{units.MICROSECONDS.show(found['elapsed_s'])} {units.MICROSECONDS.unit}",
        "grid": f"{_whole(found['num_ctas'])} CTAs of {_whole(found['num_threads'])} threads",
        "DRAM": f"{units.size(found['dram_read_bytes'])} read, {units.size(found['dram_written_bytes'])} written",
        "L2 hits": units.percent(found["l2_hit_share"]),
        "occupancy": units.percent(found["occupancy"]) + " of an SM's warps, achieved",
        "stalls": ", ".join(f"{name} {units.percent(share)}" for share, name in stalls) or units.MISSING,
        "registers": _whole(found["registers"]),
        "shared memory": f"{units.size(shared[0])} static, {units.size(shared[1])} dynamic",
    }  # fmt: skip


def _whole(value: float | None) -> str:
    return units.MISSING if value is None else f"{value:.0f}"


def _sums(profile: Profile) -> list[str]:
    """DRAM traffic of the whole launch, and how often it moves what it must."""
    read = [kernel.counters["dram_read_bytes"] for kernel in profile.kernels]
    written = [kernel.counters["dram_written_bytes"] for kernel in profile.kernels]
    known = [value for value in (*read, *written) if value is not None]
    if len(known) < 2 * len(read):
        return ["  the launch: DRAM bytes are not counted on this device"]
    total = sum(known)
    times = units.ratio(total / max(profile.case.traffic_bytes, 1))
    return [f"  the launch: {units.size(total)} of DRAM, {times} times what it must move"]

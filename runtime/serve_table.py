"""A serving run as text: a row an implementation, and what a user of it would see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from harness.record import Record

HEADERS = (
    "implementation", "tokens/s", "requests/s", "TTFT p50, p99 ms", "TPOT p50 ms", "ITL p50, p90, p99 ms", "decode step ms",
    "over floor", "gap", "run over floor", "pool", "preempted", "GB",
)  # fmt: skip


def serve_table(records: Sequence[Record]) -> str:
    """All rows, case by case."""
    text = []
    for case in dict.fromkeys(record.case for record in records):
        chosen = [record for record in records if record.case == case]
        lines = [_line(record) for record in chosen if record.status == "ok"]
        align = ("left", *("right",) * (len(HEADERS) - 1))
        table = tabulate(lines, headers=HEADERS, tablefmt="github", colalign=align if lines else None, disable_numparse=True)
        others = [f"{record.row}: {record.status}: {record.reason}" for record in chosen if record.status != "ok"]
        remarks = [f"{record.row}: {flag}" for record in chosen for flag in record.flags]
        text.append("\n".join([f"## {case}\n", table, *others, *remarks]))
    return "\n\n".join(text)


def _line(record: Record) -> tuple[str, ...]:
    serving = record.serving
    peak = record.memory.get("allocator_peak_bytes")
    return (
        record.row, f"{serving['output_tokens_per_s']:,.0f}", f"{serving['requests_per_s']:.2f}",
        _ms(serving.get("ttft_s"), "p50", "p99"), _ms(serving.get("tpot_s"), "p50"),
        _ms(serving.get("itl_s"), "p50", "p90", "p99"), _ms(serving.get("decode_step_s"), "p50"),
        _number(serving.get("decode_over_floor"), "{:.2f}x"), _number(serving.get("gap_share"), "{:.1%}"),
        _number(record.ceiling_share and 1 / record.ceiling_share, "{:.2f}x"), _number(serving.get("utilisation"), "{:.1%}"),
        _number(serving.get("num_preemptions"), "{:,}"), _number(peak and peak / 1e9, "{:.1f}"),
    )  # fmt: skip


def _ms(values: Mapping[str, float] | None, *names: str) -> str:
    return ", ".join(f"{1e3 * values[name]:.2f}" for name in names) if values else "-"


def _number(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)

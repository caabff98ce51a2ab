"""Write the table of a run of `quick` on an H200 into README.md, between its two marks.

    python docs/h200_table.py results/baselines/nvidia-h200.jsonl

A cell is the faster of an implementation's layouts, or what kept it from having a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

HOUSE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOUSE))

from harness.record import Record  # noqa: E402 - after the path of the checkout
from harness.report import units  # noqa: E402
from harness.report.rows import describe, time_s  # noqa: E402
from harness.store import load  # noqa: E402

README = HOUSE / "README.md"
BEGIN, END = "<!-- h200-quick:begin -->", "<!-- h200-quick:end -->"
IMPLS = ("cuda.tensor_core", "cuda.split_kv", "cuda.block_parallel", "triton.split_kv", "cuda.per_token", "torch.gather")
CASES = (
    "facts.a", "facts.c", "facts.e", "facts.f", "facts.j", "decode.llama3_70b.32x4096", "decode.llama_7b.16x2048",
    "decode.gpt_oss.64x8192", "decode.gemma2_9b.32x4096", "decode.gpt_oss_window.64x8192", "facts.e.e4m3",
)
MICROSECONDS, TERABYTES = units.time_scale("cuda", ()), units.rate_scale("cuda")


def table(records: Sequence[Record]) -> str:
    """Return the table in Markdown, and the line that says what run it is of."""
    lines = ["| case | ceiling | " + " | ".join(f"`{impl}`" for impl in IMPLS) + " |", "|---" * (len(IMPLS) + 2) + "|"]
    for case in CASES:
        of_case = [record for record in records if record.case == case]
        if not of_case:
            continue
        ceiling = max((r.traffic_bytes / r.ceiling_s for r in of_case if r.ceiling_s and r.traffic_bytes), default=None)
        name = f"`{case}` {describe(of_case[0].shape)}"
        cells = [_cell([record for record in of_case if record.impl == impl]) for impl in IMPLS]
        lines.append(" | ".join([f"| {name}", f"{TERABYTES.show(ceiling, 3)} TB/s", *cells]) + " |")
    return "\n".join([*lines, "", _source(records)])


def _cell(rows: Sequence[Record]) -> str:
    """Time, rate and share of the ceiling of the fastest row; a star where it carries a flag."""
    timed = [row for row in rows if row.launch_s]
    if not timed:
        return rows[0].status if rows else units.MISSING
    best = min(timed, key=lambda row: time_s(row) or 0)
    time = time_s(best)
    rate = best.traffic_bytes / time if time and best.traffic_bytes else None
    share = units.MISSING if best.ceiling_share is None else f"{100 * best.ceiling_share:.0f}%"
    return f"{MICROSECONDS.show(time)} µs, {TERABYTES.show(rate, 3)}, {share}{'*' if best.flags else ''}"


def _source(records: Sequence[Record]) -> str:
    first, tools = records[0], records[0].toolchain
    runs = sorted({record.run for record in records if record.launch_s})
    versions = ", ".join(f"{name} {tools[name]}" for name in ("torch", "triton", "nvidia-cuda-nvrtc") if name in tools)
    named = ", ".join(f"`{run}`" for run in runs)
    return f"{named}: on {first.device}, suite `{first.suite}`; {versions}. A star marks a row with a flag; - was not reached."


def main(path: str) -> None:
    """Replace what stands between the marks."""
    records, problems = load(Path(path))
    if problems or not records:
        raise SystemExit("\n".join(problems) or f"{path} holds no records")
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{README} must hold {BEGIN} and {END}")
    README.write_text(f"{before}{BEGIN}\n{table(records)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

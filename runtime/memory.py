"""`pagedbench memory`: replay requests against every way of holding keys and values, and show what each wastes."""

import argparse
import json
import sys
import time
from pathlib import Path

from harness.names import UsageError
from runtime.study import BLOCK_SIZE, BLOCK_SIZES, Plan, count, measure, rows
from runtime.tables import claims_table, models_table, waste_table
from runtime.traces import LENGTHS, BadTrace, Trace, from_csv, synthetic
from runtime.waste import Waste

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser, command: str = "memory") -> None:
    """The command's options."""
    plan = Plan()
    parser.add_argument(
        "--trace",
        action="append",
        metavar="NAME|CSV",
        help=f"{', '.join(LENGTHS)} (all three), or a CSV file "
        "with the columns arrival (seconds), prompt, output (tokens); may be given again",
    )
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="of each named trace (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the named traces (0)")
    parser.add_argument(
        "--slots", type=int, default=plan.num_slots, metavar="N", help=f"tokens the pool holds ({plan.num_slots})"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=plan.max_length,
        metavar="N",
        help=f"what reserve-max reserves, and the longest request ({plan.max_length})",
    )
    parser.add_argument(
        "--step-ms", type=float, default=1e3 * plan.step_s, metavar="MS", help="a step, for a CSV's arrivals (30)"
    )
    parser.add_argument("--block-sizes", default=",".join(map(str, BLOCK_SIZES)), metavar="N,N", help="(1 to 256)")
    parser.add_argument("--count", action="store_true", help=f"only `paged {BLOCK_SIZE}`, by counting: for a million requests")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write records (waste.jsonl), tables and pictures here")


def main(arguments: argparse.Namespace) -> int:
    """Run the study; returns the exit code."""
    try:
        plan = Plan(
            num_slots=arguments.slots,
            max_length=arguments.max_length,
            step_s=arguments.step_ms / 1e3,
            block_sizes=_sizes(arguments.block_sizes),
        )
        if arguments.requests < 1:
            raise BadTrace(f"--requests must be at least 1, got {arguments.requests}")
        traces = [_trace(name, arguments, plan) for name in arguments.trace or LENGTHS]
        names = [trace.name for trace in traces]
        if len(set(names)) != len(names):
            raise BadTrace(f"traces are told apart by name, so names must be different, got {', '.join(names)}")
        if arguments.count and any(trace.arrival is not None for trace in traces):
            raise BadTrace("--count takes named traces only: it does not follow arrivals")
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)  # before the minutes that the replays take
    except (ValueError, OSError) as error:
        raise UsageError(f"memory: {error}") from error
    wastes: list[Waste] = []
    text = []
    for trace in traces:
        found = [_counted(trace, plan)] if arguments.count else _replayed(trace, plan)
        wastes += found
        text.append(f"## {trace.name}: {len(trace):,} requests, {plan.num_slots:,} slots\n\n{waste_table(found)}\n")
        print(text[-1])
    text += [f"## Claimed\n\n{claims_table()}\n", f"## What a token weighs (16-bit)\n\n{models_table()}\n"]
    print("\n".join(text[-2:]))
    if arguments.out:
        _write(wastes, text, arguments.out, with_pictures=not arguments.count)
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise BadTrace(f"--block-sizes must be whole numbers with commas between them, got {text!r}") from None


def _trace(name: str, arguments: argparse.Namespace, plan: Plan) -> Trace:
    if name.lower().endswith(".csv"):
        return from_csv(Path(name))
    return synthetic(name, arguments.requests, seed=arguments.seed, max_length=plan.max_length)


def _replayed(trace: Trace, plan: Plan) -> list[Waste]:
    from tqdm import tqdm

    quiet = not sys.stderr.isatty()
    return [measure(row, plan) for row in tqdm(list(rows(trace, plan)), desc=trace.name, disable=quiet, leave=False)]


def _counted(trace: Trace, plan: Plan) -> Waste:
    begun = time.perf_counter()
    waste = count(trace, plan)
    print(f"{trace.name}: {len(trace):,} requests counted in {time.perf_counter() - begun:.1f} s")
    return waste


def _write(wastes: list[Waste], text: list[str], folder: Path, *, with_pictures: bool) -> None:
    lines = (json.dumps({"schema": SCHEMA, "kind": "memory", **waste.as_dict()}) for waste in wastes)
    (folder / "waste.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "waste.md").write_text("\n".join(["# The waste, measured\n", *text]), encoding="utf-8")
    if with_pictures:
        from runtime.pictures import draw_all

        for path in draw_all(wastes, folder):
            print(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m runtime.memory", description=__doc__)
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))

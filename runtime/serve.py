"""`pagedbench serve`: a load served by the engine, on one implementation or several: times, memory, and the floor."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.names import UsageError, path_of, split_names
from runtime.configs import CONFIGS, DTYPES
from runtime.loads import ServeCase, file_digest
from runtime.settings import COMPILE, Settings
from runtime.traces import LENGTHS, BadTrace

RUNS = Path("results/runs")
#: what is served where options do not say, and what --dry serves: seconds on a CPU
USUAL: dict[str, Any] = {
    "model": "qwen3-0.6b", "dtype": "bf16", "requests": 256, "prompt": "512", "output": "128", "concurrency": "256",
    "max_num_tokens": 8192, "repeats": 3,
}  # fmt: skip
DRY: dict[str, Any] = {
    "model": "qwen3-tiny", "dtype": "f32", "requests": 6, "prompt": "8-24", "output": "8", "concurrency": "4",
    "max_num_tokens": 32, "repeats": 2,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser, command: str = "serve") -> None:
    """The command's options."""
    add, default = parser.add_argument, Settings()
    add("--model", metavar="NAME|FOLDER", help=f"a checkpoint's folder, a config.json or one of "
        f"{', '.join(CONFIGS)}, with random weights (qwen3-0.6b)")  # fmt: skip
    add("--dtype", choices=DTYPES, help="(bf16)")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:INDEX (default: the first GPU, else the CPU)")
    add("--requests", type=int, metavar="N", help="(256)")
    add("--prompt", metavar="TOKENS", help="of each, or uniform from a span, 100-1024; a list "
        "with commas is a sweep (512)")  # fmt: skip
    add("--output", metavar="TOKENS", help="of each, likewise (128)")
    add("--trace", default="", metavar="NAME|CSV", help=f"lengths of {', '.join(LENGTHS)}, or requests of a CSV file with the "
        "columns arrival (seconds), prompt, output")  # fmt: skip
    add("--seed", type=int, default=0, help="of lengths, prompts and random weights (0)")
    add("--temperature", type=float, default=0.0, metavar="T", help="of samples; 0 is greedy (0)")
    add("--top-k", type=int, default=0, metavar="K", help="of samples, from the K likeliest tokens; 0 is all (0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="of samples, from the fewest tokens of this probability (1)")
    add("--impl", action="append", default=[], metavar="ROW", help="of the registry, e.g. cuda.split_kv[NHD]; several: one "
        "after the other (the best for the model)")  # fmt: skip
    add("--prefill", metavar="ROW", help="for prompts, where --impl takes one token a sequence only")
    add("--block-size", default=str(default.block_size), metavar="N,N", help="(16)")
    add("--concurrency", metavar="N,N", help="sequences that run at once (256)")
    add("--max-num-tokens", type=int, metavar="N", help="tokens of a step (8192)")
    add("--num-blocks", type=int, metavar="N", help="of the pool (what memory has room for)")
    add("--memory-share", type=float, default=default.memory_share, metavar="SHARE", help="of a GPU's memory to use (0.9)")
    add("--preempt-by", choices=("recompute", "swap"), default=default.preempt_by)
    add("--num-host-blocks", type=int, default=0, metavar="N", help="for preemption by swap")
    add("--compile", choices=COMPILE, default="no", help="torch.compile of the layer, or of the model (no)")
    add("--no-graphs", action="store_true", help="launch decode steps kernel by kernel")
    add("--repeats", type=int, metavar="N", help="runs of the load, each with prompts of its own (3)")
    add("--beside", action="store_true", help="then serve the load by transformers' generate_batch, too")
    add("--dry", action="store_true", help="what is not said is tiny, model and load: does all of it work here?")
    add("--json", action="store_true", help="print records instead of tables")
    add("--out", type=path_of, default=RUNS, metavar="DIR", help=f"where the run's folder goes (default: {RUNS})")


def main(arguments: argparse.Namespace) -> int:
    """Serve and record; returns the exit code, 1 where a row failed."""
    for name, value in (DRY if arguments.dry else USUAL).items():
        if getattr(arguments, name) is None:
            room = numbers(arguments, "concurrency") if name == "max_num_tokens" else []
            setattr(arguments, name, max([value, *room]))
    if arguments.repeats < 1:
        raise UsageError(f"--repeats must be at least 1 (got {arguments.repeats})")
    try:
        cases = list(cases_of(arguments))
        longest = max(settings_of(arguments, case, None).max_model_len or 0 for case in cases)
    except (BadTrace, ValueError) as error:
        raise UsageError(f"serve: {error}") from error
    from harness.device import find_device
    from harness.registry import default_registry
    from harness.store import Appender, new_run
    from runtime.model import load

    for row in (*split_names("--impl", arguments.impl), *([arguments.prefill] if arguments.prefill else ())):
        default_registry().entries([row])  # a name that nothing has is told before a model is loaded
    device = find_device(arguments.device)
    device.make_current()
    model = load(arguments.model, dtype=arguments.dtype, device=device.name, seed=arguments.seed)
    if longest > model.max_model_len:
        raise UsageError(f"serve: {model.name} takes {model.max_model_len} tokens, prompt and output together (got {longest})")
    folder = new_run(arguments.out)
    store, records = Appender(folder), []
    try:
        for record in rows(arguments, cases, model, device, folder.name):
            store.append(record)
            records.append(record)
            if arguments.json:
                print(record.to_line(), flush=True)
    finally:
        store.close()
    if not arguments.json:
        from runtime.serve_table import serve_table

        print(serve_table(records))
    print(f"records: {store.path}", file=sys.stderr if arguments.json else sys.stdout)
    return int(any(record.status == "failed" for record in records))


def cases_of(arguments: argparse.Namespace) -> Iterator[ServeCase]:
    """One case for each combination of lengths, block size and concurrency."""
    trace = arguments.trace
    digest = file_digest(Path(trace)) if trace and trace not in LENGTHS else ""
    model = Path(arguments.model).stem.lower().replace("_", "-")
    lengths = [("", "")] if trace else itertools.product(arguments.prompt.split(","), arguments.output.split(","))
    drawn = "".join(f".{letter}{value}".replace("+", "") for letter, value, usual in (
        ("t", arguments.temperature, 0), ("k", arguments.top_k, 0), ("p", arguments.top_p, 1)
    ) if value != usual)
    sizes = itertools.product(numbers(arguments, "block_size"), numbers(arguments, "concurrency"))
    for (prompt, output), (block_size, concurrency) in itertools.product(lengths, sizes):
        load = Path(trace).stem.lower() if trace else f"{prompt}.{output}"
        yield ServeCase(
            name=f"serve.{model}.{arguments.requests}x{load}.c{concurrency}.b{block_size}{drawn}", model=arguments.model,
            dtype=arguments.dtype, requests=arguments.requests, prompt=prompt, output=output, trace=trace,
            trace_digest=digest, seed=arguments.seed, block_size=block_size, max_num_seqs=concurrency,
            max_num_tokens=arguments.max_num_tokens, num_blocks=arguments.num_blocks, temperature=arguments.temperature,
            top_k=arguments.top_k, top_p=arguments.top_p,
        )  # fmt: skip


def numbers(arguments: argparse.Namespace, name: str) -> list[int]:
    """Whole numbers of a list with commas. Raises UsageError."""
    text = getattr(arguments, name)
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"--{name.replace('_', '-')} must be whole numbers of at least 1, with commas (got {text!r})")
    return found


def rows(arguments: argparse.Namespace, cases: list[ServeCase], model: Any, device: Any, run: str) -> Iterator[Any]:
    """A record for each case and implementation, then transformers' own where it is asked for."""
    from harness.device import toolchain
    from harness.record import Record, unit_of
    from harness.registry import Unsupported
    from harness.words import of_error
    from runtime import measuring

    rates = measuring.rates_of(device, arguments.dtype)

    def record(case: ServeCase, name: str, layout: str, **fields: Any) -> Record:
        return Record(
            run=run, suite="serve", started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            op=case.op, case=case.name, case_digest=case.digest, shape=case.to_json(), impl=name, layout=layout,
            device=device.slug, device_kind=device.kind, unit=unit_of(dataclasses.asdict(device)), toolchain=toolchain(),
            **fields,
        )  # fmt: skip

    chosen: list[str | None] = entries_of(arguments)
    for case, row in itertools.product(cases, chosen or [None]):
        name, _, layout = (row or "best").partition("[")
        try:
            measured = measuring.measure(model, case, settings_of(arguments, case, row), device, rates, arguments.repeats)
            yield record(case, measured.impl, measured.layout, status="ok", **measured.fields)
        except (Unsupported, UsageError) as error:
            yield record(case, name, layout.rstrip("]") or "any", status="unsupported", reason=str(error))
        except Exception as error:
            yield record(case, name, layout.rstrip("]") or "any", status="failed", reason=of_error(error))
        gc.collect()
    if arguments.beside:
        from runtime import generate_batch

        for case in cases:
            try:
                fields = generate_batch.measure(case, device, arguments.repeats)
                yield record(case, "peer.transformers.generate_batch", "paged", status="ok", **fields)
            except Unsupported as error:
                yield record(case, "peer.transformers.generate_batch", "paged", status="unsupported", reason=str(error))
            except Exception as error:
                yield record(case, "peer.transformers.generate_batch", "paged", status="failed", reason=of_error(error))


def entries_of(arguments: argparse.Namespace) -> list[str | None]:
    """What --impl names by globs: rows, or, without a layout, implementations, in the first layout that takes the model.

    Raises UsageError for a glob that names none.
    """
    from harness.registry import default_registry

    found: dict[str | None, None] = {}
    for glob in split_names("--impl", arguments.impl):
        entries = [entry for entry in default_registry().entries([glob]) if entry.impl.op == "attention"]
        found |= dict.fromkeys(str(entry) if "[" in glob else entry.impl.name for entry in entries)
    return list(found)


def settings_of(arguments: argparse.Namespace, case: ServeCase, row: str | None) -> Settings:
    """The engine's settings for a case; sequences are as long as the load's longest."""
    trace = case.load()
    return Settings(
        block_size=case.block_size, num_blocks=case.num_blocks, num_host_blocks=arguments.num_host_blocks,
        max_model_len=int((trace.prompt + trace.output).max()), max_num_seqs=case.max_num_seqs,
        max_num_tokens=case.max_num_tokens, memory_share=arguments.memory_share, impl=row, prefill=arguments.prefill,
        preempt_by=arguments.preempt_by, graphs=not arguments.no_graphs, compile=arguments.compile,
    )  # fmt: skip


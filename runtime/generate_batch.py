"""transformers' own continuous batching on the same load: what an engine is to be better than."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import torch

from harness.device import Device
from harness.interval import summarise
from harness.registry import Unsupported
from runtime.loads import ServeCase, prompts_of
from runtime.model import load, transformers

#: attention of transformers and the library that it needs, the best first
ATTENTIONS = (("flash_attention_3", "flash_attn_interface"), ("flash_attention_2", "flash_attn"), ("sdpa", "torch"))


def measure(case: ServeCase, device: Device, repeats: int) -> dict[str, Any]:
    """Fields of the record of `repeats` runs, after one of a few requests. Its tokens come when all are there: no TTFT."""
    if case.temperature:
        raise Unsupported(f"generate_batch is asked for the likeliest tokens only (got a temperature of {case.temperature:g})")
    library = transformers()
    attention = next(name for name, package in ATTENTIONS if importlib.util.find_spec(package))
    model = load(case.model, dtype=case.dtype, device=device.name, seed=case.seed, fuse=False)
    model.module.set_attn_implementation(attention)
    trace = case.load()
    config = library.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=int(trace.output.max()))
    lengths = trace.output.tolist()
    if len(set(lengths)) > 1:
        raise Unsupported(f"generate_batch takes one number of new tokens for all (got {min(lengths)} to {max(lengths)})")
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(device.index)
    elapsed = []
    for repeat in range(-1, repeats):
        prompts = [prompt.tolist() for prompt in prompts_of(trace, model.vocab_size, case.seed + repeat + 1)]
        begin = time.perf_counter()
        made = model.module.generate_batch(prompts[:8] if repeat < 0 else prompts, generation_config=config)
        device.synchronize()
        if repeat >= 0:
            elapsed.append(time.perf_counter() - begin)
    num_tokens = sum(len(output.generated_tokens) for output in made.values())
    if num_tokens != sum(lengths):
        raise RuntimeError(f"generate_batch made {num_tokens} tokens of {sum(lengths)}")
    launch = summarise(elapsed)
    serving = {
        "num_requests": len(lengths), "num_output_tokens": num_tokens, "output_tokens_per_s": num_tokens / launch.median,
        "requests_per_s": len(lengths) / launch.median,
    }  # fmt: skip
    peak = torch.cuda.max_memory_allocated(device.index) if device.kind == "cuda" else None
    return {
        "launch_s": launch, "serving": serving, "memory": {"allocator_peak_bytes": peak} if peak else {},
        "params": {"attention": attention}, "flags": ("its own warm-up and graph captures are inside its times",),
    }  # fmt: skip

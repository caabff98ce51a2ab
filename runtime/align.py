"""`pagedbench align MODEL`: where the engine's numbers part from Hugging Face's, layer by layer.

Random tokens go through the model three times: on transformers' own attention, all at once; through the engine as a prompt, in
chunks; and through the engine as decode steps, one token at a time. What every layer and its attention put out is compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from harness.names import UsageError
from harness.registry import Unsupported
from harness.words import of_error
from runtime.attention import NAME
from runtime.engine import Engine
from runtime.model import Model, load
from runtime.requests import InvalidRequest, Sampling

#: of the relative L2 of any token's logits, from which on the exit code is 1
ALLOWED = {"f32": 1e-4, "f16": 1e-2, "bf16": 5e-2}
DTYPES = tuple(ALLOWED)

States = dict[str, torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser, command: str = "align") -> None:
    """The command's options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint's folder, a config.json, or a config's name, qwen3-tiny")
    add("--dtype", choices=DTYPES, default="f32")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:INDEX (default: the first GPU, else the CPU)")
    add("--impl", metavar="ROW", help="of the registry, e.g. cuda.split_kv[NHD] (the best for the model)")
    add("--prefill", metavar="ROW", help="for prompts, where --impl takes one token a sequence only")
    add("--attention", default="sdpa", metavar="NAME", help="transformers' own, to compare with (sdpa)")
    add("--tokens", type=int, default=96, metavar="N", help="(96)")
    add("--chunk", type=int, default=40, metavar="N", help="tokens of a prompt's step (40)")
    add("--block-size", type=int, default=16, metavar="N", help="(16)")


def main(arguments: argparse.Namespace) -> int:
    """Compare and print; returns the exit code, 1 where the logits differ by more than the type accounts for."""
    from harness.device import find_device

    if arguments.attention == NAME or arguments.attention.startswith("paged|"):
        raise UsageError(f"--attention must be one without a paged cache, sdpa or eager (got {arguments.attention!r})")
    for name in ("tokens", "chunk", "block_size"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(arguments, name)})")
    device = find_device(arguments.device)
    device.make_current()
    model = load(arguments.model, dtype=arguments.dtype, device=device.name)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, arguments.tokens)
    wanted = reference(arguments, device.name, tokens)
    try:
        found = {"prompt": through_engine(model, arguments, tokens, arguments.chunk)}
        found["decode"] = through_engine(model, arguments, tokens, 1)
    except (InvalidRequest, Unsupported) as error:
        raise UsageError(f"align: {error}") from error
    print(table(wanted, found))
    worst = torch.stack([relative(states["logits"], wanted["logits"]).max() for states in found.values()]).max().item()
    print(f"\nlogits: relative error {worst:.2e}, allowed {ALLOWED[arguments.dtype]:g} in {arguments.dtype}")
    return int(not worst <= ALLOWED[arguments.dtype])  # NaN is no agreement


def reference(arguments: argparse.Namespace, device: str, tokens: np.ndarray[Any, Any]) -> States:
    """What transformers' own attention makes of the tokens; products are apart, as a checkpoint has them."""
    module = load(arguments.model, dtype=arguments.dtype, device=device, fuse=False).module
    try:
        module.set_attn_implementation(arguments.attention)
        with torch.inference_mode(), watched(module) as states:
            logits = module(torch.from_numpy(tokens)[None].to(device), use_cache=False).logits[0]
    except (ImportError, ValueError) as error:
        raise UsageError(f"--attention {arguments.attention}: {of_error(error)}") from error
    return {**{name: torch.cat(parts) for name, parts in states.items()}, "logits": logits}


def through_engine(model: Model, arguments: argparse.Namespace, tokens: np.ndarray[Any, Any], chunk: int) -> States:
    """What the engine makes of them, `chunk` tokens a step. It computes the last token's logits; others are made here."""
    engine = Engine(
        model, block_size=arguments.block_size, num_blocks=-(-(len(tokens) + 1) // arguments.block_size) + 1,
        max_model_len=len(tokens) + 1, max_num_seqs=1, max_num_tokens=chunk, impl=arguments.impl, prefill=arguments.prefill,
        graphs=False,
    )  # fmt: skip
    try:
        with watched(model.module) as states, last_output(model.module.lm_head) as logits:
            engine.generate([tokens], Sampling(max_tokens=1))
    finally:
        engine.close()
    outputs = {name: torch.cat(parts) for name, parts in states.items()}
    with torch.inference_mode():
        others = model.logits(model.module.model.norm(outputs[f"layer {len(model.module.model.layers) - 1}"][:-1]))
    return {**outputs, "logits": torch.cat([others, logits[-1][-1:]])}


@contextmanager
def watched(module: Any) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Keep what layers and their attention put out, [num_tokens, hidden_size] each time they are called."""
    states: dict[str, list[torch.Tensor]] = {}
    hooks = []

    def keep(name: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            states.setdefault(name, []).append(tensor.reshape(-1, tensor.shape[-1]).clone())

        return hook

    for index, layer in enumerate(module.model.layers):
        hooks += [layer.self_attn.register_forward_hook(keep(f"attention {index}"))]
        hooks += [layer.register_forward_hook(keep(f"layer {index}"))]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def last_output(module: Any) -> Iterator[list[torch.Tensor]]:
    """Keep what a module puts out."""
    outputs: list[torch.Tensor] = []
    hook = module.register_forward_hook(lambda _, __, output: outputs.append(output.reshape(-1, output.shape[-1]).clone()))
    try:
        yield outputs
    finally:
        hook.remove()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The relative L2 error of each token."""
    size = wanted.float().norm(dim=-1).clamp_min(1e-30)
    return torch.div((found.float() - wanted.float()).norm(dim=-1), size)


def table(wanted: States, found: dict[str, States]) -> str:
    """A line a layer: the median and the largest error of a token, and which token that is."""
    lines = []
    for name in [name for name in wanted if name != "logits"]:
        line = [name]
        for states in found.values():
            error = relative(states[name], wanted[name])
            line += [f"{error.median().item():.1e}", f"{error.max().item():.1e}", str(int(error.argmax()))]
        lines.append(line)
    lines.sort(key=lambda line: (int(line[0].split()[1]), line[0]))
    headers = ["output of", *(f"{way} {what}" for way in found for what in ("median", "largest", "at token"))]
    align = ("left", *("right",) * (len(headers) - 1))
    return str(tabulate(lines, headers=headers, tablefmt="github", colalign=align, disable_numparse=True))

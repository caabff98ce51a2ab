"""What the engine's tests share: tiny models, what Hugging Face makes of a prompt, and an engine that shows its logits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from runtime.engine import Engine
from runtime.model import Model, load, why_no_transformers

needs_transformers = pytest.mark.skipif(why_no_transformers() is not None, reason=str(why_no_transformers()))
MARGIN = 1e-4  # of the likeliest token over the next: less is a tie
LOGITS = 1e-4
SMALL = {"num_blocks": 96, "block_size": 4, "max_model_len": 160, "max_num_seqs": 8, "max_num_tokens": 24}
NEW = 40


@functools.cache
def model(name: str = "qwen3-tiny") -> Model:
    """A tiny model with an engine's attention; engines take it one after another."""
    return load(name, dtype="f32")


@functools.cache
def reference(name: str = "qwen3-tiny") -> torch.nn.Module:
    """The same weights as transformers has them, with its own attention."""
    module = load(name, dtype="f32", fuse=False).module
    module.set_attn_implementation("eager")
    return module


def prompts(count: int = 6, seed: int = 4, longest: int = 40) -> list[list[int]]:
    """Random prompts, of 2 to `longest` tokens."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 512, int(length)).tolist() for length in draw.integers(2, longest + 1, count)]


@dataclass(frozen=True)
class Greedy:
    """Hugging Face's greedy answer; ties are places where the next likeliest token is within MARGIN."""

    prompt: tuple[int, ...]
    tokens: list[int]
    logits: torch.Tensor
    ties: list[int]


@functools.cache
def greedy(prompt: tuple[int, ...], count: int = NEW, name: str = "qwen3-tiny") -> Greedy:
    """generate() of one prompt, and the logits of a forward pass over what came of it."""
    ids = torch.tensor([prompt])
    made = reference(name).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
    )
    with torch.inference_mode():
        logits = reference(name)(made, attention_mask=torch.ones_like(made)).logits[0, len(prompt) - 1 : -1]
    top = logits.topk(2).values
    ties = torch.nonzero(top[:, 0] - top[:, 1] <= MARGIN)[:, 0].tolist()
    return Greedy(prompt, made[0, len(prompt) :].tolist(), logits, ties)


class Watched(Engine):
    """An engine that keeps the logits that each token was sampled from, by (request, answer), and checks its books."""

    def __init__(self, *args, **changes):
        super().__init__(*args, **{**SMALL, **changes})
        self.seen: dict[tuple[str, int], list[torch.Tensor]] = {}

    def _sample(self, batch, result, rows):
        tokens = super()._sample(batch, result, rows)
        for sequence, row in zip(batch.sampled, rows, strict=False):
            key = (sequence.group.request.request_id, sequence.index)
            self.seen.setdefault(key, []).append(result.logits[row].clone())
        return tokens

    def step(self):
        events = super().step()
        self.manager.check_invariants()
        return events

    def finish(self):
        """Step to the end; returns the tokens of each request's answers, by (request, answer)."""
        tokens: dict[tuple[str, int], list[int]] = {}
        while not self.is_idle:
            for event in self.step():
                if event.token is not None:
                    tokens.setdefault((event.request_id, event.index), []).append(event.token)
        assert self.manager.num_live_blocks == 0
        return tokens


def faults(engine: Watched, tokens: dict, wanted: dict[str, Greedy]) -> tuple[list[str], int]:
    """Requests whose tokens or logits are not Hugging Face's, up to the first tie; and how many ties there are."""
    wrong, ties = [], 0
    for name, greedy_answer in wanted.items():
        ties += len(greedy_answer.ties)
        end = min(greedy_answer.ties, default=len(greedy_answer.tokens))
        logits = torch.stack(engine.seen[name, 0][:end]) if end else torch.empty(0)
        error = (logits - greedy_answer.logits[:end]).abs().max().item() if end else 0.0
        if tokens[name, 0][:end] != greedy_answer.tokens[:end] or error > LOGITS:
            wrong.append(name)
    return wrong, ties

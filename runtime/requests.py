"""What is asked of an engine, and what it answers: plain data, checked where it comes in."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.tokens import as_tokens

LARGEST_SEED = 2**63 - 1
COLDEST, HOTTEST = 1e-6, 1e30  # temperatures, by which logits divide to numbers that float32 holds


class InvalidRequest(ValueError):
    """A request that cannot be served; nothing was taken for it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request's tokens are chosen, and when it ends.

    max_tokens        new tokens, at most
    temperature       0 is greedy; else 1e-6 to 1e30
    top_k             the k likeliest tokens; 0 is all. Those as likely as the k-th count as well
    top_p             the fewest tokens that have this probability together, of those that top_k leaves
    seed              of the noise: with it a token follows from the logits, whoever else is in the batch
    n                 answers to the same prompt, each with noise of its own
    num_beams         beams of equal length (no end of sequence, length penalty 1); 0 is no beam search
    stop_token_ids    tokens that end the answer, and are its last
    ignore_eos        whether the model's own end of sequence is a token like any other
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    n: int = 1
    num_beams: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stops = self.stop_token_ids if isinstance(self.stop_token_ids, list | tuple) else (None,)
        rules = (
            (_is_count(self.max_tokens, 1), "max_tokens must be at least 1", self.max_tokens),
            (
                _is_real(self.temperature) and (self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST),
                f"temperature must be a number, 0 (greedy) or {COLDEST} to {HOTTEST}", self.temperature,
            ),
            (_is_count(self.top_k, 0), "top_k must be a whole number, 0 for all", self.top_k),
            (_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p must be above 0 and at most 1", self.top_p),
            (_is_count(self.seed, 0) and self.seed <= LARGEST_SEED, "seed must be 0 to 2**63 - 1", self.seed),
            (_is_count(self.n, 1), "n must be at least 1", self.n),
            (_is_count(self.num_beams, 0), "num_beams must be a whole number, 0 for none", self.num_beams),
            (all(_is_count(token, 0) for token in stops), "stop_token_ids must be a list or tuple of ids", self.stop_token_ids),
            (
                not self.num_beams or (self.temperature == 0 and self.n == 1 and not self.stop_token_ids),
                "num_beams goes without temperature, n and stop_token_ids",
                (self.temperature, self.n, self.stop_token_ids),
            ),
        )
        for holds, rule, got in rules:
            if not holds:
                raise InvalidRequest(f"Sampling: {rule} (got {got!r})")

    @property
    def width(self) -> int:
        """Sequences that the request comes to."""
        return self.num_beams or self.n

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _is_real(value: object) -> bool:
    """Finite, and no whole number beyond what a float holds."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]  # just looked at


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and value >= least


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt, int32 [num_tokens], and how to go on from it. Only requests of equal `salt` share a prefix."""

    request_id: Hashable
    prompt: NDArray[np.int32]
    sampling: Sampling
    salt: Hashable = None

    @classmethod
    def of(cls, request_id: Hashable, prompt: Iterable[int], sampling: Sampling, salt: Hashable = None) -> Request:
        """Check and return a request. Raises InvalidRequest."""
        if not isinstance(sampling, Sampling):
            raise InvalidRequest(f"request {request_id!r}: sampling must be a Sampling (got a {type(sampling).__name__})")
        try:
            hash((request_id, salt))
            iter(prompt)  # a single number is no prompt: of generate([1, 2, 3]) three would be served
            tokens = as_tokens(prompt, "its prompt")
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"request {request_id!r}: {error}") from error
        if not tokens.size:
            raise InvalidRequest(f"request {request_id!r}: its prompt is empty; give at least one token")
        if tokens.min() < 0:
            raise InvalidRequest(f"request {request_id!r}: token ids are at least 0 (got {tokens.min()})")
        return cls(request_id=request_id, prompt=tokens.copy(), sampling=sampling, salt=salt)


@dataclass(frozen=True, slots=True)
class Event:
    """One new token of a request, as it becomes known.

    index      which of the request's answers
    token      None where a request ends without one: it was aborted
    finish     "eos", "stop", "length" or "abort" with the last token, else None
    score      of a beam, with its last token: the sum of its tokens' log-probabilities over their number
    """

    request_id: Hashable
    index: int
    token: int | None
    finish: str | None = None
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one of a request's answers."""

    tokens: tuple[int, ...]
    finish: str
    score: float | None = None

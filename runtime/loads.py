"""What is served to be measured: requests of given lengths, with random prompts that share nothing."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from harness.names import UsageError
from harness.ops.case import Case, CaseError
from runtime.requests import InvalidRequest, Sampling
from runtime.traces import LENGTHS, Trace, from_csv, synthetic

SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True, kw_only=True)
class ServeCase(Case):
    """A load on a model; its digest keys records, so a changed load is another case.

    requests            how many
    prompt, output      tokens of each, "512" or uniform from a span, "100-1024"; "" where a trace says
    trace               a name of runtime.traces, or of a CSV file, whose content `trace_digest` stands for; "" for none
    seed                of lengths, of prompts, of random weights, and with a request's number of what is drawn for it
    max_num_seqs, max_num_tokens, block_size, num_blocks    as the engine's settings
    temperature, top_k, top_p                               as `Sampling`; a temperature of 0 is greedy
    """

    op: ClassVar[str] = "serve"

    model: str
    dtype: str = "bf16"
    requests: int
    prompt: str = ""
    output: str = ""
    trace: str = ""
    trace_digest: str = ""
    seed: int = 0
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_tokens: int = 8192
    num_blocks: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("requests", "block_size", "max_num_seqs", "max_num_tokens")
        self.require_count("seed")
        for field in () if self.trace else ("prompt", "output"):
            span(getattr(self, field), f"{self.name}: {field}")
        self.require_fraction("temperature", lambda _: True, "must be a number")
        self.require_fraction("top_p", lambda _: True, "must be a number")
        try:
            greedy = self.sampling(self.requests - 1, 1).is_greedy
        except InvalidRequest as error:
            raise CaseError(f"{self.name}: {error}") from error
        filters = (self.top_k, self.top_p)
        self.require(not greedy or filters == (0, 1), "top_k and top_p are for a temperature above 0", filters)

    def sampling(self, index: int, max_tokens: int) -> Sampling:
        """Of request `index`. The end of a sequence is a token like any other."""
        seed = self.seed + index if self.temperature else 0
        return Sampling(
            max_tokens=max_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=seed, ignore_eos=True,
        )

    def load(self) -> Trace:
        """Lengths and arrivals. Raises UsageError or BadTrace."""
        if self.trace in LENGTHS:
            return synthetic(self.trace, self.requests, seed=self.seed)
        if self.trace:
            return from_csv(Path(self.trace))
        draw = np.random.default_rng(self.seed)
        lengths = [draw.integers(low, high + 1, self.requests) for low, high in (span(self.prompt), span(self.output))]
        return Trace(name=self.name, prompt=lengths[0], output=lengths[1])


def span(text: str, who: str = "length") -> tuple[int, int]:
    """Read "512" or "100-1024". Raises UsageError."""
    match = SPAN.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"{who} must be tokens, 512, or a span of them, 100-1024 (got {text!r})")
    return low, high


def file_digest(path: Path) -> str:
    """Twelve hex digits over a file. Raises UsageError where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        named = ", ".join(LENGTHS)
        raise UsageError(f"--trace {path}: none of {named}, and no file that can be read: {error.strerror}") from error


def prompts_of(trace: Trace, vocab_size: int, seed: int) -> list[NDArray[np.int32]]:
    """Random prompts; no two begin alike, as long as the vocabulary has so many tokens."""
    draw = np.random.default_rng(seed)
    firsts = draw.permutation(vocab_size)
    made = []
    for index, length in enumerate(trace.prompt.tolist()):
        prompt = draw.integers(0, vocab_size, length).astype(np.int32)
        prompt[0] = firsts[index % vocab_size]
        made.append(prompt)
    return made

"""Requests: how long their prompts and answers are, when they come, and what they share.

Published traces give means or medians of lengths; log-normals with those stand for them, so that a trace is a name and a seed
and nothing is downloaded. A user's own trace is a CSV with the columns arrival, prompt, output.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.tokens import as_integer

COLUMNS = ("arrival", "prompt", "output")
MOST_TOKENS, MOST_SECONDS = 2**31 - 1, 2**31 - 1  # of a request, and from the first to the last


class BadTrace(ValueError):
    """A trace that cannot be read or replayed."""


@dataclass(frozen=True, kw_only=True)
class LogNormal:
    """A length in tokens, by its median and the standard deviation of its logarithm."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        if not (1 <= self.median < math.inf and 0 <= self.sigma < math.inf):
            raise BadTrace(f"LogNormal: median must be at least 1 and sigma at least 0, got {self.median} and {self.sigma}")

    @classmethod
    def by_mean(cls, mean: float, *, sigma: float) -> "LogNormal":
        """The one with this mean."""
        return cls(median=mean / math.exp(sigma * sigma / 2), sigma=sigma)

    @classmethod
    def by_mean_and_median(cls, mean: float, median: float) -> "LogNormal":
        """The one with this mean and this median."""
        if not 1 <= median <= mean:
            raise BadTrace(f"LogNormal: the median must be at least 1 and at most the mean, got {median} and {mean}")
        return cls(median=median, sigma=math.sqrt(2 * math.log(mean / median)))

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """`count` lengths of at least 1."""
        return np.maximum(np.rint(rng.lognormal(math.log(self.median), self.sigma, count)), 1).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Prompts and answers of one service, and where their numbers come from."""

    name: str
    prompt: LogNormal
    output: LogNormal
    source: str


LENGTHS = {
    lengths.name: lengths
    for lengths in (
        # The means are published; the spread is our reading of the paper's histogram.
        Lengths(
            name="sharegpt",
            prompt=LogNormal.by_mean(161.31, sigma=1.1),
            output=LogNormal.by_mean(337.99, sigma=0.9),
            source="means of ShareGPT in the vLLM paper, section 6.1",
        ),
        Lengths(
            name="azure_chat",
            prompt=LogNormal.by_mean_and_median(1155, 1020),
            output=LogNormal.by_mean_and_median(211, 129),
            source="medians in the Splitwise paper, means of the Azure LLM inference trace 2023, conversation",
        ),
        Lengths(
            name="azure_code",
            prompt=LogNormal.by_mean_and_median(2048, 1500),
            output=LogNormal.by_mean_and_median(28, 13),
            source="medians in the Splitwise paper, means of the Azure LLM inference trace 2023, coding",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in the order in which they come.

    Arrays
        prompt, output  [num_requests]  int64 tokens, at least 1
        arrival         [num_requests]  float64 seconds, not falling; None where all wait from the beginning (a closed loop)
        prefix          [num_requests]  int64 which of the shared prefixes a prompt begins with; None where none does
    """

    name: str
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    arrival: NDArray[np.float64] | None = None
    prefix: NDArray[np.int64] | None = None
    prefix_length: int = 0

    def __post_init__(self) -> None:
        arrays = [a for a in (self.prompt, self.output, self.arrival, self.prefix) if a is not None]
        if len({array.shape for array in arrays}) != 1:
            raise BadTrace(f"Trace {self.name}: arrays must be equally long, got {[array.shape for array in arrays]}")
        if self.prompt.size == 0 or min(self.prompt.min(), self.output.min()) < 1:
            raise BadTrace(f"Trace {self.name}: at least one request, each with a prompt and an output of at least 1 token")
        if self.arrival is not None and (np.diff(self.arrival) < 0).any():
            raise BadTrace(f"Trace {self.name}: arrivals must not fall; sort the requests by arrival")
        if self.arrival is not None and not self.arrival[-1] - self.arrival[0] <= MOST_SECONDS:
            span = self.arrival[-1] - self.arrival[0]
            raise BadTrace(
                f"Trace {self.name}: requests must come within {MOST_SECONDS} seconds, got {span:.3g}; are they seconds?"
            )

    def __len__(self) -> int:
        return self.prompt.size


def synthetic(name: str, num_requests: int, *, seed: int = 0, max_length: int = 4096) -> Trace:
    """Requests of a published distribution, in a closed loop; prompt and output together at most `max_length`."""
    if name not in LENGTHS:
        raise BadTrace(f"no trace {name!r}: there are {', '.join(LENGTHS)}, or give a CSV file")
    num_requests = as_integer(num_requests, "synthetic: num_requests", 1)
    max_length = as_integer(max_length, "synthetic: max_length", 2)
    rng = np.random.default_rng(as_integer(seed, "synthetic: seed", 0))
    prompt = np.minimum(LENGTHS[name].prompt.sample(num_requests, rng), max_length - max_length // 8)
    output = np.minimum(LENGTHS[name].output.sample(num_requests, rng), max_length - prompt)
    return Trace(name=name, prompt=prompt, output=output)


def with_prefixes(trace: Trace, *, num_prefixes: int, prefix_length: int, seed: int = 0) -> Trace:
    """The same requests, each behind one of a few system prompts; the first are the most popular (1, 1/2, 1/3, ...)."""
    num_prefixes = as_integer(num_prefixes, "with_prefixes: num_prefixes", 1)
    prefix_length = as_integer(prefix_length, "with_prefixes: prefix_length", 0)
    popularity = 1 / np.arange(1, num_prefixes + 1)
    prefix = np.random.default_rng(seed).choice(num_prefixes, len(trace), p=popularity / popularity.sum())
    return Trace(
        name=f"{trace.name}+prefix",
        prompt=trace.prompt + prefix_length,
        output=trace.output,
        arrival=trace.arrival,
        prefix=prefix.astype(np.int64),
        prefix_length=prefix_length,
    )


def from_csv(path: Path) -> Trace:
    """The user's requests: a CSV with the columns arrival (seconds), prompt and output (tokens), in any order."""
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines, skipinitialspace=True)
        try:
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise BadTrace(f"{path}: the first line must name {', '.join(COLUMNS)}; missing {', '.join(missing)}")
            repeated = [column for column in COLUMNS if list(reader.fieldnames or ()).count(column) > 1]
            if repeated:
                raise BadTrace(f"{path}: the first line must name each column once; {', '.join(repeated)} stands there again")
            rows = [_row(path, reader.line_num, row) for row in reader]
        except (UnicodeDecodeError, csv.Error) as error:
            raise BadTrace(f"{path}: not a CSV file in UTF-8: {error}") from error
    if not rows:
        raise BadTrace(f"{path}: no requests below the line of names")
    rows.sort(key=lambda row: row[0])
    arrival, prompt, output = zip(*rows, strict=True)
    return Trace(
        name=path.stem,
        prompt=np.array(prompt, np.int64),
        output=np.array(output, np.int64),
        arrival=np.array(arrival, np.float64) - rows[0][0],
    )


def _row(path: Path, line: int, row: dict[str | None, str]) -> tuple[float, int, int]:
    if None in row:
        raise BadTrace(f"{path}, line {line}: more values than the first line has names")
    if None in row.values():
        raise BadTrace(f"{path}, line {line}: fewer values than the first line has names")
    try:
        values = float(row["arrival"]), int(row["prompt"]), int(row["output"])
    except (TypeError, ValueError) as error:
        raise BadTrace(f"{path}, line {line}: {error}; arrival is seconds, prompt and output are whole tokens") from None
    if not (math.isfinite(values[0]) and 1 <= min(values[1:]) <= max(values[1:]) <= MOST_TOKENS):
        raise BadTrace(f"{path}, line {line}: arrival must be finite, prompt and output 1 to {MOST_TOKENS}, got {values}")
    return values

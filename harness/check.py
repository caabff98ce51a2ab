"""Is an output right? Every row is held against the truth, and a verdict says what is wrong, where, and by how much.

A row is one (query token, query head). It is judged by the L2 of its error, by each element's, and by its LSE's, each
against a small multiple of what a careful kernel of the same dtype is expected to err on that very row
(harness/truth.py). docs/tolerance.md holds the measurements behind the multiples: no right kernel fails, none of the
known faults passes.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness.truth import OF_TRUTH, RMS_OF_UNIT, AttentionTruth

#: what may be erred, in units of the baseline
L2_FACTOR = 1.0
MAX_FACTOR = 5.0  # deviations, of an element among MAX_COUNT at most
MAX_COUNT = 1 << 17
LSE_FACTOR = 4.0
#: what an entry may declare to round to the case's dtype where a careful kernel keeps float32 (`Impl.quantises`), and how many
#: roundings that is, each about as large in a row as one of the baseline's two
TO_DTYPE = {
    "products": 1,  # each p * v
    "partials": 1,  # the parts of a split row
    "merges": 1,  # sums of some of the parts, before they are summed themselves
    "warps": 1,  # the parts of a CTA's warps, before they are summed
    "levels": 1,  # the outputs of a cascade's levels, which have parts of their own
    "scales": 2,  # what brings a tile's probabilities to the row's maximum, and its products with them
    "normaliser": 0,  # the probabilities before their sum
}
#: Parts that cancel in an element may be several deviations large, and their roundings with them: there each counts by the
#: largest that it may be, not by its rms.
OF_PARTS = frozenset({"partials", "merges", "warps", "levels"})

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a check.

    reason        None where it passed, else a sentence or two: what is wrong, how often, where worst
    num_rows      rows judged; num_failed of them are wrong
    ratios        worst error over what was allowed: "l2", "max", "lse"; above 1 (or infinite) is wrong
    place         of the worst: indices into the output, dimensions by name, the sequence first
    got, want, error, allowed    there; error and allowed in the unit of the output
    """

    passed: bool
    num_rows: int
    num_failed: int
    reason: str | None = None
    ratios: Mapping[str, float] = dataclasses.field(default_factory=dict)
    place: Mapping[str, int] = dataclasses.field(default_factory=dict)
    got: float | None = None
    want: float | None = None
    error: float | None = None
    allowed: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, for a record."""
        return dataclasses.asdict(self)


def fill_unwritten(tensor: torch.Tensor) -> None:
    """Fill with a NaN that no arithmetic makes, by which the check tells what was never written.

    Every bit is set but the last: all of them are what torch's conversion to bf16 makes of any NaN on a CPU.
    """
    tensor.view(_BITS[tensor.element_size()]).fill_(_sentinel(tensor))


def is_unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Where the sentinel of `fill_unwritten` still stands."""
    return tensor.view(_BITS[tensor.element_size()]) == _sentinel(tensor)


def _sentinel(tensor: torch.Tensor) -> int:
    return 255 if tensor.element_size() == 1 else -2  # of e4m3 only 127 and 255 are NaN


def judge_attention(
    out: torch.Tensor, lse: torch.Tensor | None, truth: AttentionTruth, quantises: frozenset[str] = frozenset()
) -> Verdict:
    """Judge one launch's output.

    Shapes
        out    [num_tokens, num_q_heads, head_dim]    the truth's dtype
        lse    [num_tokens, num_q_heads]              float32; None where only the output is to be judged

    What the entry `quantises` widens what is allowed; what is named in OF_TRUTH the truth must have been made for.
    """
    known = OF_TRUTH | TO_DTYPE.keys()
    if unknown := quantises - known:
        raise ValueError(f"quantises must be of {', '.join(sorted(known))} (got {', '.join(sorted(unknown))})")
    if (quantises & OF_TRUTH) - {"tanh"} != truth.quantises - {"tanh"}:  # where nothing is capped it says nothing
        raise ValueError(f"the truth must be made for what is quantised: {sorted(quantises)} (got {sorted(truth.quantises)})")
    for name, got, want, dtype in (("out", out, truth.out, truth.dtype), ("lse", lse, truth.lse, torch.float32)):
        if got is not None and (got.shape != want.shape or got.dtype != dtype):
            return _not_comparable(name, got, want.shape, dtype)
    tests = _numerical(out, lse, truth, quantises)
    if not truth.lse.numel():
        return Verdict(passed=True, num_rows=0, num_failed=0, ratios={str(test.name): 0.0 for test in tests})
    passed = _passed(tests, truth)
    if passed is not None:
        return passed
    tests = _categorical(out, lse, truth) + tests
    failed = torch.zeros_like(truth.lse, dtype=torch.bool)
    for test in tests:
        failed |= test.wrong.any(-1) if test.wrong.dim() == 3 else test.wrong
    return _verdict(tests, failed, truth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Test:
    """One thing that can be wrong.

    rule     what is then said, after "3 of 65536"
    score    by which the worst is found; above `limit` is wrong
    shown    got and want; where there is a tolerance also error and allowed, and then `name` keys Verdict.ratios
    """

    rule: str
    score: torch.Tensor
    shown: tuple[torch.Tensor, ...]
    limit: float = 0.0
    name: str | None = None

    @property
    def wrong(self) -> torch.Tensor:
        return self.score > self.limit


def _categorical(out: torch.Tensor, lse: torch.Tensor | None, truth: AttentionTruth) -> list[_Test]:
    """What no tolerance excuses, the most telling first."""
    empty = (truth.num_visible == 0)[:, None]
    of_out = (
        ("outputs were never written", is_unwritten(out)),
        ("outputs are NaN", out.isnan()),
        ("outputs are infinite", out.isinf()),
        ("outputs are not 0 although their token sees no key", (out != 0) & empty[..., None]),
    )
    tests = [_Test(rule=rule, score=wrong.to(torch.uint8), shown=(out, truth.out)) for rule, wrong in of_out]
    if lse is not None:
        faults = _lse_faults(lse, truth.lse.isneginf())
        tests += [_Test(rule=rule, score=wrong.to(torch.uint8), shown=(lse, truth.lse)) for rule, wrong in faults]
    return tests


def _lse_faults(lse: torch.Tensor, empty: torch.Tensor) -> tuple[tuple[str, torch.Tensor], ...]:
    return (
        ("LSE were never written", is_unwritten(lse)),
        ("LSE are NaN", lse.isnan()),
        ("LSE are +inf", lse.isposinf()),
        ("LSE are finite although their token sees no key", lse.isfinite() & empty),
        ("LSE are -inf although their token sees keys", lse.isneginf() & ~empty),
    )


def _numerical(
    out: torch.Tensor, lse: torch.Tensor | None, truth: AttentionTruth, quantises: frozenset[str]
) -> list[_Test]:
    """Errors against what is allowed."""
    info = torch.finfo(truth.dtype)
    more = sum(TO_DTYPE.get(name, 0) for name in quantises)
    of_parts = sum(TO_DTYPE[name] for name in quantises & OF_PARTS)
    deviations = max_factor(out.numel()) * (1 + more - of_parts + of_parts / RMS_OF_UNIT**2) ** 0.5
    wide = out.double()
    error = (wide - truth.out).abs()
    last = (1 + more) * info.eps / 2 * truth.out.abs().clamp(min=info.smallest_normal)
    allowed = deviations * truth.baseline_max + last
    l2, l2_allowed = error.norm(dim=-1), L2_FACTOR * (1 + more / 2) ** 0.5 * truth.baseline_l2
    tests = [
        _tolerance("max", "outputs are outside tolerance", out, truth.out, error, allowed),
        _tolerance("l2", "rows are outside tolerance by their L2", wide.norm(dim=-1), truth.out.norm(dim=-1), l2, l2_allowed),
    ]
    if lse is not None:
        error = torch.where(lse == truth.lse, 0.0, (lse.double() - truth.lse).abs())
        allowed = LSE_FACTOR * (truth.baseline_lse + (truth.baseline_normaliser if "normaliser" in quantises else 0.0))
        tests.append(_tolerance("lse", "LSE are outside tolerance", lse, truth.lse, error, allowed))
    return tests


def max_factor(count: int) -> float:
    """Deviations that any of `count` elements exceeds by chance as rarely as one of MAX_COUNT exceeds MAX_FACTOR.

    Eight million are 5.7 deviations: a chunked prefill has so many outputs, and in one of them right kernels reach 5.2.
    """
    normal = statistics.NormalDist()
    return -normal.inv_cdf(normal.cdf(-MAX_FACTOR) * MAX_COUNT / max(count, MAX_COUNT))


def _tolerance(name: str, rule: str, *shown: torch.Tensor) -> _Test:
    """The test that an error is within what is allowed; `shown` is got, want, error, allowed."""
    ratio = (shown[2] / shown[3].clamp(min=1e-300)).nan_to_num(nan=math.inf, posinf=math.inf)
    return _Test(rule=rule, score=ratio, shown=shown, limit=1.0, name=name)


def _passed(tests: Sequence[_Test], truth: AttentionTruth) -> Verdict | None:
    """The verdict where no tolerance is exceeded, else None.

    Whatever is categorically wrong exceeds one: NaN and infinities are infinitely far from what is right, a number where no
    key is seen is further from 0 or -inf than is allowed. So what is right, and judged again and again, is asked no more.
    """
    found = torch.stack([number.double() for test in tests for number in (test.score.max(), test.score.argmax())]).tolist()
    scores, places = found[::2], found[1::2]
    if max(scores) > 1.0:
        return None
    at = scores.index(max(scores))
    place, (got, want, error, allowed) = _shown(tests[at], int(places[at]), truth)
    return Verdict(
        passed=True, num_rows=truth.lse.numel(), num_failed=0, place=place, got=got, want=want, error=error, allowed=allowed,
        ratios={str(test.name): score for test, score in zip(tests, scores, strict=True)},
    )


def _shown(test: _Test, flat: int, truth: AttentionTruth) -> tuple[dict[str, int], Sequence[Any]]:
    """Where a flat index of the test's score is, and got, want, error and allowed there."""
    values = torch.stack([tensor.flatten()[flat].double() for tensor in test.shown]).tolist()
    return _place(flat, test.score.shape, truth), (*values, None, None)[:4]


def _verdict(tests: list[_Test], failed: torch.Tensor, truth: AttentionTruth) -> Verdict:
    """Choose what to say of what is wrong; one trip to the host for all counts, one for the worst."""
    numbers = [failed.sum(), *(n for test in tests for n in (test.wrong.sum(), test.score.max(), test.score.argmax()))]
    num_failed, *found = torch.stack([n.double() for n in numbers]).tolist()
    counts, scores, places = found[::3], found[1::3], found[2::3]
    at = next(i for i, count in enumerate(counts) if count)
    test = tests[at]
    place, (got, want, error, allowed) = _shown(test, int(places[at]), truth)
    where = " ".join(f"{name} {index}," for name, index in place.items())[:-1]
    reason = f"{int(counts[at])} of {test.score.numel()} {test.rule}; "
    reason += f"{'worst' if test.name else 'first'} [{where}]: got {got:.5g}, want {want:.5g}"
    if test.name:
        reason += f", error {error:.2g}, allowed {allowed:.2g}"
    return Verdict(
        passed=False, num_rows=failed.numel(), num_failed=int(num_failed), reason=reason,
        ratios={test.name: score for test, score in zip(tests, scores, strict=True) if test.name},
        place=place, got=got, want=want, error=error, allowed=allowed,
    )


def _place(flat: int, shape: torch.Size, truth: AttentionTruth) -> dict[str, int]:
    """Name the indices of a flat one: the sequence, the token within it where it has several, head and dim."""
    indices = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        indices.append(index)
    token, *rest = reversed(indices)
    starts = truth.query_start_loc
    seq = max(i for i in range(len(starts) - 1) if starts[i] <= token < starts[i + 1])
    place = {"seq": seq}
    if starts[seq + 1] - starts[seq] > 1:
        place["token"] = token - starts[seq]
    return place | dict(zip(("head", "dim"), rest, strict=False))


def _not_comparable(name: str, got: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> Verdict:
    reason = f"{name} must be {list(shape)} {dtype} (got {list(got.shape)} {got.dtype})"
    return Verdict(passed=False, num_rows=0, num_failed=0, reason=reason)


def judge_exact(got: torch.Tensor, want: torch.Tensor, what: str) -> Verdict:
    """Judge a copy: every bit must be equal, NaN and the sign of 0 included. A row is the innermost dimension."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return _not_comparable(what, got, want.shape, want.dtype)
    bits = _BITS[got.element_size()]
    differ = got.contiguous().view(bits) != want.contiguous().view(bits)
    rows = differ.any(-1)
    if not differ.numel() or not rows.any():
        return Verdict(passed=True, num_rows=rows.numel(), num_failed=0)
    first = differ.flatten().to(torch.uint8).argmax()
    index = [int(i) for i in torch.unravel_index(first, differ.shape)]
    values = [float(tensor[tuple(index)]) for tensor in (got, want)]
    reason = (
        f"{int(differ.sum())} of {differ.numel()} elements of {what} differ; "
        f"first {index}: got {values[0]:.5g}, want {values[1]:.5g}"
    )
    return Verdict(
        passed=False, num_rows=rows.numel(), num_failed=int(rows.sum()), reason=reason, got=values[0], want=values[1],
        place={f"dim{i}": at for i, at in enumerate(index)},
    )

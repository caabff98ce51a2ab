"""Is an output right? Every row is held against the truth, and a verdict says what is wrong, where, and by how much.

A row is one (query token, query head). It is judged by the L2 of its error, by each element's, and by its LSE's, each
against a small multiple of what a careful kernel of the same dtype is expected to err on that very row
(harness/truth.py). docs/tolerance.md holds the measurements behind the multiples: no right kernel fails, none of the
known faults passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from harness.truth import AttentionTruth

#: what may be erred, in units of the baseline
L2_FACTOR = 1.0
MAX_FACTOR = 5.0  # an element's error has a tail that a row's L2 averages out
LSE_FACTOR = 4.0

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
    """Fill with a NaN that no arithmetic makes (every bit set), by which the check tells what was never written."""
    tensor.view(_BITS[tensor.element_size()]).fill_(255 if tensor.element_size() == 1 else -1)


def is_unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Where the sentinel of `fill_unwritten` still stands."""
    return tensor.view(_BITS[tensor.element_size()]) == (255 if tensor.element_size() == 1 else -1)


def judge_attention(
    out: torch.Tensor, lse: torch.Tensor, truth: AttentionTruth, quantises: frozenset[str] = frozenset()
) -> Verdict:
    """Judge one launch's output.

    Shapes
        out    [num_tokens, num_q_heads, head_dim]    the truth's dtype
        lse    [num_tokens, num_q_heads]              float32
    """
    if quantises - {"normaliser", "products", "partials"} != truth.quantises:
        raise ValueError(f"the truth's baseline must round what the entry does: {set(quantises)} (got {set(truth.quantises)})")
    for name, got, want, dtype in (("out", out, truth.out, truth.dtype), ("lse", lse, truth.lse, torch.float32)):
        if got.shape != want.shape or got.dtype != dtype:
            return _not_comparable(name, got, want.shape, dtype)
    tests = _attention_tests(out, lse, truth, quantises)
    failed = torch.zeros_like(truth.lse, dtype=torch.bool)
    for test in tests:
        bad = test.ratio > 1
        failed |= bad.any(-1) if bad.dim() == 3 else bad
    return _verdict(tests, failed, truth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Test:
    """One thing that can be wrong: `ratio` above 1 is."""

    name: str
    rule: str  # "{count} of {total} outputs ..."
    ratio: torch.Tensor
    got: torch.Tensor
    want: torch.Tensor
    error: torch.Tensor | None = None
    allowed: torch.Tensor | None = None


def _attention_tests(out: torch.Tensor, lse: torch.Tensor, truth: AttentionTruth, quantises: frozenset[str]) -> list[_Test]:
    """All tests, the most telling first."""
    wide = out.double()
    empty = truth.lse.isneginf()
    tests = []

    def flag(name: str, rule: str, wrong: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> None:
        ratio = torch.where(wrong, math.inf, 0.0)
        tests.append(_Test(name=name, rule=rule, ratio=ratio, got=got, want=want))

    flag("out", "outputs were never written", is_unwritten(out), out, truth.out)
    flag("out", "outputs are NaN", wide.isnan(), out, truth.out)
    flag("out", "outputs are infinite", wide.isinf(), out, truth.out)
    flag("out", "outputs are not 0 although their token sees no key", (wide != 0) & empty[..., None], out, truth.out)
    flag("lse", "LSE were never written", is_unwritten(lse), lse, truth.lse)
    flag("lse", "LSE are NaN", lse.isnan(), lse, truth.lse)
    flag("lse", "LSE are +inf", lse.isposinf(), lse, truth.lse)
    flag("lse", "LSE are finite although their token sees no key (-inf is right)", lse.isfinite() & empty, lse, truth.lse)
    flag("lse", "LSE are -inf although their token sees keys", lse.isneginf() & ~empty, lse, truth.lse)

    error = (wide - truth.out).abs()
    more = len(quantises & {"products", "partials"})  # roundings of about the size of those counted in the baseline
    unit = torch.finfo(truth.dtype).eps / 2
    allowed = MAX_FACTOR * (1 + more) ** 0.5 * truth.baseline_max + (1 + more) * unit * truth.out.abs()
    l2, l2_allowed = error.norm(dim=-1), L2_FACTOR * (1 + more / 2) ** 0.5 * truth.baseline_l2
    lse_error = torch.where(lse == truth.lse, 0.0, (lse.double() - truth.lse).abs())
    lse_allowed = LSE_FACTOR * (truth.baseline_lse + (truth.baseline_normaliser if "normaliser" in quantises else 0.0))
    for name, rule, got, want, err, may in (
        ("max", "outputs are outside tolerance", out, truth.out, error, allowed),
        ("l2", "rows are outside tolerance (L2)", wide.norm(dim=-1), truth.out.norm(dim=-1), l2, l2_allowed),
        ("lse", "LSE are outside tolerance", lse, truth.lse, lse_error, lse_allowed),
    ):
        ratio = (err / may.clamp(min=1e-300)).nan_to_num(nan=math.inf, posinf=math.inf)
        tests.append(_Test(name=name, rule=rule, ratio=ratio, got=got, want=want, error=err, allowed=may))
    return tests


def _verdict(tests: list[_Test], failed: torch.Tensor, truth: AttentionTruth) -> Verdict:
    """Choose the worst; one trip to the host for all counts, one for the place."""
    if not failed.numel():
        return Verdict(passed=True, num_rows=0, num_failed=0, ratios={"l2": 0.0, "max": 0.0, "lse": 0.0})
    numbers = [failed.sum(), *(n for test in tests for n in ((test.ratio > 1).sum(), test.ratio.max(), test.ratio.argmax()))]
    num_failed, *found = torch.stack([n.double() for n in numbers]).tolist()
    counts, worsts, places = found[::3], found[1::3], found[2::3]
    ratios = {test.name: worst for test, worst in zip(tests, worsts, strict=True) if test.error is not None}
    wrong = [index for index, count in enumerate(counts) if count]
    at = wrong[0] if wrong else max(range(len(tests) - 3, len(tests)), key=lambda i: worsts[i])
    test = tests[at]
    flat = int(places[at])
    shown = [test.got, test.want] + ([test.error, test.allowed] if test.error is not None and test.allowed is not None else [])
    values = torch.stack([tensor.flatten()[flat].double() for tensor in shown]).tolist()
    place = _place(flat, test.ratio.shape, truth)
    got, want, error, allowed = (*values, None, None)[:4]
    verdict = Verdict(
        passed=not wrong, num_rows=failed.numel(), num_failed=int(num_failed), ratios=ratios, place=place,
        got=got, want=want, error=error, allowed=allowed,
    )
    if not wrong:
        return verdict
    where = ", ".join(f"{name} {index}" for name, index in place.items())
    reason = f"{int(counts[at])} of {test.ratio.numel()} {test.rule}; "
    reason += f"{'first' if error is None else 'worst'} [{where}]: got {got:.5g}, want {want:.5g}"
    if error is not None:
        reason += f", error {error:.2g}, allowed {allowed:.2g}"
    return dataclasses.replace(verdict, reason=reason)


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

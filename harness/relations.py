"""Relations that need no oracle: two launches whose answers must agree, whatever is right.

Each is a generator of answers to one variation of the plain inputs, in the order of the original. An answer equal to the
original bit for bit is right; where an entry claims no more than tolerance, another one is judged as the original was.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from harness.check import Verdict
from harness.device import Device
from harness.hazards import OTHER, Hazards, as_asked
from harness.ops import operator
from harness.ops.case import Case
from harness.ops.contract import Staged
from harness.registry import Entry, Unsupported
from harness.trial import BUSY_S, Trial, keep_busy, lend, lend_layer

#: Bytes of one cache and seconds of one launch up to which "small" runs relations.
SMALL_BYTES, SMALL_S = 4 << 20, 0.25
#: "small" lets one case in so many prepare an entry anew, which may compile for seconds on a GPU.
SAMPLED = 4


#: Variations of a case's plain inputs: by relation, family of another batch and layout.
Shelf = dict[tuple[str, str, str], Staged]


class NotRun(Exception):
    """The relation says nothing here; the message is the reason."""


class Refused(Exception):
    """The implementation raised an error instead of an answer, which it may; the message is its own."""


class Broken(Exception):
    """The relation does not hold; the message says how."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one launch of a variation left: tensors, what they must equal, and their judge where they need not."""

    tensors: Sequence[torch.Tensor]
    like: Sequence[torch.Tensor]
    judge: Callable[[], Verdict]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """Who is asked: a prepared entry, the plain inputs in its layout, and its answer to them.

    thorough    run what takes long, too
    answer      outputs of the original launch, as words
    shelf       variations of the inputs, kept for other rows of the case
    """

    case: Case
    entry: Entry
    device: Device
    trial: Trial
    staged: Staged
    thorough: bool
    answer: Sequence[torch.Tensor]
    launch_s: float
    shelf: Shelf

    @classmethod
    def of(cls, case: Case, entry: Entry, trial: Trial, staged: Staged, shelf: Shelf, thorough: bool) -> Subject:
        """Launch once more on inputs that were launched on before. Raises Broken where the answer is wrong now."""
        begin = time.perf_counter()
        words = launched(trial, staged)
        launch_s = time.perf_counter() - begin
        verdict = staged.judge(0, entry.impl.quantises, entry.impl.lse)
        if not verdict.passed:
            raise Broken(str(verdict.reason))
        return cls(
            case=case, entry=entry, device=trial.device, trial=trial, staged=staged, thorough=thorough, answer=words,
            launch_s=launch_s, shelf=shelf,
        )

    def varied(self, name: str, make: Callable[[], Staged]) -> Staged:
        """What `make` makes, or made for another row in this layout, with outputs of its own; large ones are not kept."""
        key = (name, self.other.name, self.entry.layout.name)
        kept = self.shelf.get(key)
        if kept is not None and kept.renew():
            return kept
        made = make()
        if self.case.cache_bytes <= SMALL_BYTES:
            self.shelf[key] = made
        return made

    def other_batch(self) -> Staged:
        """Another batch of the same shape."""
        family, op = self.other, operator(self.case.op)
        return self.varied(
            "other", lambda: op.build(self.case, family, layers=1, device=self.device.name).stage(self.entry.layout)
        )

    def alone(self, staged: Staged) -> list[torch.Tensor]:
        """Plan and launch on a variation by itself, and return its outputs as words; raises Broken where they are wrong."""
        words = launched(self.trial, staged)
        verdict = self.judge(staged)
        if not verdict.passed:
            raise Broken(f"another batch, alone: {verdict.reason}")
        return words

    def judge(self, staged: Staged) -> Verdict:
        """Judge what lies in the outputs of these inputs."""
        return staged.judge(0, self.entry.impl.quantises, self.entry.impl.lse)

    def again(self, words: Sequence[torch.Tensor]) -> Answer:
        """These words in place of the outputs of the staged inputs."""

        def judge() -> Verdict:
            for guarded, saved in zip(self.staged.outputs(0), words, strict=True):
                guarded.words.copy_(saved)
            return self.judge(self.staged)

        return Answer(words, self.answer, judge)

    def prepared_for(self, case: Case, params: dict[str, Any]) -> Trial:
        """The entry prepared anew, for another case or other parameters; NotRun where it does not take them."""
        why_not = self.entry.impl.why_not(case, self.device.kind)
        if why_not:
            raise NotRun(why_not)
        spec = operator(case.op).spec(case, self.entry.layout, self.device.name, {**self.params, **params})
        try:
            return Trial.of(self.entry.impl.load(), spec, self.device)
        except Unsupported as why:
            raise NotRun(str(why)) from why

    @property
    def params(self) -> dict[str, Any]:
        return self.entry.impl.resolve_params(self.entry.params)

    @property
    def other(self) -> Hazards:
        """The family of another batch."""
        return as_asked(OTHER, self.entry.impl.tails, bool(getattr(self.case, "window", None)))

    @property
    def unused(self) -> float:
        """What lies in slots that hold no token."""
        return 0.0 if self.entry.impl.tails == "finite" else math.nan

    @property
    def busy_s(self) -> float:
        """For how long the device is kept busy while the host plans and launches, twice perhaps."""
        return min(max(2 * self.launch_s, BUSY_S), 4 * BUSY_S)

    def require_time(self) -> None:
        """Raise NotRun unless what must be prepared anew is to run on this case."""
        if not self.thorough and self.device.kind == "cuda" and int(self.case.digest, 16) % SAMPLED:
            raise NotRun(f"it prepares the entry anew, which one small case in {SAMPLED} does (--relations all)")

    def require_cuda(self) -> None:
        if self.device.kind != "cuda":
            raise NotRun("there is no GPU")


def launched(
    trial: Trial, staged: Staged, *, plan: bool = True, busy: bool = False, soil: Callable[[int], None] | None = None
) -> list[torch.Tensor]:
    """Launch on the first set and return its outputs as words; raises Broken where the launch did more than that."""
    if plan:
        trial.plan(staged.step)
    trial.launch(staged, 0, busy=busy, soil=soil)
    return outputs(trial, staged)


def outputs(trial: Trial, staged: Staged) -> list[torch.Tensor]:
    """The outputs of what was launched on the first set, as words; raises Broken where the launch did more than that."""
    why = trial.look(staged, [0])
    if why:
        raise Broken(why)
    return [guarded.words.clone() for guarded in staged.outputs(0)]


def repeat(subject: Subject) -> Iterator[Answer]:
    """The same launch again leaves the same bits; nothing is accumulated, left behind or ordered by chance.

    The second one finds finite outputs, as in an engine, where every other launch of a check finds NaN.
    """
    trial, staged = subject.trial, subject.staged
    yield subject.again(launched(trial, staged))
    worn = functools.partial(staged.wear, lse=subject.entry.impl.lse)
    yield subject.again(launched(trial, staged, plan=False, soil=worn))


def two_plans(subject: Subject) -> Iterator[Answer]:
    """Another batch is planned and launched while the first still waits for its device: neither shows in the other.

    A host buffer that is filled again before its copy to the device is done gives the first batch the plan of the second.
    """
    trial, first = subject.trial, subject.staged
    second = subject.other_batch()
    alone = subject.alone(second)
    subject.device.synchronize()
    keep_busy(subject.device, subject.busy_s)
    for staged in (first, second):
        trial.plan(staged.step)
        trial.launch(staged, 0)
    yield subject.again(outputs(trial, first))
    yield Answer(outputs(trial, second), alone, lambda: subject.judge(second))


def graph(subject: Subject) -> Iterator[Answer]:
    """A captured launch, replayed, does what it does eagerly."""
    subject.require_cuda()
    if not subject.entry.impl.graph:
        raise NotRun("the entry says graph=False")
    trial, staged = subject.trial, subject.staged
    trial.plan(staged.step)
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured):
        trial.prepared.launch(*lend(staged.arguments(0)), **lend_layer(staged.keywords(0)))
    for _ in range(2):
        staged.soil(0)
        captured.replay()
        yield subject.again(outputs(trial, staged))


def side_stream(subject: Subject) -> Iterator[Answer]:
    """Planned and launched on a side stream, while the main one is busy, it has ended when the side stream has."""
    subject.require_cuda()
    trial, staged = subject.trial, subject.staged
    staged.soil(0)
    torch.cuda.synchronize()
    keep_busy(subject.device, subject.busy_s)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        trial.plan(staged.step)
        trial.prepared.launch(*lend(staged.arguments(0)), **lend_layer(staged.keywords(0)))
        words = outputs(trial, staged)
    stream.synchronize()  # the words are copied there, and compared here
    yield subject.again(words)


Relation = Callable[[Subject], Iterator[Answer]]

#: what every operator is asked; attention more (harness/attention_relations.py)
GENERAL: dict[str, Relation] = {"repeat": repeat, "two_plans": two_plans, "graph": graph, "side_stream": side_stream}


def relations_of(op: str) -> dict[str, Relation]:
    """The relations of an operator, by name, in the order in which they run."""
    if op != "attention":
        return GENERAL
    from harness.attention_relations import ATTENTION

    return GENERAL | ATTENTION


def check_relations(subject: Subject, note: dict[str, str], progress: Callable[[str], None] = lambda _: None) -> str | None:
    """Run every relation and note how each held: "bitwise", "tolerance", "refused: ...", "not run: ...".

    Returns what is wrong at the first that does not hold, else None.
    """
    if not subject.thorough and subject.launch_s > SMALL_S:
        note["not run"] = f"one launch takes {subject.launch_s:.1f} s (--relations all)"
        return None
    for name, relation in relations_of(subject.case.op).items():
        progress(name)
        try:
            note[name] = _hold(subject, name, relation)
        except NotRun as why:
            note[name] = f"not run: {why}"
        except Refused as why:
            note[name] = f"refused: {why}"
        except Broken as how:
            note[name] = f"broken: {how}"
            return f"relation {name}: {how}"
    return None


def _hold(subject: Subject, name: str, relation: Relation) -> str:
    held, claim = "bitwise", subject.entry.impl.claim(name)
    for answer in relation(subject):
        differ, total = _count_differences(answer)
        if not differ:
            continue
        if claim == "bitwise":
            raise Broken(f"claimed bitwise, but {differ} of {total} elements differ")
        verdict = answer.judge()
        if not verdict.passed:
            raise Broken(str(verdict.reason))
        held = "tolerance"
    return held


def _count_differences(answer: Answer) -> tuple[int, int]:
    pairs = list(zip(answer.tensors, answer.like, strict=True))
    differ = torch.stack([(_bits(one) != _bits(other)).sum() for one, other in pairs]).sum()
    return int(differ), sum(one.numel() for one, _ in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])

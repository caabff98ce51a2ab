"""Relations of paged attention: what may not matter to it, and what it must add up to. See relations.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from harness.check import Verdict, fill_unwritten, is_unwritten, judge_attention
from harness.guards import swap
from harness.hazards import PLAIN, deal_blocks
from harness.ops.attention import AttentionCase
from harness.ops.attention_tensors import AttentionInputs
from harness.ops.dtypes import movable
from harness.relations import Answer, Broken, NotRun, Refused, Relation, Subject, launched, outputs
from harness.trial import Trial, lend, lend_layer
from harness.truth import AttentionTruth
from harness.words import of_error

if TYPE_CHECKING:
    from harness.ops.attention_staged import StagedAttention

Pair = tuple[torch.Tensor, torch.Tensor]


class _Plain:
    """The plain inputs behind a subject, and answers in their order."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.staged = cast("StagedAttention", subject.staged)
        self.case: AttentionCase = self.staged.inputs.case
        self.inputs, self.step = self.staged.inputs, self.staged.step
        self.query, self.key, self.value = (getattr(self.inputs.layers[0], name) for name in ("query", "key", "value"))
        self.named = self.inputs.layers[0].named
        self.original = tuple(
            words.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
            for words, tensor in zip(subject.answer, (self.staged.outs[0], self.staged.lses[0]), strict=True)
        )

    def vary(self, case: AttentionCase, **changed: Any) -> AttentionInputs:
        """Inputs like these but for `tables` on the host, `query`, `key`, `value` and what is `named`."""
        tables = changed.pop("tables", self.step.host_block_tables)
        tensors = {"query": self.query, "key": self.key, "value": self.value, "named": self.named, **changed}
        return AttentionInputs.given(case, PLAIN, tables, **tensors)

    def attend(self, name: str, make: Callable[[], AttentionInputs], trial: Trial | None = None) -> Pair:
        """Plan and launch on what `make` makes, once for all rows in this layout: `name` says of what."""
        staged = cast("StagedAttention", self.subject.varied(name, lambda: make().stage(self.subject.entry.layout)))
        launched(trial or self.subject.trial, staged, busy=trial is not None)  # one prepared anew has not shown its streams
        return staged.outs[0], staged.lses[0]

    def answer(
        self, pair: Sequence[torch.Tensor], like: Sequence[torch.Tensor] | None = None,
        truth: Callable[[], AttentionTruth] | None = None, rounds: frozenset[str] = frozenset(),
    ) -> Answer:
        """An answer to be equal to `like`, or right by `truth`; both are the original's where they are not given."""
        quantises = self.subject.entry.impl.quantises | rounds
        lse = pair[1] if self.subject.entry.impl.lse else None

        def judge() -> Verdict:
            known = truth() if truth else self.inputs.truth(0, quantises)
            return judge_attention(pair[0], lse, known, quantises)

        return Answer(pair, like or self.original, judge)

    def require_blocks(self) -> None:
        if not self.subject.entry.layout.paged:
            raise NotRun("the layout has no blocks")


def block_permutation(subject: Subject) -> Iterator[Answer]:
    """The same tokens in other blocks of the pool."""
    plain = _Plain(subject)
    plain.require_blocks()
    cycle = np.random.default_rng(0).permutation(plain.case.num_blocks).astype(np.int32)
    moved = np.empty_like(cycle)
    moved[cycle] = np.roll(cycle, 1)  # no block stays where it is
    tables = moved[plain.step.host_block_tables]

    def make() -> AttentionInputs:
        order = torch.from_numpy(np.argsort(moved)).to(plain.key.device)
        key, value = (movable(pool)[order].view(pool.dtype) for pool in (plain.key, plain.value))
        return plain.vary(plain.case, tables=tables, key=key, value=value)

    yield plain.answer(plain.attend("block_permutation", make))


def clean_pool(subject: Subject) -> Iterator[Answer]:
    """The same tokens where nothing is poisoned: stale tokens, as an engine leaves them, lie where NaN lay."""
    plain = _Plain(subject)

    def cleaned(pool: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
        ordinary = torch.empty_like(pool, dtype=plain.query.dtype).normal_(generator=chance).to(pool.dtype)
        return torch.where(pool.float().isnan(), movable(ordinary), movable(pool)).view(pool.dtype)

    def make() -> AttentionInputs:
        chance = torch.Generator(device=plain.key.device).manual_seed(0)
        pools = [cleaned(pool, chance) for pool in (plain.key, plain.value)]
        return plain.vary(plain.case, key=pools[0], value=pools[1])

    yield plain.answer(plain.attend("clean_pool", make))


def same_addresses(subject: Subject) -> Iterator[Answer]:
    """Another batch behind the addresses of the first: what was remembered by address is the other one's."""
    second = cast("StagedAttention", subject.other_batch())
    yield _behind(subject, second, lambda first: subject.trial.launch(first, 0))


def replay(subject: Subject) -> Iterator[Answer]:
    """A captured launch, planned anew for shorter sequences behind the same addresses, and replayed: as an engine's step is."""
    subject.require_cuda()
    impl, plain = subject.entry.impl, _Plain(subject)
    if not (impl.graph and impl.replays):
        raise NotRun(f"the entry says {'replays' if impl.graph else 'graph'}=False")
    case, first = plain.case, plain.staged
    lens = tuple(max(min(q_len, n), n // 2) for n, q_len in zip(case.seq_lens, case.q_lens, strict=True))
    shorter = dataclasses.replace(case, seq_lens=lens, prefix=())

    def make() -> StagedAttention:
        return plain.vary(shorter, tables=plain.step.host_block_tables).stage(subject.entry.layout)

    second = cast("StagedAttention", subject.varied("shorter", make))
    subject.trial.plan(first.step)
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured):
        subject.trial.prepared.launch(*lend(first.arguments(0)), **lend_layer(first.keywords(0)))

    def launch(first: StagedAttention) -> None:
        first.soil(0)
        captured.replay()

    yield _behind(subject, second, launch)


def _behind(subject: Subject, second: StagedAttention, launch: Callable[[StagedAttention], None]) -> Answer:
    """Plan and `launch` the second batch in the first one's tensors: the answer is to be the one that it gets alone."""
    trial, first = subject.trial, cast("StagedAttention", subject.staged)
    alone = launched(trial, second)
    swap(first.read, second.read)
    try:
        hosts = {name: getattr(second.step, name) for name in ("host_block_tables", "host_seq_lens", "host_query_start_loc")}
        trial.plan(dataclasses.replace(first.step, **hosts))
        launch(first)
        words = outputs(trial, first)
    finally:
        swap(first.read, second.read)

    def judge() -> Verdict:
        for guarded, saved in zip(second.outputs(0), words, strict=True):
            guarded.words.copy_(saved)
        return second.judge(0, subject.entry.impl.quantises, subject.entry.impl.lse)

    return Answer(words, alone, judge)


def batch_order(subject: Subject) -> Iterator[Answer]:
    """The same sequences, the last one first."""
    plain = _Plain(subject)
    case = plain.case
    if case.num_seqs < 2:
        raise NotRun("there are fewer than two sequences")
    order = np.arange(case.num_seqs)[::-1]
    tokens = np.concatenate([np.arange(case.query_starts[seq], case.query_starts[seq + 1]) for seq in order]).astype(np.int64)
    back = torch.from_numpy(np.argsort(tokens)).to(plain.query.device)
    turned = dataclasses.replace(
        case, seq_lens=tuple(case.seq_lens[seq] for seq in order), q_lens=tuple(case.q_lens[seq] for seq in order),
        prefix=(),  # it is in the tables
    )

    def make() -> AttentionInputs:
        query = plain.query[torch.from_numpy(tokens).to(plain.query.device)]
        return plain.vary(turned, tables=plain.step.host_block_tables[order], query=query)

    out, lse = plain.attend("batch_order", make)
    yield plain.answer((out[back], lse[back]))


def block_size(subject: Subject) -> Iterator[Answer]:
    """The same tokens in blocks of another size."""
    plain = _Plain(subject)
    plain.require_blocks()
    subject.require_time()
    case = plain.case
    sizes = [size for size in (2 * case.block_size, case.block_size // 2, 16, 32) if size not in (0, case.block_size)]
    if case.prefix:
        raise NotRun("sequences share blocks, which have another number of tokens then")
    others = [dataclasses.replace(case, block_size=size) for size in sizes]
    other = next((other for other in others if subject.entry.impl.why_not(other, subject.device.kind) is None), None)
    if other is None:
        raise NotRun("the entry takes no other block size")

    def make() -> AttentionInputs:
        tables = deal_blocks(other.blocks_per_seq, other.num_blocks, np.random.default_rng(0))
        pools = [_repage(pool, plain, other, tables) for pool in (plain.key, plain.value)]
        return plain.vary(other, tables=tables, key=pools[0], value=pools[1])

    trial = subject.prepared_for(other, {})
    yield plain.answer(plain.attend(f"block_size {other.block_size}", make, trial))


def _repage(pool: torch.Tensor, plain: _Plain, other: AttentionCase, tables: np.ndarray) -> torch.Tensor:
    """The tokens of a pool in blocks of another case, NaN around them where the entry takes that."""
    shape = (other.num_blocks, other.block_size, other.num_kv_heads, other.head_dim)
    repaged = torch.full(shape, plain.subject.unused, dtype=pool.dtype, device=pool.device)
    lens = np.array(other.seq_lens, np.int64)
    seq = np.repeat(np.arange(len(lens)), lens)
    position = np.arange(len(seq)) - np.repeat(lens.cumsum() - lens, lens)
    places = ((plain.step.host_block_tables, plain.case.block_size), (tables, other.block_size))
    source, target = (
        [torch.from_numpy(part.astype(np.int64)).to(pool.device) for part in (table[seq, position // size], position % size)]
        for table, size in places
    )
    movable(repaged)[target[0], target[1]] = movable(pool)[source[0], :, source[1]]
    return repaged.transpose(1, 2).contiguous()


def splits(subject: Subject) -> Iterator[Answer]:
    """Sequences cut into other numbers of splits: one, some, the most."""
    plain = _Plain(subject)
    declared = [value for value in subject.entry.impl.params.get("splits", ()) if value != subject.params.get("splits")]
    if not declared:
        raise NotRun("the entry declares no splits")
    subject.require_time()
    for value in sorted({declared[0], declared[len(declared) // 2], declared[-1]}):
        trial = subject.prepared_for(plain.case, {"splits": value})
        yield plain.answer(plain.attend("splits", lambda: plain.inputs, trial))


def halves(subject: Subject) -> Iterator[Answer]:
    """The first blocks and the others, attended to alone and merged by their LSE."""
    plain = _Plain(subject)
    plain.require_blocks()
    case, tables = plain.case, plain.step.host_block_tables
    if not subject.entry.impl.lse:
        raise NotRun("the entry gives no LSE to merge by")
    if case.max_q_len > 1:
        raise NotRun("halves are for decode: with several query tokens the mask would move")
    moving = {"window", "alibi", "sinks"} & set(case.features)
    if moving:
        raise NotRun(f"halves are for plain rows: {', '.join(sorted(moving))} of the two are not those of the whole")
    cut = [-(-count // 2) for count in case.blocks_per_seq]
    first = tuple(min(count * case.block_size, seq_len) for count, seq_len in zip(cut, case.seq_lens, strict=True))
    rest = tuple(seq_len - done for done, seq_len in zip(first, case.seq_lens, strict=True))
    column = np.arange(tables.shape[1])[None, :] + np.array(cut, dtype=np.int64).reshape(-1, 1)
    shifted = np.take_along_axis(tables, np.minimum(column, tables.shape[1] - 1), axis=1)

    def make(lens: tuple[int, ...], table: np.ndarray) -> AttentionInputs:
        return plain.vary(dataclasses.replace(case, seq_lens=lens, prefix=()), tables=table)

    both = {"first half": (first, tables), "second half": (rest, shifted)}
    parts = [plain.attend(name, functools.partial(make, *half)) for name, half in both.items()]
    yield plain.answer(_merge(parts), rounds=frozenset({"partials"}))


def _merge(parts: Sequence[Pair]) -> Pair:
    """Two normalised partial results as one, in float64; where neither saw a key, out is 0 and lse -inf."""
    logs = torch.stack([lse for _, lse in parts]).double()
    whole = logs.logsumexp(0)
    weights = (logs - torch.where(whole.isneginf(), 0.0, whole)).exp()
    out = sum(weight[..., None] * out.double() for weight, (out, _) in zip(weights, parts, strict=True))
    return cast("torch.Tensor", out).to(parts[0][0].dtype), whole.float()


def strided_query(subject: Subject) -> Iterator[Answer]:
    """Query and out as slices of fused QKV projections: tokens lie further apart than their heads need."""
    plain = _Plain(subject)
    case, query = plain.case, plain.query
    wide = query.new_full((len(query), case.num_q_heads + 2 * case.num_kv_heads, case.head_dim), float("nan"))
    wide[:, : case.num_q_heads] = query
    wide_out = _unwritten_like(wide)
    out = wide_out[:, : case.num_q_heads]
    yield plain.answer(_launch_on(plain, (wide[:, : case.num_q_heads], *plain.staged.caches[0], out)))
    if not is_unwritten(wide_out[:, case.num_q_heads :].contiguous()).all():
        raise Broken("wrote between the tokens of a strided out")


def strided_cache(subject: Subject) -> Iterator[Answer]:
    """Caches whose blocks lie twice as far apart as they need, NaN between them."""
    plain = _Plain(subject)
    plain.require_blocks()
    caches = []
    for cache in plain.staged.caches[0]:
        wide = torch.full((len(cache), 2, *cache.shape[1:]), subject.unused, dtype=cache.dtype, device=cache.device)
        movable(wide)[:, 0] = movable(cache)
        caches.append(wide[:, 0])
    yield plain.answer(_launch_on(plain, (plain.query, *caches, _unwritten_like(plain.query))))


def _unwritten_like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor)
    fill_unwritten(made)
    return made


def _launch_on(plain: _Plain, tensors: tuple[torch.Tensor, ...]) -> Pair:
    """Launch on tensors of other strides, which an implementation may refuse, in words of its own."""
    out, lse = tensors[3], _unwritten_like(plain.staged.lses[0])
    plain.subject.trial.plan(plain.step)
    try:
        plain.subject.trial.prepared.launch(*tensors, lse, **plain.named)
    except Exception as error:
        raise Refused(f"{of_error(error)}") from error
    plain.subject.device.synchronize()
    return out, lse


def shared_prefix(subject: Subject) -> Iterator[Answer]:
    """Two sequences that read the same first blocks, against one that has a copy of the other's."""
    plain = _Plain(subject)
    plain.require_blocks()
    case, tables = plain.case, plain.step.host_block_tables
    if case.prefix or case.window:
        why = "sequences share blocks as they are" if case.prefix else "what one sequence sees is behind another's window"
        raise NotRun(why)
    full = sorted(((seq_len // case.block_size, seq) for seq, seq_len in enumerate(case.seq_lens)), reverse=True)[:2]
    if len(full) < 2 or not full[1][0]:
        raise NotRun("there are no two sequences with a full block")
    count, owner, other = full[1][0], full[0][1], full[1][1]
    shared = tables.copy()
    shared[other, :count] = tables[owner, :count]

    def make(copies: bool) -> AttentionInputs:
        index = [torch.from_numpy(tables[seq, :count].astype(np.int64)).to(plain.key.device) for seq in (owner, other)]
        pools = [plain.key.clone(), plain.value.clone()]
        for pool in pools:
            unused = torch.full((1,), subject.unused, dtype=pool.dtype, device=pool.device)
            movable(pool)[index[1]] = movable(pool)[index[0]] if copies else movable(unused)
        return plain.vary(case, tables=tables if copies else shared, key=pools[0], value=pools[1])

    copied, read_twice = (
        plain.attend(name, functools.partial(make, copies)) for name, copies in (("copied", True), ("shared", False))
    )
    yield plain.answer(read_twice, copied, lambda: make(copies=True).truth(0, subject.entry.impl.quantises))


def layers(subject: Subject) -> Iterator[Answer]:
    """A second layer under the plan of the first, which is this one with its heads in reverse."""
    plain = _Plain(subject)

    def make() -> AttentionInputs:
        key, value = (movable(pool).flip(1).view(pool.dtype) for pool in (plain.key, plain.value))
        named = {name: tensor.flip(0) for name, tensor in plain.named.items()}
        inputs = plain.vary(plain.case, query=plain.query.flip(1), key=key, value=value, named=named)
        return dataclasses.replace(inputs, step=plain.step)

    second = cast("StagedAttention", subject.varied("layers", lambda: make().stage(subject.entry.layout)))
    trial = subject.trial
    launched(trial, second)
    anew = [tensor.clone() for tensor in (second.outs[0], second.lses[0])]
    launched(trial, subject.staged)
    launched(trial, second, plan=False)
    for pair in (anew, (second.outs[0], second.lses[0])):
        back = (pair[0].flip(1), pair[1].flip(1))
        yield plain.answer(back, (anew[0].flip(1), anew[1].flip(1)) if pair is not anew else None)


ATTENTION: dict[str, Relation] = {
    relation.__name__: relation
    for relation in (
        block_permutation, clean_pool, same_addresses, replay, batch_order, shared_prefix, layers, halves, strided_query,
        strided_cache, block_size, splits,
    )
}

"""Relations of paged attention: what may not matter to it, and what it must add up to. See relations.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from harness.check import Verdict, fill_unwritten, is_unwritten
from harness.guards import Guarded, empty, seal, swap
from harness.halves import halves
from harness.hazards import deal_blocks
from harness.ops.attention import AttentionCase
from harness.ops.attention_tensors import AttentionInputs
from harness.ops.dtypes import movable
from harness.plain import Pair, Plain, repage
from harness.registry import Unsupported
from harness.relations import Answer, Broken, NotRun, Refused, Relation, Subject, launched, outputs
from harness.trial import lend, lend_layer
from harness.words import of_error

if TYPE_CHECKING:
    from harness.ops.attention_staged import StagedAttention


def block_permutation(subject: Subject) -> Iterator[Answer]:
    """The same tokens in other blocks of the pool."""
    plain = Plain(subject)
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
    plain = Plain(subject)

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
    impl, plain = subject.entry.impl, Plain(subject)
    if not (impl.graph and impl.replays):
        raise NotRun(f"the entry says {'replays' if impl.graph else 'graph'}=False")
    case, first = plain.case, plain.staged
    lens = tuple(max(min(q_len, n), n // 2) for n, q_len in zip(case.seq_lens, case.q_lens, strict=True))
    shorter = dataclasses.replace(case, seq_lens=lens, prefix=())

    def make() -> StagedAttention:
        return plain.vary(shorter, tables=plain.step.host_block_tables).stage(subject.entry.layout)

    # A shorter sequence's window would see what is poison as long as it lies before it: there other tables must do.
    second = cast("StagedAttention", subject.other_batch() if case.window else subject.varied("shorter", make))
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
    alone = subject.alone(second)
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
        return subject.judge(second)

    return Answer(words, alone, judge)


def batch_order(subject: Subject) -> Iterator[Answer]:
    """The same sequences, the last one first."""
    plain = Plain(subject)
    if plain.case.num_seqs < 2:
        raise NotRun("there are fewer than two sequences")
    _, tokens, make = _sequences(plain, np.arange(plain.case.num_seqs)[::-1])
    back = tokens.argsort()
    out, lse = plain.attend("batch_order", make)
    yield plain.answer((out[back], lse[back]))


def smaller_step(subject: Subject) -> Iterator[Answer]:
    """The same sequences but the longest: fewer of them, of fewer tokens, than what was prepared for, as an engine's are."""
    plain = Plain(subject)
    if plain.case.num_seqs < 2:
        raise NotRun("there are fewer than two sequences")
    longest = int(np.argmax(plain.case.seq_lens))
    smaller, tokens, make = _sequences(plain, np.delete(np.arange(plain.case.num_seqs), longest))
    if not any(n and q_len for n, q_len in zip(smaller.seq_lens, smaller.q_lens, strict=True)):
        raise NotRun("only the longest sequence has keys and query tokens")
    pair, (out, lse) = plain.attend("smaller_step", make), plain.original
    yield plain.answer(pair, (out[tokens], lse[tokens]), lambda: make().truth(0, subject.entry.impl.quantises))


def _sequences(plain: Plain, seqs: np.ndarray) -> tuple[AttentionCase, torch.Tensor, Callable[[], AttentionInputs]]:
    """The case of these sequences in this order, the numbers of their query tokens, and what makes their inputs."""
    case = plain.case
    numbers = np.concatenate([np.arange(case.query_starts[seq], case.query_starts[seq + 1]) for seq in seqs])
    tokens = torch.from_numpy(numbers.astype(np.int64)).to(plain.query.device)
    chosen = dataclasses.replace(
        case, seq_lens=tuple(case.seq_lens[seq] for seq in seqs), q_lens=tuple(case.q_lens[seq] for seq in seqs),
        prefix=(),  # it is in the tables
    )

    def make() -> AttentionInputs:
        return plain.vary(chosen, tables=plain.step.host_block_tables[seqs], query=plain.query[tokens])

    return chosen, tokens, make


def block_size(subject: Subject) -> Iterator[Answer]:
    """The same tokens in blocks of another size."""
    plain = Plain(subject)
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
        begins = np.zeros(other.num_seqs, np.int64)
        pools = [repage(pool, plain, other, tables, other.num_blocks, begins) for pool in (plain.key, plain.value)]
        return plain.vary(other, tables=tables, key=pools[0], value=pools[1])

    trial = subject.prepared_for(other, {})
    yield plain.answer(plain.attend(f"block_size {other.block_size}", make, trial))


def splits(subject: Subject) -> Iterator[Answer]:
    """Sequences cut into other numbers of splits: one, some, the most."""
    plain = Plain(subject)
    declared = [value for value in subject.entry.impl.params.get("splits", ()) if value != subject.params.get("splits")]
    if not declared:
        raise NotRun("the entry declares no splits")
    subject.require_time()
    for value in sorted({declared[0], declared[len(declared) // 2], declared[-1]}):
        trial = subject.prepared_for(plain.case, {"splits": value})
        yield plain.answer(plain.attend("splits", lambda: plain.inputs, trial))


def strided_query(subject: Subject) -> Iterator[Answer]:
    """Query and out as slices of fused QKV projections: tokens lie further apart than their heads need."""
    plain = Plain(subject)
    case, query = plain.case, plain.query
    shape = (len(query), case.num_q_heads + 2 * case.num_kv_heads, case.head_dim)
    (wide, of_query), (wide_out, of_out) = (empty(name, shape, query.dtype, query.device) for name in ("query", "out"))
    wide.fill_(float("nan"))
    wide[:, : case.num_q_heads] = query
    fill_unwritten(wide_out)
    tensors = (wide[:, : case.num_q_heads], *plain.staged.caches[0], wide_out[:, : case.num_q_heads])
    yield plain.answer(_launch_on(plain, tensors, [of_query], of_out))
    if not is_unwritten(wide_out[:, case.num_q_heads :].contiguous()).all():
        raise Broken("wrote between the tokens of a strided out")


def strided_cache(subject: Subject) -> Iterator[Answer]:
    """Caches whose blocks lie twice as far apart as they need, NaN between them."""
    plain = Plain(subject)
    plain.require_blocks()
    caches, held = [], []
    for name, cache in zip(("key_cache", "value_cache"), plain.staged.caches[0], strict=True):
        wide, guarded = empty(name, (len(cache), 2, *cache.shape[1:]), cache.dtype, cache.device)
        wide.fill_(subject.unused)
        movable(wide)[:, 0] = movable(cache)
        caches.append(wide[:, 0])
        held.append(guarded)
    out, of_out = empty("out", plain.query.shape, plain.query.dtype, plain.query.device)
    fill_unwritten(out)
    yield plain.answer(_launch_on(plain, (plain.query, *caches, out), held, of_out))


def _launch_on(plain: Plain, tensors: tuple[torch.Tensor, ...], read: Sequence[Guarded], written: Guarded) -> Pair:
    """Launch on tensors of other strides, which an implementation may refuse; `read` and `written` are those made for it."""
    trial, out = plain.subject.trial, tensors[3]
    lse, of_lse = empty("lse", plain.staged.lses[0].shape, torch.float32, out.device)
    fill_unwritten(lse)
    seal(read)
    trial.plan(plain.step)
    try:
        trial.prepared.launch(*tensors, lse, **plain.named)
    except Exception as error:
        raise (Refused(of_error(error)) if _refuses(error) else Broken(f"raised {of_error(error)}")) from error
    plain.subject.device.synchronize()
    why = trial.damage(plain.staged, read, [written, of_lse])
    if why:
        raise Broken(why)
    return out, lse


def _refuses(error: Exception) -> bool:
    """Whether it says that it does not take what it was given; whatever else is raised is a crash."""
    if isinstance(error, (ValueError, NotImplementedError, AssertionError, Unsupported)):
        return True
    return any(word in of_error(error) for word in ("stride", "contiguous"))  # libraries: RuntimeError


def shared_prefix(subject: Subject) -> Iterator[Answer]:
    """Two sequences that read the same first blocks, against one that has a copy of the other's."""
    plain = Plain(subject)
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

    copied = cast("StagedAttention", subject.varied("copied", lambda: make(copies=True).stage(subject.entry.layout)))
    subject.alone(copied)
    read_twice = plain.attend("shared", functools.partial(make, copies=False))
    like = (copied.outs[0], copied.lses[0])
    yield plain.answer(read_twice, like, lambda: copied.inputs.truth(0, subject.entry.impl.quantises))


def layers(subject: Subject) -> Iterator[Answer]:
    """A second layer under the plan of the first, which is this one with its heads in reverse."""
    plain = Plain(subject)

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
        block_permutation, clean_pool, same_addresses, replay, batch_order, smaller_step, shared_prefix, layers, halves,
        strided_query, strided_cache, block_size, splits,
    )
}

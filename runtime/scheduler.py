"""Who runs in the next step: continuous batching over the block manager. Plain Python and NumPy; it sees no tensor.

A step, which the engine asks for in this order:

    schedule()             who runs, with slots for what they feed; or None
    launched(batch)        the device has it: what the host knows of its tokens is committed, answers are forked
    collect(batch, ...)    its samples are on the host, usually after the next step was launched

The token that a step samples is fed by the next one before the host has seen it. So an end is seen one step late: what
was launched behind it is ignored, and its slots go back with the others of the sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.beams import Found, advance
from runtime.errors import OutOfBlocks
from runtime.groups import Group, Sequence
from runtime.manager import BlockManager
from runtime.preemption import NO_PAIRS
from runtime.requests import Answer, Event, InvalidRequest, Request
from runtime.stores import WATERMARK

Pairs = NDArray[np.int32]
Pick = tuple[Sequence, int]  # who feeds, and how many tokens


@dataclass(kw_only=True)
class Batch:
    """One step's work. Rows with one token stand first.

    rows            the sequences
    q_lens          [num_rows] int32, tokens that each feeds
    seq_lens        [num_rows] int32, tokens in the cache, these included
    tokens          [num_tokens] int64, -1 where the device has it, in the row's state
    slots           [num_tokens] int64
    block_tables    [num_rows, width] int32, a view that the manager's next call invalidates
    sampled         sequences that get a token, and the index of the query token that it is sampled from
    searched        beam searches, and the query tokens of their beams
    swap_out, swap_in, copies    [n, 2] int32 pairs of blocks to copy first, in this order
    """

    rows: list[Sequence]
    q_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    tokens: NDArray[np.int64]
    slots: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    sampled: list[Sequence] = field(default_factory=list)
    sampled_from: list[int] = field(default_factory=list)
    searched: list[tuple[Group, list[int]]] = field(default_factory=list)
    swap_out: Pairs = field(default_factory=lambda: NO_PAIRS)
    swap_in: Pairs = field(default_factory=lambda: NO_PAIRS)
    copies: Pairs = field(default_factory=lambda: NO_PAIRS)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_decode(self) -> bool:
        """Whether every row feeds one token."""
        return len(self.tokens) == len(self.rows)

    @property
    def num_ones(self) -> int:
        """Rows that feed one token."""
        return int(np.count_nonzero(self.q_lens == 1))


class Scheduler:
    """Requests in, batches out.

    max_num_tokens    query tokens of a step
    max_num_seqs      sequences that run at once
    max_model_len     tokens of a sequence
    eos               token ids that the model ends with
    preempt_by        "recompute" or "swap"; where host memory is full, a swap becomes a recompute
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        eos: Iterable[int] = (),
        preempt_by: str = "recompute",
    ) -> None:
        if max_num_tokens < max_num_seqs:
            raise InvalidRequest(f"max_num_tokens must be at least max_num_seqs (got {max_num_tokens}, {max_num_seqs})")
        self.manager = manager
        self.max_num_tokens, self.max_num_seqs, self.max_model_len = max_num_tokens, max_num_seqs, max_model_len
        self.preempt_by = preempt_by
        self.waiting: deque[Group] = deque()
        self.running: list[Group] = []
        self.groups: dict[Hashable, Group] = {}
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # found in the pool, of all prompts
        self._eos = frozenset(eos)
        self._watermark = int(WATERMARK * manager.num_physical_blocks)
        self._states = list(range(max_num_seqs - 1, -1, -1))
        self._next_id = 0

    # Requests

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest for one that could not be finished even alone."""
        who, width = f"request {request.request_id!r}", request.sampling.width
        if request.request_id in self.groups:
            raise InvalidRequest(f"{who} is being served already: give each request an id of its own")
        length = int(request.prompt.size) + request.sampling.max_tokens
        if length > self.max_model_len:
            raise InvalidRequest(
                f"{who}: prompt and new tokens must be at most {self.max_model_len} together, max_model_len "
                f"(got {request.prompt.size} + {request.sampling.max_tokens})"
            )
        if width > self.max_num_seqs:
            raise InvalidRequest(f"{who}: n or num_beams must be at most {self.max_num_seqs}, max_num_seqs (got {width})")
        blocks, pool = width * -(-length // self.manager.block_size), self.manager.num_physical_blocks
        if blocks > pool:
            raise InvalidRequest(f"{who}: needs up to {blocks} blocks, and the pool has {pool}: give it more num_blocks")
        group = Group(request, self._eos)
        self.groups[request.request_id] = group
        self.waiting.append(group)

    def abort(self, request_id: Hashable) -> list[Event]:
        """End a request where it is; its blocks are free again. Raises InvalidRequest for an id that is not served."""
        group = self.groups.get(request_id)
        if group is None:
            raise InvalidRequest(f"abort: request {request_id!r} is not being served: it has ended, or was never submitted")
        ended = []
        for index in range(group.width):
            if index not in group.answers:
                tokens = next((s.tokens for s in group.sequences if s.index == index), [])
                group.answers[index] = Answer(tokens=tuple(tokens[group.num_prompt :]), finish="abort")
                ended.append(Event(request_id, index, None, "abort"))
        self._end(group)
        return ended

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.groups

    # A step

    def schedule(self) -> Batch | None:
        """Choose who runs; None where everybody waits for results, or nobody is there."""
        picks, swap_out, preempted = self._pick_running()
        swap_in: list[Pairs] = []
        slots: list[NDArray[np.int64]] = []
        if picks:
            slots.append(self._append(picks))
        if self.waiting and not preempted:
            self._admit(picks, slots, swap_in)
        if not picks:
            return None
        batch = self._batch(picks, np.concatenate(slots))
        batch.swap_out = np.concatenate(swap_out) if swap_out else NO_PAIRS
        batch.swap_in = np.concatenate(swap_in) if swap_in else NO_PAIRS
        return batch

    def launched(self, batch: Batch) -> None:
        """Commit what the host knows of the batch, and fork answers whose prompt is through."""
        known = [(row, count) for row, count in zip(batch.rows, batch.q_lens.tolist(), strict=True)
                 if row.num_fed <= len(row.tokens)]  # fmt: skip
        if known:
            tokens = [token for row, count in known for token in row.tokens[row.num_fed - count : row.num_fed]]
            self.manager.commit_tokens([row.sequence_id for row, _ in known], tokens, [count for _, count in known])
        for sequence in batch.sampled:
            group = sequence.group
            if not sequence.num_fed:  # an answer beside the first
                self.manager.fork(group.sequences[0].sequence_id, sequence.sequence_id)
                sequence.num_fed = group.sequences[0].num_fed
                group.sequences.append(sequence)
            sequence.num_pending += 1
        for group, _ in batch.searched:
            group.in_flight = True

    def collect(self, batch: Batch, tokens: Iterable[int], found: Iterable[Found] = ()) -> list[Event]:
        """Take a batch's samples: tokens[i] for sampled[i], and what its beam searches found. Returns what is new."""
        events: list[Event] = []
        fed: list[Sequence] = []
        ended: list[Sequence] = []
        for sequence, token in zip(batch.sampled, tokens, strict=True):
            if sequence.finish is not None:
                continue
            group, known = sequence.group, sequence.tokens
            sequence.num_pending -= 1
            known.append(token)
            if sequence.num_fed == len(known):
                fed.append(sequence)
            finish = group.stops.get(token)
            if finish is None and len(known) >= sequence.max_length:
                finish = "length"
            if finish is not None:
                sequence.finish = finish
                ended.append(sequence)
            events.append(Event(group.request.request_id, sequence.index, token, finish))
        if fed:
            self.manager.commit_tokens([s.sequence_id for s in fed], [s.tokens[-1] for s in fed])
        for sequence in ended:
            self._end_sequence(sequence)
        for (group, _), best in zip(batch.searched, found, strict=True):
            if group.in_flight:
                group.in_flight = False
                events += self._advance(group, best)
        return events

    # Who runs

    def _pick_running(self) -> tuple[list[Pick], list[Pairs], bool]:
        """The running sequences and how many tokens each feeds: those with one first, then prompts as far as the budget goes.

        Groups are preempted, the one admitted last first, until there are blocks for the rest; says whether any was.
        """
        picks: list[Pick] = []
        prompts: list[Pick] = []
        for group in self.running:
            for sequence, unfed in group.feeds():
                (picks if unfed == 1 else prompts).append((sequence, unfed))
        budget = self.max_num_tokens - len(picks)
        for sequence, unfed in prompts:
            if budget:
                picks.append((sequence, min(unfed, budget)))
                budget -= picks[-1][1]
        swaps: list[Pairs] = []
        preempted = False
        while picks and not self.manager.can_append([s.sequence_id for s, _ in picks], [count for _, count in picks]):
            victim = next(group for group in reversed(self.running) if not group.in_flight)
            swaps += self._preempt(victim)
            picks = [(sequence, count) for sequence, count in picks if sequence.group is not victim]
            preempted = True
        return picks, swaps, preempted

    def _admit(self, picks: list[Pick], slots: list[NDArray[np.int64]], swap_in: list[Pairs]) -> None:
        """Let waiting groups in while there are tokens, places and blocks for them; those that were preempted come first."""
        budget = self.max_num_tokens - sum(count for _, count in picks)
        num_seqs = sum(group.width for group in self.running)
        promised = sum(map(self._num_blocks_to_come, self.running))
        while self.waiting:
            group = self.waiting[0]
            num_seqs += group.width
            reserve = promised + (self._watermark if self.running else 0)
            if budget < group.width or num_seqs > self.max_num_seqs or not self._enter(group, reserve, swap_in):
                return
            self.waiting.popleft()
            self.running.append(group)
            for sequence, unfed in group.feeds():
                count = min(unfed, budget)
                if count:
                    picks.append((sequence, count))
                    slots.append(self._append(picks[-1:]))
                    budget -= count
            promised += self._num_blocks_to_come(group)

    def _enter(self, group: Group, reserve: int, swap_in: list[Pairs]) -> bool:
        """Give a group its sequences, if that and its next token leave `reserve` blocks; else change nothing."""
        manager = self.manager
        if group.preempted_by is not None:
            return self._resume(group, reserve, swap_in)
        sequence_id = manager.create_sequence(group.request.prompt, self._next_id, salt=group.request.salt)
        found = manager.num_cached_tokens(sequence_id)
        missing = manager.num_missing_blocks([sequence_id], [group.num_prompt + 1 - found])
        if missing > manager.num_available_blocks - reserve:
            manager.release_sequence(sequence_id)
            return False
        self.num_cached_tokens += found
        sequence = self._new_sequence(group, group.request.prompt.tolist(), 0)
        sequence.num_fed = found
        group.sequences.append(sequence)
        return True

    def _resume(self, group: Group, reserve: int, swap_in: list[Pairs]) -> bool:
        size = self.manager.block_size
        missing = sum(len(sequence.tokens) // size + 1 for sequence in group.sequences)
        if missing > self.manager.num_available_blocks - reserve or any(s.num_pending for s in group.sequences):
            return False
        for sequence in group.sequences:
            swap_in.append(self.manager.resume(sequence.sequence_id))
            sequence.num_fed = self.manager.sequences[sequence.sequence_id].sequence_length
            sequence.state = self._take_state(group)
        group.preempted_by = None
        return True

    def _preempt(self, group: Group) -> list[Pairs]:
        """Put a running group away, to the head of those that wait."""
        self.num_preemptions += 1
        self.running.remove(group)
        self.waiting.appendleft(group)
        group.preempted_by = self.preempt_by
        pairs = []
        for sequence in group.sequences:
            try:
                pairs.append(self.manager.preempt(sequence.sequence_id, self.preempt_by))  # type: ignore[arg-type]  # checked
            except OutOfBlocks:  # of host memory
                pairs.append(self.manager.preempt(sequence.sequence_id, "recompute"))
            self._give_back_state(sequence)
        return pairs

    def _num_blocks_to_come(self, group: Group) -> int:
        """Blocks that what a group has still to feed will take."""
        size = self.manager.block_size
        return sum(max(-(-len(s.tokens) // size) + (-s.num_fed // size), 0) for s in group.sequences)

    # The batch

    def _append(self, picks: list[Pick]) -> NDArray[np.int64]:
        if all(count == 1 for _, count in picks):
            slots = self.manager.append_tokens([sequence.sequence_id for sequence, _ in picks])
        else:
            slots = self.manager.append_tokens([s.sequence_id for s, _ in picks], [count for _, count in picks])
        for sequence, count in picks:
            sequence.num_fed += count
        return slots

    def _batch(self, picks: list[Pick], slots: NDArray[np.int64]) -> Batch:
        counts = np.array([count for _, count in picks], np.int32)
        order = np.argsort(counts != 1, kind="stable").tolist()
        if order != list(range(len(picks))):
            ends = np.cumsum(counts)
            slots = np.concatenate([slots[ends[i] - counts[i] : ends[i]] for i in order])
            picks, counts = [picks[i] for i in order], counts[order]
        rows = [sequence for sequence, _ in picks]
        tokens = np.fromiter(_fed_tokens(picks), np.int64, len(slots))
        manager, ids = self.manager, [row.sequence_id for row in rows]
        batch = Batch(
            rows=rows, q_lens=counts, tokens=tokens, slots=slots, copies=manager.take_copies(),
            seq_lens=manager.get_seq_lens_tensor(ids).numpy(), block_tables=manager.get_block_tables_tensor(ids).numpy(),
        )  # fmt: skip
        self._add_samples(batch)
        return batch

    def _add_samples(self, batch: Batch) -> None:
        """Who gets a token from which query token: the last one of whoever has fed all that there is."""
        searches: dict[Group, list[int]] = {}
        for row, last in zip(batch.rows, (np.cumsum(batch.q_lens) - 1).tolist(), strict=True):
            if row.num_fed < len(row.tokens) + row.num_pending:
                continue
            group = row.group
            if group.is_beam_search:
                searches.setdefault(group, []).append(last)
                continue
            batch.sampled.append(row)
            batch.sampled_from.append(last)
            if not group.is_forked:
                group.is_forked = True
                for index in range(1, group.width):
                    batch.sampled.append(self._new_sequence(group, list(row.tokens), index))
                    batch.sampled_from.append(last)
        batch.searched = list(searches.items())

    def _new_sequence(self, group: Group, tokens: list[int], index: int) -> Sequence:
        self._next_id += 1
        return Sequence(self._next_id - 1, group, tokens, self._take_state(group), index)

    def _take_state(self, group: Group) -> int:
        """A place for the last token on the device; beams, whose tokens the host chooses, share one that nobody reads."""
        return self.max_num_seqs if group.is_beam_search else self._states.pop()

    def _give_back_state(self, sequence: Sequence) -> None:
        if sequence.state < self.max_num_seqs:
            self._states.append(sequence.state)

    # Ends

    def _advance(self, group: Group, found: Found) -> list[Event]:
        """Put the best beams in the place of those that were; at the last token, the answers."""
        advance(group, found, self._fork, self._release)
        if len(group.sequences[0].tokens) < group.max_length:
            return []
        events = []
        for index, (sequence, score) in enumerate(zip(group.sequences, group.scores, strict=True)):
            tokens, share = sequence.tokens[group.num_prompt :], score / (group.max_length - group.num_prompt)
            group.answers[index] = Answer(tokens=tuple(tokens), finish="length", score=share)
            events += [Event(group.request.request_id, index, token) for token in tokens[:-1]]
            events.append(Event(group.request.request_id, index, tokens[-1], "length", share))
        self._end(group)
        return events

    def _fork(self, parent: Sequence) -> Sequence:
        child = self._new_sequence(parent.group, list(parent.tokens), parent.index)
        child.num_fed = parent.num_fed
        self.manager.fork(parent.sequence_id, child.sequence_id)
        return child

    def _release(self, sequence: Sequence) -> None:
        self.manager.release_sequence(sequence.sequence_id)
        if sequence.group.preempted_by is None:
            self._give_back_state(sequence)

    def _end_sequence(self, sequence: Sequence) -> None:
        group = sequence.group
        assert sequence.finish is not None
        group.answers[sequence.index] = Answer(tokens=tuple(sequence.tokens[group.num_prompt :]), finish=sequence.finish)
        group.sequences.remove(sequence)
        self._release(sequence)
        if group.is_done:
            self._end(group)

    def _end(self, group: Group) -> None:
        """Forget a group, wherever it is."""
        for sequence in group.sequences:
            sequence.finish = sequence.finish or "abort"
            self._release(sequence)
        group.sequences, group.in_flight = [], False
        for queue in (self.running, self.waiting):
            if group in queue:
                queue.remove(group)
        del self.groups[group.request.request_id]


def _fed_tokens(picks: list[Pick]) -> Iterator[int]:
    """Ids of what each pick feeds, -1 for one that only the device knows."""
    for sequence, count in picks:
        fed, tokens = sequence.num_fed, sequence.tokens
        if count == 1:
            yield tokens[fed - 1] if fed <= len(tokens) else -1
        else:
            yield from tokens[fed - count : fed]

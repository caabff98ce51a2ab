"""Who runs in the next step: continuous batching over the block manager. Plain Python and NumPy; it sees no tensor.

A step, which the engine asks for in this order:

    schedule()             who runs, with slots for what they feed; or None
    launched(batch)        the device has it: what the host knows of its tokens is committed, answers are forked
    collect(batch, ...)    its samples are on the host, usually after the next step was launched
    abandon()              or any of this broke off: all requests end

The token that a step samples is fed by the next one before the host has seen it. So an end is seen one step late: what
was launched behind it is ignored, and its slots go back with the others of the sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.admission import Admission
from runtime.batch import Batch, Pairs, make_batch
from runtime.beams import Found, advance
from runtime.groups import Group, Sequence
from runtime.manager import BlockManager
from runtime.preemption import NO_PAIRS
from runtime.requests import Answer, Event, InvalidRequest, Request


class Scheduler(Admission):
    """Requests in, batches out.

    max_model_len    tokens of a sequence
    eos              token ids that the model ends with
    limits           those of Admission
    """

    def __init__(self, manager: BlockManager, *, max_model_len: int, eos: Iterable[int] = (), **limits: Any) -> None:
        super().__init__(manager, **limits)
        self.max_model_len = max_model_len
        self.groups: dict[Hashable, Group] = {}
        self._eos = frozenset(eos)

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
        ended = _cut_short(group)
        self._end(group)
        return ended

    def abandon(self) -> list[Event]:
        """End all requests and empty the pool, however far a step has got that broke off: books half kept are not read."""
        ended = [event for group in self.groups.values() for event in _cut_short(group)]
        for kept in (self.groups, self.running, self.waiting):
            kept.clear()
        self.manager.reset()
        self._free_states()
        return ended

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.groups

    # A step

    def schedule(self) -> Batch | None:
        """Choose who runs; None where everybody waits for results, or nobody is there.

        Blocks of those that were preempted or resumed are to be moved either way, before anything is launched: `swap_out`,
        then `swap_in`, [n, 2] int32 pairs of blocks.
        """
        picks, swap_out, preempted = self._pick_running()
        swap_in: list[Pairs] = []
        slots: list[NDArray[np.int64]] = []
        if picks:
            slots.append(self._append(picks))
        if self.waiting and not preempted:
            self._admit(picks, slots, swap_in)
        self.swap_out = np.concatenate(swap_out) if swap_out else NO_PAIRS
        self.swap_in = np.concatenate(swap_in) if swap_in else NO_PAIRS
        if not picks:
            return None
        batch = make_batch(self.manager, picks, np.concatenate(slots))
        self._add_samples(batch)
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

    # Samples

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


def _cut_short(group: Group) -> list[Event]:
    """Give a group the answers that it lacks, of the tokens that are there, and return their ends."""
    ended = []
    for index in range(group.width):
        if index not in group.answers:
            tokens = next((s.tokens for s in group.sequences if s.index == index), [])
            group.answers[index] = Answer(tokens=tuple(tokens[group.num_prompt :]), finish="abort")
            ended.append(Event(group.request.request_id, index, None, "abort"))
    return ended

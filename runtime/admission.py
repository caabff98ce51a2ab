"""Who runs: groups let in while there are tokens, places and blocks for them, preempted where there are none, and resumed."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Pairs, Pick
from runtime.errors import OutOfBlocks
from runtime.groups import Group, Sequence
from runtime.manager import BlockManager
from runtime.requests import InvalidRequest
from runtime.stores import WATERMARK


class Admission:
    """Groups that run and that wait, over the block manager.

    max_num_tokens    query tokens of a step
    max_num_seqs      sequences that run at once
    preempt_by        "recompute" or "swap"; where host memory is full, a swap becomes a recompute

    running           in the order in which they were let in
    waiting           in the order in which they will be, preempted ones first
    _states           places of last tokens on the device that are nobody's
    """

    def __init__(
        self, manager: BlockManager, *, max_num_tokens: int, max_num_seqs: int, preempt_by: str = "recompute"
    ) -> None:
        if max_num_tokens < max_num_seqs:
            raise InvalidRequest(f"max_num_tokens must be at least max_num_seqs (got {max_num_tokens}, {max_num_seqs})")
        self.manager = manager
        self.max_num_tokens, self.max_num_seqs = max_num_tokens, max_num_seqs
        self.preempt_by = preempt_by
        self.waiting: deque[Group] = deque()
        self.running: list[Group] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # found in the pool, of all prompts
        self._watermark = int(WATERMARK * manager.num_physical_blocks)
        self._free_states()
        self._next_id = 0

    def _free_states(self) -> None:
        self._states = list(range(self.max_num_seqs - 1, -1, -1))

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

    def _append(self, picks: list[Pick]) -> NDArray[np.int64]:
        if all(count == 1 for _, count in picks):
            slots = self.manager.append_tokens([sequence.sequence_id for sequence, _ in picks])
        else:
            slots = self.manager.append_tokens([s.sequence_id for s, _ in picks], [count for _, count in picks])
        for sequence, count in picks:
            sequence.num_fed += count
        return slots

    def _new_sequence(self, group: Group, tokens: list[int], index: int) -> Sequence:
        self._next_id += 1
        return Sequence(self._next_id - 1, group, tokens, self._take_state(group), index)

    def _take_state(self, group: Group) -> int:
        """A place for the last token on the device; beams, whose tokens the host chooses, share one that nobody reads."""
        return self.max_num_seqs if group.is_beam_search else self._states.pop()

    def _give_back_state(self, sequence: Sequence) -> None:
        if sequence.state < self.max_num_seqs:
            self._states.append(sequence.state)

"""A device that holds a token id in every slot, and a model that samples a function of the tokens that it finds there."""

from __future__ import annotations

import zlib

import numpy as np

from runtime.beams import Found
from runtime.manager import BlockManager
from runtime.requests import Request, Sampling
from runtime.scheduler import Scheduler

VOCABULARY = 50
UNWRITTEN = -7


def next_token(tokens, index: int = 0) -> int:
    """What the model makes of `tokens`; answers of one prompt part by their index."""
    return zlib.crc32(np.array([*tokens, index], np.int32).tobytes()) % VOCABULARY


def answer(request: Request, index: int, eos: frozenset[int]) -> tuple[list[int], str]:
    """All tokens of an answer, one after another, and how it ends."""
    sampling, tokens = request.sampling, request.prompt.tolist()
    begin = len(tokens)
    while True:
        tokens.append(next_token(tokens, index))
        if tokens[-1] in sampling.stop_token_ids or (tokens[-1] in eos and not sampling.ignore_eos):
            return tokens[begin:], "stop" if tokens[-1] in sampling.stop_token_ids and tokens[-1] not in eos else "eos"
        if len(tokens) == begin + sampling.max_tokens:
            return tokens[begin:], "length"


class Pretended:
    """Runs a scheduler as the engine does, one step ahead of what it has seen. Everything is looked up through block tables."""

    def __init__(self, num_blocks=40, block_size=4, num_host_blocks=0, **limits):
        self.manager = BlockManager(num_blocks, block_size, num_host_blocks=num_host_blocks)
        limits = {"max_num_tokens": 16, "max_num_seqs": 6, "max_model_len": 64, **limits}
        self.scheduler = Scheduler(self.manager, **limits)
        self.cache = np.full((num_blocks, block_size), UNWRITTEN)
        self.host = np.full((max(num_host_blocks, 1), block_size), UNWRITTEN)
        self.last = np.full(limits["max_num_seqs"] + 1, UNWRITTEN)
        self.flying = None
        self.events = []

    def submit(self, name, prompt, **sampling):
        request = Request.of(name, prompt, Sampling(**sampling))
        self.scheduler.submit(request)
        return request

    def step(self):
        """One step; returns the batch that was launched, or None."""
        batch = self.scheduler.schedule()
        for block, to in self.scheduler.swap_out.tolist():
            self.host[to] = self.cache[block]
        for block, to in self.scheduler.swap_in.tolist():
            self.cache[to] = self.host[block]
        flight = None
        if batch is not None:
            self.check(batch)
            flight = (batch, *self.run(batch))
            self.scheduler.launched(batch)
        landed, self.flying = self.flying, flight
        if landed is not None:
            self.events += self.scheduler.collect(*landed)
        self.manager.check_invariants()
        return batch

    @property
    def is_idle(self):
        return self.scheduler.is_idle and self.flying is None

    def check(self, batch):
        scheduler, manager = self.scheduler, self.manager
        running = [s for group in scheduler.running for s in group.sequences]
        states = [s.state for s in running if not s.group.is_beam_search]
        assert batch.num_tokens <= scheduler.max_num_tokens
        assert sum(group.width for group in scheduler.running) <= scheduler.max_num_seqs
        assert len(set(states)) == len(states)
        assert manager.num_free_blocks + manager.num_cached_blocks + manager.num_live_blocks == manager.num_physical_blocks
        assert (np.diff(batch.q_lens != 1) >= 0).all()  # rows of one token stand first

    def run(self, batch):
        """Copy, write and read as the device would; returns the samples and what the beam searches found."""
        self.cache[batch.copies[:, 1]] = self.cache[batch.copies[:, 0]]
        ends = np.cumsum(batch.q_lens)
        states = [row.state for row in batch.rows]
        tokens = batch.tokens.copy()
        for row, end in enumerate(ends):
            if tokens[end - 1] < 0:
                tokens[end - 1] = self.last[states[row]]
        flat = self.cache.reshape(-1)
        written = batch.slots >= 0
        assert len(set(batch.slots[written].tolist())) == written.sum()
        flat[batch.slots[written]] = tokens[written]
        positions = [np.arange(length) for length in batch.seq_lens]
        size = self.manager.block_size
        seen = {
            int(end) - 1: self.cache[batch.block_tables[row][at // size], at % size].tolist()
            for row, (end, at) in enumerate(zip(ends, positions, strict=True))
        }
        sampled = []
        for sequence, at in zip(batch.sampled, batch.sampled_from, strict=True):
            sampled.append(next_token(seen[at], sequence.index))
            self.last[sequence.state] = sampled[-1]
        return sampled, [best([seen[at] for at in places], group) for group, places in batch.searched]


def best(beams, group) -> Found:
    """The best continuations of beams: chances are a function of the tokens."""
    totals = [
        (score - (next_token(tokens, 7 + token) + 1) / VOCABULARY, -parent, -token)
        for parent, (tokens, score) in enumerate(zip(beams, group.scores, strict=True))
        for token in range(VOCABULARY)
    ]
    chosen = sorted(totals, reverse=True)[: group.width]
    scores, parents, tokens = zip(*chosen, strict=True)
    return Found(parents=[-p for p in parents], tokens=[-t for t in tokens], scores=list(scores))


def beams_of(request: Request) -> list[list[int]]:
    """A beam search by copying lists."""
    width = request.sampling.num_beams
    beams, scores = [request.prompt.tolist()], [0.0]
    for _ in range(request.sampling.max_tokens):
        group = type("Group", (), {"scores": scores, "width": width})
        found = best(beams, group)
        beams = [[*beams[parent], token] for parent, token in zip(found.parents, found.tokens, strict=True)]
        scores = found.scores
    return [tokens[len(request.prompt) :] for tokens in beams]

"""Every operation in every order, against the naive model and against bytes in a pretended cache."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime import BlockManager, OutOfBlocks, TokenMismatch
from tests.runtime.naive import Exhausted, NaiveManager

TOKENS = st.integers(0, 1)
PROMPTS = st.lists(TOKENS, max_size=14)


class ManagerMachine(RuleBasedStateMachine):
    """A manager, its model, and an engine that writes into slots what identifies a token: all tokens up to it."""

    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.integers(1, 4),
        num_host=st.sampled_from((0, 3, 20)),
        patience=st.sampled_from((1, 4, 12)),
    )
    def begin(self, num_blocks, block_size, num_host, patience):
        self.real = BlockManager(num_blocks, block_size, num_host_blocks=num_host)
        self.model = NaiveManager(num_blocks, block_size, num_host)
        self.device = np.full((num_blocks, block_size), None, object)
        self.host = np.full((num_host, block_size), None, object)
        self.unwritten = {}  # id -> {position: slot}
        self.next_id = 100
        self.patience, self.num_checks = patience, 0

    def choose(self, data, names):
        return data.draw(st.sampled_from(sorted(names)))

    def try_both(self, real, operation, *args):
        """Whether both did it; where one refuses, so must the other."""
        try:
            self.model.attempt(operation, *args)
        except Exhausted:
            with pytest.raises(OutOfBlocks, match="blocks"):
                real()
            return None
        return real()

    def resident(self):
        return bool(self.model.sequences)

    @rule(prompt=PROMPTS, salt=st.sampled_from((None, None, "tenant")))
    def create(self, prompt, salt):
        name = self.next_id
        self.next_id += 1
        assert self.real.create_sequence(prompt, name, salt=salt) == name
        self.model.create(name, prompt, salt)
        assert self.real.num_cached_tokens(name) == self.model.sequences[name].found
        rest = prompt[len(self.model.sequences[name].tokens) :]
        if rest:
            self.append_runs([name], [rest])

    @precondition(resident)
    @rule(data=st.data())
    def append(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.model.sequences)), unique=True, min_size=1))
        runs = [[self.next_token(data, name)] for name in names]
        self.append_runs(names, runs)

    @precondition(resident)
    @rule(data=st.data())
    def append_drafts(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.model.sequences)), unique=True, min_size=1))
        runs = [[self.next_token(data, name), *data.draw(st.lists(TOKENS, max_size=6))] for name in names]
        self.append_runs(names, runs)

    def next_token(self, data, name):
        """After a full hit, the prompt's own last token."""
        sequence = self.model.sequences[name]
        if sequence.present > len(sequence.tokens):
            return sequence.table[-1].key[1][len(sequence.tokens)]
        return data.draw(TOKENS)

    def append_runs(self, names, runs):
        counts = [len(run) for run in runs]
        begins = [len(self.model.sequences[name].tokens) for name in names]
        allowed = self.real.can_append(names, counts)
        slots = self.try_both(lambda: self.real.append_tokens(names, counts), "append", names, runs)
        assert allowed == (slots is not None)
        if slots is None:
            return
        slots = iter(slots.tolist())
        for name, begin, count in zip(names, begins, counts, strict=True):
            sequence, table = self.model.sequences[name], self.real.sequences[name].block_table
            for position in range(begin, begin + count):
                slot, size = next(slots), self.model.block_size
                written = position >= sequence.present
                assert slot == (table[position // size] * size + position % size if written else -1)
                self.unwritten.setdefault(name, {})[position] = slot

    def forward(self):
        """Copies, in any order, then writes: as the device does."""
        pairs = self.real.take_copies()
        assert len(self.model.take_copies()) == len(pairs)
        assert not set(pairs[:, 0].tolist()) & set(pairs[:, 1].tolist())
        for source, destination in pairs[::-1]:
            self.device[destination] = self.device[source]
        for name, slots in self.unwritten.items():
            for position, slot in slots.items():
                if slot >= 0:
                    self.device.reshape(-1)[slot] = self.identity(name, position)
        self.unwritten.clear()

    def identity(self, name, position):
        sequence = self.model.sequences[name]
        return (sequence.salt, *sequence.tokens[: position + 1])

    @precondition(resident)
    @rule(data=st.data(), share=st.integers(0, 3))
    def step(self, data, share):
        """A forward pass, then a commit of all that went through it, or only of a part."""
        self.forward()
        names = [n for n, s in self.model.sequences.items() if s.committed < len(s.tokens)]
        names = data.draw(st.permutations(names))
        counts, tokens = [], []
        for name in names:
            sequence = self.model.sequences[name]
            count = len(sequence.tokens) - sequence.committed
            counts.append(count if share else data.draw(st.integers(1, count)))
            tokens += sequence.tokens[sequence.committed : sequence.committed + counts[-1]]
        self.real.commit_tokens(names, tokens, None if set(counts) == {1} else counts)
        # The real manager settles all first blocks before further ones, which matters only for which twin is the older.
        for name, count in zip(names, counts, strict=True):
            self.model.commit(name, count)

    @precondition(resident)
    @rule(data=st.data())
    def contradict(self, data):
        """Two that share a block with a token in flight may not differ about it; nobody else is told no."""
        name, other = (self.choose(data, self.model.sequences) for _ in range(2))
        sequence, second = self.model.sequences[name], self.model.sequences[other]
        position = sequence.committed
        logical = position // self.model.block_size
        tables = sequence.table[logical : logical + 1], second.table[logical : logical + 1]
        if name == other or position >= min(map(len, (sequence.tokens, second.tokens))) or tables[0] != tables[1]:
            return
        if second.committed < position:
            return
        token = sequence.tokens[position]
        names, tokens = ([name], [1 - token]) if second.committed > position else ([name, other], [1 - token, token])
        with pytest.raises(TokenMismatch):
            self.real.commit_tokens(names, tokens)

    @precondition(resident)
    @rule(data=st.data())
    def fork(self, data):
        self.forward()
        name = self.choose(data, self.model.sequences)
        self.real.fork(name, self.next_id)
        self.model.fork(name, self.next_id)
        self.next_id += 1

    @precondition(resident)
    @rule(data=st.data())
    def truncate(self, data):
        name = self.choose(data, self.model.sequences)
        length = data.draw(st.integers(0, len(self.model.sequences[name].tokens)))
        self.real.truncate(name, length)
        self.model.truncate(name, length)
        self.unwritten[name] = {p: s for p, s in self.unwritten.get(name, {}).items() if p < length}

    @precondition(lambda self: self.model.sequences or self.model.away)
    @rule(data=st.data())
    def release(self, data):
        name = self.choose(data, [*self.model.sequences, *self.model.away])
        self.real.release_sequence(name)
        self.model.release(name)
        self.unwritten.pop(name, None)

    @precondition(resident)
    @rule(data=st.data(), by=st.sampled_from(("swap", "recompute")), settled=st.booleans())
    def preempt(self, data, by, settled):
        name = self.choose(data, self.model.sequences)
        if settled or self.unwritten.get(name):
            self.forward()
        pairs = self.try_both(lambda: self.real.preempt(name, by), "preempt", name, by)
        if pairs is not None:
            self.host[pairs[:, 1]] = self.device[pairs[:, 0]]

    @precondition(lambda self: self.model.away)
    @rule(data=st.data())
    def resume(self, data):
        name = self.choose(data, self.model.away)
        pairs = self.try_both(lambda: self.real.resume(name), "resume", name)
        if pairs is not None:
            self.device[pairs[:, 1]] = self.host[pairs[:, 0]]
            assert self.real.num_cached_tokens(name) == self.model.sequences[name].found

    @rule(data=st.data())
    def compare_tensors(self, data):
        """What the getters say, for some sequences in some order."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.model.sequences) or [None]), unique=True))
        names = [name for name in names if name is not None]
        states = [self.real.sequences[name] for name in names]
        tables = self.real.get_block_tables_tensor(names)
        width = max((len(state.block_table) for state in states), default=0)
        assert tables.tolist() == [s.block_table + [0] * (width - len(s.block_table)) for s in states]
        assert self.real.get_seq_lens_tensor(names).tolist() == [s.sequence_length for s in states]
        awaited = [len(self.model.sequences[n].tokens) - self.model.sequences[n].committed for n in names]
        assert self.real.get_query_start_loc_tensor(names).diff().tolist() == awaited

    @invariant()
    def same_as_model(self):
        """Equal tables up to the names of blocks, equal states of blocks, and the right bytes in every slot."""
        if not hasattr(self, "real"):
            return
        self.num_checks += 1
        if self.num_checks % self.patience == 0:  # to ask how blocks stand is to have them booked
            self.look()
        assert self.real.num_free_blocks == len(self.model.free)
        assert self.real.num_free_host_blocks == self.model.num_free_host
        assert set(self.real.sequences) == set(self.model.sequences)
        pairs = set()
        for name, state in self.real.sequences.items():
            sequence = self.model.sequences[name]
            assert state.sequence_length == len(sequence.tokens)
            pairs |= set(zip(state.block_table, sequence.table, strict=True))
        assert len(pairs) == len({block for block, _ in pairs}) == len({block for _, block in pairs})

    def look(self):
        self.real.check_invariants()
        assert self.real.num_cached_blocks == len(self.model.idle)

    def teardown(self):
        if hasattr(self, "real"):
            self.look()

    @invariant()
    def right_bytes(self):
        """Through its table, every sequence reads its own tokens: where they are written, and no copy is outstanding."""
        if not hasattr(self, "real") or self.model.pending:
            return
        for name, state in self.real.sequences.items():
            size = self.model.block_size
            for position in range(state.sequence_length):
                if position not in self.unwritten.get(name, {}):
                    held = self.device[state.block_table[position // size], position % size]
                    assert held == self.identity(name, position)


ManagerMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestManager = ManagerMachine.TestCase

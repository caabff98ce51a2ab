"""The block manager written down without any thought for speed: the model that the real one is held against.

A block is an object, a table a list of them, the index a dictionary over whole token prefixes, a transaction a deep copy.
"""

import copy
from collections import OrderedDict


class Exhausted(Exception):
    """More blocks than can be taken."""


class Block:
    """Who holds it, and under which prefix it can be found."""

    def __init__(self):
        self.holders = 0  # tables and copies
        self.copies = 0  # of the holders, those that are copies
        self.key = None


class Sequence:
    """Tokens with a slot, of which the first `committed` are settled."""

    def __init__(self, salt):
        self.salt = salt
        self.tokens = []
        self.table = []
        self.committed = 0
        self.present = 0
        self.found = 0


class NaiveManager:
    """Every operation block by block and token by token."""

    def __init__(self, num_blocks, block_size, num_host_blocks):
        self.block_size = block_size
        self.free = [Block() for _ in range(num_blocks)]
        self.idle = OrderedDict()  # cached blocks, least recently used first
        self.index = {}
        self.sequences = {}
        self.away = {}
        self.pending = {}  # destination -> source
        self.num_free_host = num_host_blocks

    def attempt(self, operation, *args):
        """The operation's answer, or Exhausted and no change at all."""
        trial = copy.deepcopy(self)
        answer = getattr(trial, operation)(*args)  # raises before anything is kept
        self.__dict__ = trial.__dict__
        return answer

    # Blocks

    def take(self):
        """A free block, or the least recently used one."""
        if self.free:
            block = self.free.pop()
        elif self.idle:
            block, _ = self.idle.popitem(last=False)
            self.unindex(block)
        else:
            raise Exhausted
        block.holders = 1
        return block

    def hold(self, block):
        self.idle.pop(block, None)
        block.holders += 1

    def drop(self, block):
        block.holders -= 1
        if block.holders:
            return
        source = self.pending.pop(block, None)
        if source is not None:
            source.copies -= 1
            self.drop(source)
        if block.key is None:
            self.free.append(block)
        else:
            self.idle[block] = None

    def unindex(self, block):
        del self.index[block.key]
        block.key = None

    def has_child(self, block):
        salt, tokens = block.key
        return any(other != block.key and other[0] == salt and other[1][: len(tokens)] == tokens for other in self.index)

    def chain(self, tokens, salt):
        """Blocks found for the beginning of `tokens`."""
        found = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = self.index.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found

    # Sequences

    def create(self, name, prompt, salt):
        sequence = Sequence(salt)
        sequence.table = self.chain(prompt, salt)
        sequence.tokens = list(prompt[: len(sequence.table) * self.block_size])
        if sequence.tokens and len(sequence.tokens) == len(prompt):
            sequence.tokens.pop()
            if self.block_size == 1:
                sequence.table.pop()
        sequence.present = len(sequence.table) * self.block_size
        sequence.committed = sequence.found = len(sequence.tokens)
        for block in sequence.table:
            self.hold(block)
        self.sequences[name] = sequence

    def append(self, names, runs):
        """Appends runs[i] to names[i]; tells for each token whether it is written."""
        return [[self.append_one(self.sequences[name], token) for token in run] for name, run in zip(names, runs, strict=True)]

    def append_one(self, sequence, token):
        position = len(sequence.tokens)
        sequence.tokens.append(token)
        if position < sequence.present:
            return False
        if position % self.block_size == 0:
            sequence.table.append(self.take())
            return True
        block = sequence.table[-1]
        indexed = block.key is not None
        if block.holders - block.copies > 1 or (indexed and self.has_child(block)):
            sequence.table[-1] = self.copied(block)
        elif indexed:
            self.unindex(block)
        return True

    def copied(self, block):
        """A block that is to become a copy of `block`, and takes its place."""
        fresh = self.take()
        source = self.pending.get(block, block)
        self.hold(source)
        source.copies += 1
        self.pending[fresh] = source
        self.drop(block)
        return fresh

    def take_copies(self):
        taken, self.pending = self.pending, {}
        for source in taken.values():
            source.copies -= 1
            self.drop(source)
        return taken

    def commit(self, name, count):
        sequence = self.sequences[name]
        before = sequence.committed // self.block_size
        sequence.committed += count
        for logical in range(before, sequence.committed // self.block_size):
            self.settle(sequence, logical)

    def settle(self, sequence, logical):
        """Make a full block findable, or take its twin."""
        own = sequence.table[logical]
        key = (sequence.salt, tuple(sequence.tokens[: (logical + 1) * self.block_size]))
        twin = self.index.setdefault(key, own)
        if twin is own:
            own.key = key
            return
        self.hold(twin)
        sequence.table[logical] = twin
        self.drop(own)

    def fork(self, name, new):
        twin = copy.copy(self.sequences[name])
        twin.tokens, twin.table = list(twin.tokens), list(twin.table)
        for block in twin.table:
            self.hold(block)
        self.sequences[new] = twin

    def truncate(self, name, length):
        sequence = self.sequences[name]
        if length == len(sequence.tokens):
            return
        keep = -(-length // self.block_size)
        gone, sequence.table = sequence.table[keep:], sequence.table[:keep]
        for block in reversed(gone):
            self.drop(block)
        sequence.tokens = sequence.tokens[:length]
        sequence.committed = min(sequence.committed, length)
        sequence.present = min(sequence.present, length)

    def release(self, name):
        if name in self.away:
            self.num_free_host += self.away.pop(name)[1]
            return
        for block in reversed(self.sequences.pop(name).table):
            self.drop(block)

    def preempt(self, name, by):
        sequence = self.sequences[name]
        num_host = len(sequence.table) if by == "swap" else 0
        if num_host > self.num_free_host:
            raise Exhausted
        self.num_free_host -= num_host
        self.away[name] = (sequence, num_host)
        for block in reversed(self.sequences.pop(name).table):
            self.drop(block)

    def resume(self, name):
        old, num_host = self.away.pop(name)
        sequence = Sequence(old.salt)
        sequence.table = self.chain(old.tokens[: old.committed], old.salt)
        for block in sequence.table:
            self.hold(block)
        found = len(sequence.table) * self.block_size
        length = max(found, len(old.tokens) if num_host else 0)
        sequence.tokens = old.tokens[:length]
        sequence.table += [self.take() for _ in range(num_host - len(sequence.table))]
        sequence.found = sequence.present = length
        sequence.committed = min(old.committed, length)
        for logical in range(found // self.block_size, sequence.committed // self.block_size):
            self.settle(sequence, logical)
        self.num_free_host += num_host
        self.sequences[name] = sequence

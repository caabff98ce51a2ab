"""The block manager: sequences of tokens in, block tables and slots out.

A step of an engine, in this order:

    create_sequence(prompt)       the prefix that is in the pool already is shared; the engine feeds the rest
    append_tokens(ids)            slots for the new tokens
    take_copies()                 blocks to copy before anything is written
    get_..._tensor(ids)           what the kernels read; then the forward pass
    commit_tokens(ids, tokens)    what went through it; blocks filled by it can now be found by others

A call that is refused has changed nothing. All of it is NumPy and the standard library; docs/memory.md walks through it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runtime import appending, committing, preemption
from runtime.books import Books
from runtime.errors import BrokenInvariant, InvalidId, InvalidLength, SequenceExists, UnknownSequence
from runtime.ids import as_id, as_ids, twice, unknown
from runtime.invariants import broken_invariants
from runtime.occupancy import Occupancy
from runtime.sequences import Sequences
from runtime.tokens import as_counts, as_integer, as_tokens, grouped
from runtime.views import TensorViews

if TYPE_CHECKING:
    import torch


class BlockManager(Occupancy):
    """Physical blocks of `block_size` tokens, dealt to sequences, shared by prefix, copied on write.

    num_host_blocks    blocks of host memory for preemption by swap
    """

    def __init__(self, num_physical_blocks: int, block_size: int, *, num_host_blocks: int = 0) -> None:
        who = "BlockManager:"
        self.num_physical_blocks = as_integer(num_physical_blocks, f"{who} num_physical_blocks", 1)  # int32 in a table
        self.block_size = as_integer(block_size, f"{who} block_size", 1)
        self.num_host_blocks = as_integer(num_host_blocks, f"{who} num_host_blocks", 0)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence, every cached block and every copy not taken."""
        self._books = Books(self.num_physical_blocks, self.block_size, self.num_host_blocks)
        self._table = self._books.table
        self._views = TensorViews(self._table)
        self.sequences = Sequences(self._table)
        self._next_id = 0

    # A sequence's life

    def create_sequence(
        self, prompt: ArrayLike | Iterable[int] = (), sequence_id: int | None = None, *, salt: Hashable = None
    ) -> int:
        """Begin a sequence; returns its id. Its length is that of the prefix found: append the rest of the prompt.

        Of a prompt that is there entirely, the last token is left to be computed again (an engine needs its logits): its slot
        is -1, so that nothing is written into a shared block (with blocks of one token it gets
        its own, until commit). Only sequences of equal `salt` (an adapter, a tenant) share.
        """
        tokens = as_tokens(prompt, "create_sequence")
        _check_salt(salt)
        sequence_id = self._new_id(sequence_id, "create_sequence")
        chain = self._books.index.match(tokens, salt)
        length = chain.size * self.block_size
        if 0 < length == tokens.size:
            length -= 1
            if self.block_size == 1:  # the block of the last token would be empty
                chain = chain[:-1]
        row = self._books.admit(sequence_id, chain, salt)
        if chain.size:  # a new row is zeroed
            self._table.length[row] = length
            self._table.committed[row] = self._table.found[row] = length
            self._table.present[row] = chain.size * self.block_size
            self._books.settle(row)
        return sequence_id

    def num_cached_tokens(self, sequence_id: int) -> int:
        """Tokens whose keys and values were there when the sequence was created or last resumed."""
        return int(self._table.found[self._row(sequence_id, "num_cached_tokens")])

    def fork(self, sequence_id: int, new_id: int | None = None) -> int:
        """A second sequence with the same tokens in the same blocks; returns its id. The first to write copies the last block.

        Fork between steps: keys and values still to be written are not in the copy. Tokens not yet committed are the same
        for both, whoever commits them first.
        """
        sequence_id = as_id(sequence_id, "fork")
        blocks = self._table.table(self._row(sequence_id, "fork")).copy()
        new_id = self._new_id(new_id, "fork")
        row = self._books.admit(new_id, blocks, self._books.salts.get(sequence_id))
        source = self._table.row_of[sequence_id]
        self._table.room[source] = 0
        self._table.length[row] = self._table.length[source]
        self._table.numbers[:, row] = self._table.numbers[:, source]
        if self._table.committed[source] < self._table.length[source]:
            self._books.in_flight.fork(sequence_id, new_id, int(self._table.length[source]))
        return new_id

    def truncate(self, sequence_id: int, length: int) -> None:
        """Take back the tokens from position `length` on, such as rejected drafts."""
        row = self._row(sequence_id, "truncate")
        table = self._table
        length = as_integer(length, f"truncate: the new length of sequence {sequence_id}", 0, int(table.length[row]))
        if length == table.length[row]:
            return
        self._books.cut(row, -(-length // self.block_size))
        table.length[row] = length
        for kept in (table.committed, table.present):
            kept[row] = min(kept[row], length)
        self._books.settle(row)

    def preempt(self, sequence_id: int, by: Literal["swap", "recompute"] = "recompute") -> NDArray[np.int32]:
        """Give a sequence's blocks back until `resume`; returns pairs (block, host block) [n, 2] to copy before the next call.

        By "recompute" there is nothing to copy: committed tokens are remembered, and may be found again as a prefix.
        """
        sequence_id = as_id(sequence_id, "preempt")
        return preemption.preempt(self._books, sequence_id, self._row(sequence_id, "preempt"), by)

    def resume(self, sequence_id: int) -> NDArray[np.int32]:
        """Bring a preempted sequence back; returns pairs (host block, block) [n, 2] to copy before the next call.

        After "recompute" its length is that of the prefix found: append and commit its tokens from there on.
        """
        sequence_id = as_id(sequence_id, "resume")
        if sequence_id not in self._books.preempted:
            state = "is not preempted" if sequence_id in self._table.row_of else "is unknown"
            raise UnknownSequence(f"resume: sequence {sequence_id} {state}: only what preempt put away can be resumed")
        return preemption.resume(self._books, sequence_id)

    def release_sequence(self, sequence_id: int) -> None:
        """End a sequence, wherever it is; its full blocks can be found until they are evicted."""
        sequence_id = as_id(sequence_id, "release_sequence")
        row = self._table.row_of.get(sequence_id)
        if row is not None:
            self._books.dismiss(sequence_id, row)
        elif sequence_id in self._books.preempted:
            self._books.host.give_back(self._books.preempted.pop(sequence_id).host_blocks)
        else:
            raise unknown("release_sequence", sequence_id, {})

    # A step

    def append_token(self, sequence_id: int) -> int:
        """The slot of one new token: block * block_size + offset, or -1 where nothing is to be written."""
        row = self._row(sequence_id, "append_token")
        table = self._table
        if table.room[row] == 0:
            one = np.ones(1, np.int64)
            return int(appending.append_runs(self._books, one * row, one, "append_token")[0])
        slot = int(table.next_slot[row])
        table.next_slot[row] += 1
        table.room[row] -= 1
        table.length[row] += 1
        return slot

    def append_tokens(self, ids: Iterable[int], counts: int | Sequence[int] | None = None) -> NDArray[np.int64]:
        """The slot mapping of new tokens, in the order of `ids`: counts[i] for ids[i], run behind run; one each if not said.

        An id may also stand several times, once for each of its tokens. Either all get slots, or none.
        """
        ids, runs, origin = self._batch(ids, counts, "append_tokens")
        if not ids:
            return np.zeros(0, np.int64)
        count = self._arrange(ids, "append_tokens")
        if runs is None:
            return appending.append_one_each(self._books, count, "append_tokens")
        slots = appending.append_runs(self._books, np.arange(count), runs, "append_tokens")
        if origin is not None:
            slots[origin] = slots.copy()
        return slots

    def num_missing_blocks(self, ids: Iterable[int], counts: int | Sequence[int] | None = None) -> int:
        """How many blocks `append_tokens(ids, counts)` would take, copies included."""
        ids, runs, _ = self._batch(ids, counts, "num_missing_blocks")
        if len(set(ids)) != len(ids):
            raise twice(len(ids))
        rows = np.array([self._row(sequence_id, "num_missing_blocks") for sequence_id in ids], np.int64)
        return appending.num_missing_blocks(self._books, rows, np.ones(rows.size, np.int64) if runs is None else runs)

    def can_append(self, ids: Iterable[int], counts: int | Sequence[int] | None = None) -> bool:
        """Whether `append_tokens(ids, counts)` would find the blocks it needs."""
        return self._books.pool.can_take(self.num_missing_blocks(ids, counts))

    def take_copies(self) -> NDArray[np.int32]:
        """Copy-on-write pairs (source, destination) [n, 2] since the last call: copy these blocks before any write of the step.

        No block is both read and written, so the order does not matter.
        """
        pairs, held = self._books.copies.take()
        self._books.drop_each(held)
        return pairs

    def commit_tokens(
        self, ids: Iterable[int], token_ids: ArrayLike | Iterable[int], counts: int | Sequence[int] | None = None
    ) -> None:
        """Say which tokens went through the forward pass, in the order of `append_tokens`. Full blocks become findable now.

        A block that turns out to be the twin of one in the index is freed, and the table names the older one.
        """
        tokens = as_tokens(token_ids, "commit_tokens")
        ids, runs, origin = self._batch(ids, counts, "commit_tokens")
        wanted = len(ids) if runs is None else int(runs.sum())
        if tokens.size != wanted:
            raise InvalidLength(f"commit_tokens: {wanted} tokens of {len(ids)} sequences were announced, got {tokens.size}")
        if not ids:
            return
        count = self._arrange(ids, "commit_tokens")
        if runs is None:
            if committing.commit_one_each(self._books, count, tokens):
                return
            runs = np.ones(count, np.int64)
        committing.commit_runs(self._books, count, runs, tokens if origin is None else tokens[origin])

    def get_block_tables_tensor(self, ids: Iterable[int]) -> torch.Tensor:
        """int32 [len(ids), longest table], row i of ids[i], 0 behind its end.

        A view of the books, whose rows are further apart than they are long; valid until the next call.
        """
        return self._views.block_tables(self._first_rows(ids, "get_block_tables_tensor"))

    def get_seq_lens_tensor(self, ids: Iterable[int]) -> torch.Tensor:
        """int32 [len(ids)] tokens with a slot. A view, valid until the next call."""
        return self._views.seq_lens(self._first_rows(ids, "get_seq_lens_tensor"))

    def get_query_start_loc_tensor(self, ids: Iterable[int]) -> torch.Tensor:
        """int32 [len(ids) + 1]: running sum of each one's query tokens, those appended and not committed.

        A view, valid until the next call.
        """
        return self._views.query_start_loc(self._first_rows(ids, "get_query_start_loc_tensor"))

    # Whether the books balance

    def invariants_ok(self) -> bool:
        """Whether nothing is broken."""
        return not broken_invariants(self._books)

    def check_invariants(self) -> None:
        """Raise BrokenInvariant, which says all that is broken."""
        broken = broken_invariants(self._books)
        if broken:
            raise BrokenInvariant("BlockManager: " + "; ".join(broken))

    # Ids

    def _row(self, sequence_id: int, who: str) -> int:
        row = self._table.row_of.get(as_id(sequence_id, who))
        if row is None:
            raise unknown(who, sequence_id, self._books.preempted)
        return row

    def _arrange(self, ids: list[int], who: str) -> int:
        try:
            return self._table.arrange(ids)
        except (KeyError, TypeError):  # unknown, or none that could be known
            raise self._first_unknown(ids, who) from None

    def _first_rows(self, ids: Iterable[int], who: str) -> int:
        return self._arrange(as_ids(ids, who), who)

    def _first_unknown(self, ids: list[int], who: str) -> Exception:
        known = self._table.row_of
        wrong = next(sequence_id for sequence_id in ids if type(sequence_id) is not int or sequence_id not in known)
        return unknown(who, wrong, self._books.preempted)

    def _new_id(self, sequence_id: int | None, who: str) -> int:
        resident, away = self._table.row_of, self._books.preempted
        if sequence_id is None:
            while self._next_id in resident or self._next_id in away:
                self._next_id += 1
            sequence_id = self._next_id
            self._next_id += 1
            return sequence_id
        sequence_id = as_id(sequence_id, who)
        if sequence_id in resident or sequence_id in away:
            raise SequenceExists(f"{who}: sequence {sequence_id} exists: release it first, or give another id")
        return sequence_id

    def _batch(
        self, ids: Iterable[int], counts: int | Sequence[int] | None, who: str
    ) -> tuple[list[int], NDArray[np.int64] | None, NDArray[np.int64] | None]:
        """Different ids, the tokens of each (None: one), and where its tokens stand in what was given (None: as they are)."""
        ids = as_ids(ids, who)
        if counts is not None:
            return ids, as_counts(counts, len(ids), who), None
        try:
            if self._table.in_order(ids) or len(set(ids)) == len(ids):
                return ids, None, None
        except TypeError:
            raise self._first_unknown(ids, who) from None
        return grouped(ids)


def _check_salt(salt: Hashable) -> None:
    try:
        hash(salt)
    except TypeError:
        raise InvalidId(f"create_sequence: salt must be hashable, got {salt!r}; a string or a tuple is") from None


KVBlockManager = BlockManager

"""Rows change their order, and every sequence keeps its own table: against a plain list of rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import InvalidLength
from runtime.block_tables import BlockTables, runs_of
from runtime.sequences import SequenceTable

ORDERS = st.one_of(
    st.integers(1, 120).flatmap(lambda count: st.permutations(range(count))),
    st.lists(st.integers(1, 30), min_size=1, max_size=9).flatmap(  # runs of neighbours, and a few that leave them
        lambda sizes: st.permutations(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])).map(
            lambda runs: np.concatenate(runs).tolist()
        )
    ),
)


@settings(max_examples=200, deadline=None)
@given(orders=st.lists(ORDERS, min_size=1, max_size=8), spare=st.integers(0, 40))
def test_any_order_and_the_next(orders, spare):
    """Whole runs, shuffles, and rows that slide from end to end: each row has the table it should, the others have none."""
    num_rows = max(map(len, orders)) + spare
    tables = BlockTables(num_rows, 3)
    tables.rows[:] = np.arange(1, 3 * num_rows + 1).reshape(num_rows, 3)
    tables.rows[len(orders[0]) :] = 0
    for order in orders:
        source = np.array([*order, *range(len(order), num_rows)])
        wanted = tables.rows[source]
        tables.permute(source, runs_of(source))
        assert (tables.rows == wanted).all()


class Churn:
    """A batch whose sequences leave and join, and what is known of each, in a dictionary."""

    def __init__(self, count):
        self.table = SequenceTable()
        self.known = {}
        self.next_id = 0
        self.ids = [self.join() for _ in range(count)]

    def join(self):
        self.next_id += 1
        row, length = self.table.add(self.next_id), 1 + self.next_id % 23
        self.table.reserve_width(length)
        self.table.blocks[row, :length] = self.next_id
        self.table.num_blocks[row] = self.table.length[row] = length
        self.known[self.next_id] = length
        return self.next_id

    def leave(self, sequence_id):
        self.table.remove(sequence_id)
        del self.known[sequence_id]

    def check(self, ids):
        table = self.table
        assert table.arrange(ids) == len(ids)
        assert table.order[: len(ids)] == ids
        assert {i: row for row, i in enumerate(table.order) if i in self.known} == table.row_of
        for sequence_id, row in table.row_of.items():
            length = self.known[sequence_id]
            assert table.length[row] == table.num_blocks[row] == length
            assert table.blocks[row].tolist() == [sequence_id] * length + [0] * (table.blocks.shape[1] - length)
        assert not table.blocks[[row for row, i in enumerate(table.order) if i not in self.known]].any()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(1, 90))
def test_sequences_leave_and_join_a_large_batch(data, count):
    """In any order of the batch, with others outside of it: names, lengths and tables go with their sequences."""
    churn = Churn(count)
    for _ in range(data.draw(st.integers(1, 12))):
        ids = churn.ids
        for _ in range(data.draw(st.integers(0, 4))):
            if ids:
                churn.leave(ids.pop(data.draw(st.integers(0, len(ids) - 1))))
        joiners = [churn.join() for _ in range(data.draw(st.integers(0, 4)))]
        how = data.draw(st.sampled_from(("behind", "between", "part", "one", "backwards")))
        if how == "between":
            at = data.draw(st.integers(0, len(ids)))
            ids[at:at] = joiners
        else:
            ids += joiners
        batch = {"part": ids[: len(ids) // 2], "one": ids[-1:], "backwards": ids[::-1]}.get(how, ids)
        churn.check(list(batch))


def test_rows_slide_past_the_end_of_their_lines():
    """A batch that loses its first sequence at every step, for ever: most steps move nothing, and none loses a table."""
    churn = Churn(20)
    for _ in range(200):
        churn.leave(churn.ids.pop(0))
        churn.ids.append(churn.join())
        churn.check(churn.ids)


def test_a_batch_names_each_once():
    """A repeated id is refused before anything moves."""
    churn = Churn(20)
    with pytest.raises(InvalidLength, match="an id stands twice in a batch of 3"):
        churn.table.arrange([3, 4, 3])
    churn.check(churn.ids)

"""What a step of the block manager costs the host, on one core; recorded by pytest-benchmark like any other row.

Budgets stand beside the samples (extra_info) and are not asserted: a machine that does other work misses them.
The longest contexts are only built under --benchmark.
"""

import numpy as np
import pytest
import torch

from runtime import BlockManager
from runtime.replay import Replay
from runtime.stores import PagedStore
from runtime.study import Plan, count
from runtime.traces import synthetic

BLOCK_SIZE = 16
VOCABULARY = 150_000


class Decoding:
    """Sequences of distinct prompts, all committed; `step` appends and commits a token of each and fetches the tensors."""

    def __init__(self, num_seqs, context, *, spread):
        blocks = num_seqs * (context // BLOCK_SIZE + 20) + 64
        self.rng = np.random.default_rng(0)
        self.manager = BlockManager(blocks, BLOCK_SIZE)
        self.context = context
        self.ids = [self.join(context - (index % BLOCK_SIZE if spread else 0)) for index in range(num_seqs)]
        self.turn = 0
        self.joiners = []
        self.num_joiners = 3
        self.sample()

    def join(self, length):
        prompt = self.rng.integers(0, VOCABULARY, length).astype(np.int32)
        sequence = self.manager.create_sequence(prompt)
        self.manager.append_tokens([sequence], [length])
        self.manager.commit_tokens([sequence], prompt, [length])
        return sequence

    def sample(self):
        """The next tokens: others at every step, so that no two sequences ever agree."""
        self.tokens = self.rng.integers(0, VOCABULARY, len(self.ids)).tolist()

    def step(self):
        manager, ids = self.manager, self.ids
        slots = torch.from_numpy(manager.append_tokens(ids))
        tables, lengths = manager.get_block_tables_tensor(ids), manager.get_seq_lens_tensor(ids)
        manager.commit_tokens(ids, self.tokens)
        return slots, tables, lengths

    def replace(self):
        """As many sequences end as there are prompts, whose sequences take their places, looked up; then a step."""
        for prompt in self.prompts:
            self.turn = (self.turn + 89) % len(self.ids)
            self.manager.release_sequence(self.ids[self.turn])
            self.ids[self.turn] = self.manager.create_sequence(prompt)
            self.joiners.append(self.ids[self.turn])
        return self.step()

    def condense(self):
        """The same, but the last of the list takes the place of one that leaves, and joiners stand at its end."""
        for _ in self.prompts:
            self.turn = (self.turn + 89) % (len(self.ids) - 1)
            self.manager.release_sequence(self.ids[self.turn])
            self.ids[self.turn] = self.ids.pop()
        return self.join_at_the_end()

    def move_up(self):
        """The same, but leavers are taken out of the list, and all behind them move up."""
        for _ in self.prompts:
            self.turn = (self.turn + 89) % len(self.ids)
            self.manager.release_sequence(self.ids.pop(self.turn))
        return self.join_at_the_end()

    def join_at_the_end(self):
        self.joiners = [self.manager.create_sequence(prompt) for prompt in self.prompts]
        self.ids += self.joiners
        return self.step()

    def feed(self):
        """The last joiners come to the context of all, so that it is the same in every step; prompts for the next ones."""
        for sequence in self.joiners:
            prompt = self.rng.integers(0, VOCABULARY, self.context - int(self.rng.integers(1, BLOCK_SIZE))).astype(np.int32)
            self.manager.append_tokens([sequence], [prompt.size])
            self.manager.commit_tokens([sequence], prompt, [prompt.size])
        self.joiners = []
        self.prompts = self.rng.integers(0, VOCABULARY, (self.num_joiners, self.context)).astype(np.int32)
        self.manager.get_seq_lens_tensor(self.ids)
        self.sample()

    def fill(self):
        """What is free is filled with what can be found, as in an engine that has run for a while."""
        while self.manager.num_free_blocks:
            size = min(self.manager.num_free_blocks * BLOCK_SIZE, self.context)
            self.manager.release_sequence(self.join(size))

    def check(self):
        """Conservation, and tensors that say what the tables say."""
        self.manager.check_invariants()
        tables = self.manager.get_block_tables_tensor(self.ids)
        for row in (0, len(self.ids) - 1):
            table = self.manager.sequences[self.ids[row]].block_table
            assert tables[row].tolist() == table + [0] * (tables.shape[1] - len(table))


def _name(param):
    return f"{param[0]}x{param[1]}"


@pytest.fixture
def decoding(request):
    num_seqs, context, spread = request.param
    if context > 2048 and not request.config.getoption("pagedbench_benchmark"):
        pytest.skip(f"builds {num_seqs} x {context} tokens: under --benchmark only")
    return Decoding(num_seqs, context, spread=spread)


@pytest.mark.benchmark(group="memory.step")
@pytest.mark.parametrize(
    ("decoding", "budget_us"),
    [
        pytest.param((256, 2048, True), 60, id="256x2048"),
        pytest.param((256, 8192, True), 60, id="256x8192"),
        pytest.param((256, 131072, True), 60, id="256x131072"),
        pytest.param((256, 2048, False), 60, id="256x2048-in_step"),
        pytest.param((1024, 2048, True), 120, id="1024x2048"),
    ],
    indirect=["decoding"],
)
def test_a_step_of_decoding(benchmark, decoding, budget_us):
    """Append, commit, tables, lengths and slots; a block is filled by one in sixteen, or by all every sixteenth step."""
    benchmark.extra_info["budget_us"] = budget_us
    benchmark.pedantic(decoding.step, setup=decoding.sample, rounds=200, warmup_rounds=20)
    decoding.check()


@pytest.mark.benchmark(group="memory.step")
@pytest.mark.parametrize("decoding", [pytest.param((256, 2048, False), id="256x2048")], indirect=True)
def test_the_step_in_which_every_length_crosses_a_block(benchmark, decoding):
    """256 blocks are taken in the step after which 256 others were indexed; the fifteen steps between are not timed."""

    def up_to_the_edge():
        for _ in range(BLOCK_SIZE - 1):
            decoding.step()
            decoding.sample()

    decoding.step()
    benchmark.extra_info["budget_us"] = 200
    benchmark.pedantic(decoding.step, setup=up_to_the_edge, rounds=16)
    decoding.check()


@pytest.mark.benchmark(group="memory.step")
@pytest.mark.parametrize("decoding", [pytest.param((256, 2048, True), id="256x2048")], indirect=True)
def test_a_step_that_evicts(benchmark, decoding):
    """No block is free: each one taken is the least recently used of those that could still be found."""
    decoding.fill()
    benchmark.extra_info["budget_us"] = 60
    benchmark.pedantic(decoding.step, setup=decoding.sample, rounds=200, warmup_rounds=20)
    decoding.check()


@pytest.mark.benchmark(group="memory.step")
@pytest.mark.parametrize("num_joiners", [2, 3])
@pytest.mark.parametrize("how", ["replace", "condense", "move_up"])
@pytest.mark.parametrize("decoding", [(256, 2048, True), (256, 8192, True), (256, 131072, True)], indirect=True, ids=_name)
def test_a_step_in_which_sequences_leave_and_join(benchmark, decoding, how, num_joiners):
    """1% of the batch, 2.56 sequences, ends and is replaced; the context stays, for joiners are fed untimed."""
    decoding.num_joiners = num_joiners
    decoding.fill()
    decoding.feed()
    benchmark.extra_info["budget_us"] = 100
    benchmark.pedantic(getattr(decoding, how), setup=decoding.feed, rounds=200, warmup_rounds=20)
    decoding.feed()
    decoding.check()
    assert min(state.sequence_length for state in decoding.manager.sequences.values()) > decoding.context - BLOCK_SIZE


@pytest.mark.benchmark(group="memory.feed")
@pytest.mark.parametrize("decoding", [(256, 2048, True), (256, 8192, True), (256, 131072, True)], indirect=True, ids=_name)
def test_feeding_one_that_joins(benchmark, decoding):
    """Append and commit of a whole prompt, whose blocks are taken from those of one that left: what release has put off."""
    decoding.fill()

    def one_leaves():
        decoding.manager.release_sequence(decoding.ids[0])
        prompt = decoding.rng.integers(0, VOCABULARY, decoding.context).astype(np.int32)
        decoding.ids[0] = decoding.manager.create_sequence(prompt)
        return (decoding.ids[0], prompt), {}

    def feed(sequence, prompt):
        decoding.manager.append_tokens([sequence], [prompt.size])
        decoding.manager.commit_tokens([sequence], prompt, [prompt.size])

    benchmark.pedantic(feed, setup=one_leaves, rounds=100, warmup_rounds=10)
    decoding.check()


@pytest.mark.benchmark(group="memory.hit")
@pytest.mark.parametrize(("kind", "budget_us"), [("array", 150), ("list", 350)])
def test_a_full_hit(benchmark, kind, budget_us):
    """A prompt of 8,192 tokens that is there entirely, every token compared."""
    manager = BlockManager(1024, BLOCK_SIZE)
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 8192).astype(np.int32)
    sequence = manager.create_sequence(prompt)
    manager.append_tokens([sequence], [8192])
    manager.commit_tokens([sequence], prompt, [8192])
    given = prompt if kind == "array" else prompt.tolist()
    found = []

    def forget():
        for sequence in found:
            manager.release_sequence(sequence)
        found.clear()

    benchmark.extra_info["budget_us"] = budget_us
    benchmark.pedantic(lambda: found.append(manager.create_sequence(given)), setup=forget, rounds=200)
    assert manager.num_cached_tokens(found[0]) == 8191
    manager.check_invariants()


@pytest.mark.benchmark(group="memory.study")
@pytest.mark.parametrize("how", ["manager", "count"])
def test_the_study_at_the_size_that_it_promises(benchmark, request, how):
    """50,000 requests through the real manager, which come to the same as by counting; a million by counting."""
    if not request.config.getoption("pagedbench_benchmark"):
        pytest.skip("takes half a minute: under --benchmark only")
    benchmark.extra_info["budget_us"] = 60e6
    trace = synthetic("sharegpt", 50_000 if how == "manager" else 1_000_000)
    if how == "count":
        benchmark.pedantic(count, args=(trace, Plan()), rounds=1)
        return
    store = PagedStore(BlockManager(Plan().num_slots // BLOCK_SIZE, BLOCK_SIZE))

    assert benchmark.pedantic(Replay(trace, store).run, args=("paged 16",), rounds=1) == count(trace, Plan())

"""Every reader of the table: its checksum is that of all words of K and V in use, no more and no fewer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.hazards import TIMED
from harness.ops import operator
from harness.ops.attention import AttentionCase, AttentionSpec, AttentionStep
from harness.ops.dtypes import torch_dtype
from harness.ops.layouts import HND
from harness.registry import Registry
from impls import IMPLS
from impls.torch_read import bag_offsets, num_parts
from tests.impls.devices import device_of

ENTRIES = list(Registry(IMPLS).entries(roles=("reader",)))
SWEPT = [
    (entry, name, value)
    for entry in ENTRIES if entry.layout is HND
    for name, values in entry.impl.params.items() for value in values[1:]
]
SHAPES = {
    "8 heads, blocks of 16": {"num_kv_heads": 8, "head_dim": 128, "block_size": 16},
    "5 heads, blocks of 6": {"num_kv_heads": 5, "head_dim": 72, "block_size": 6},
    "1 head, blocks of 1": {"num_kv_heads": 1, "head_dim": 64, "block_size": 1},
    "3 heads, blocks of 64": {"num_kv_heads": 3, "head_dim": 256, "block_size": 64},
}
LENS = {
    "skewed": (701, 1, 16, 0, 33, 6, 64),
    "full blocks": (64, 192, 384),
    "one token": (1,),
    "all empty": (0, 0),
    "no sequences": (),
}


class Problem:
    """Random words in shuffled blocks of a larger pool, and the sum of those in use."""

    def __init__(self, entry, dtype, shape, lens, seed=1):
        self.entry, self.dtype, self.shape, self.lens = entry, dtype, shape, lens
        self.device = device_of(entry.impl)
        rng = np.random.default_rng(seed)
        counts = [-(-n // shape["block_size"]) for n in lens]
        self.num_blocks = sum(counts) + 3
        order = iter(rng.permutation(self.num_blocks))
        self.tables = np.full((len(lens), max(counts, default=0) + 1), 2**30, np.int32)
        for row, count in zip(self.tables, counts, strict=True):
            row[:count] = [next(order) for _ in range(count)]
        row_words = shape["head_dim"] * torch_dtype(dtype).itemsize // 4
        pool = (2, self.num_blocks, shape["num_kv_heads"], shape["block_size"], row_words)
        self.words = torch.from_numpy(rng.integers(-(2**31), 2**31, pool).astype(np.int32))

    def prepare(self, **overrides):
        shape, num_seqs = self.shape, len(self.lens)
        return self.entry.impl.load()(AttentionSpec(
            **shape, num_q_heads=shape["num_kv_heads"], dtype=self.dtype, scale=1.0, layout=self.entry.layout,
            num_blocks=self.num_blocks, max_num_seqs=num_seqs, max_num_tokens=num_seqs, max_q_len=1,
            max_seq_len=max(self.lens, default=0), max_blocks_per_seq=self.tables.shape[1], device=self.device,
            params=self.entry.impl.resolve_params(overrides),
        ))

    def step(self):
        lens, starts = np.array(self.lens, np.int32), np.arange(len(self.lens) + 1, dtype=np.int32)
        on_device = [torch.from_numpy(array).to(self.device) for array in (self.tables, lens, starts)]
        return AttentionStep(
            block_tables=on_device[0], seq_lens=on_device[1], query_start_loc=on_device[2],
            host_block_tables=self.tables, host_seq_lens=lens, host_query_start_loc=starts,
        )

    def arguments(self):
        key, value = self.words.view(torch_dtype(self.dtype)).to(self.device)
        query = torch.zeros(len(self.lens), self.shape["num_kv_heads"], self.shape["head_dim"], device=self.device)
        return (query, *self.entry.layout.arrange(key, value), torch.zeros_like(query), torch.zeros_like(query[:, :, 0]))

    def want(self):
        size, total = self.shape["block_size"], 0
        for row, seq_len in zip(self.tables, self.lens, strict=True):
            for begin in range(0, seq_len, size):
                block = self.words[:, row[begin // size], :, : min(size, seq_len - begin)]
                total += int(block.sum(dtype=torch.int64))
        return total % 2**32


def checksum(prepared):
    return int(prepared.checksum.sum(dtype=torch.int64)) % 2**32


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_reads_every_word_in_use_once(entry, shape, lens):
    """The sum over all words read is the sum over all tokens in use; slots past the end would change it."""
    problem = Problem(entry, "bf16", shape, lens)
    prepared = problem.prepare()

    prepared.plan(problem.step())
    prepared.launch(*problem.arguments())

    assert checksum(prepared) == problem.want()


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_reads_four_byte_elements(entry):
    """An f32 row holds one element a word."""
    problem = Problem(entry, "f32", SHAPES["5 heads, blocks of 6"], LENS["skewed"])
    prepared = problem.prepare()

    prepared.plan(problem.step())
    prepared.launch(*problem.arguments())

    assert checksum(prepared) == problem.want()


ASKED = {
    "window": {"window": 40},
    "several tokens in a window": {"window": 5, "q_lens": (9, 2, 1, 30, 4)},
    "prefix": {"prefix": ((0, 0), (0, 32), (1, 32), (0, 64), (0, 0))},
    "prefix and window": {"prefix": ((0, 0), (0, 32), (1, 32), (0, 64), (0, 0)), "window": 70},
    "fp8": {"kv_dtype": "e4m3"},
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_reads_what_the_case_itself_must_read(entry, asked):
    """Blocks that a window reaches, shared ones once, bytes of fp8: as the harness counts them, and no other."""
    device, op = device_of(entry.impl), operator("attention")
    case = AttentionCase(
        name="some.case", num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(200, 64, 33, 100, 4),
        **ASKED[asked],
    )
    staged = op.build(case, TIMED, layers=1, device=device).stage(entry.layout)
    prepared = entry.impl.load()(op.spec(case, entry.layout, device, entry.impl.resolve_params({})))

    prepared.plan(staged.step)
    prepared.launch(*staged.arguments(0), **staged.keywords(0))

    assert entry.impl.why_not(case, device) is None
    assert staged.judge_reader(0, prepared).reason is None


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_launch_sums_anew(entry):
    """The checksum is that of the last launch, whatever was planned and read before."""
    first, second = (Problem(entry, "bf16", SHAPES["8 heads, blocks of 16"], lens, seed=len(lens)) for lens in LENS_OF_ONE_SIZE)
    prepared = first.prepare()
    for problem in (first, second):
        prepared.plan(problem.step())
        prepared.launch(*problem.arguments())
        prepared.launch(*problem.arguments())

    assert checksum(prepared) == second.want()


LENS_OF_ONE_SIZE = ((300, 17, 20), (5, 290, 0))


@pytest.mark.parametrize(("entry", "name", "value"), SWEPT, ids=str)
def test_every_declared_parameter_reads_all(entry, name, value):
    """Launch shapes worth trying read the same words; one CTA an SM, so that each finds room."""
    problem = Problem(entry, "bf16", SHAPES["5 heads, blocks of 6"], LENS["skewed"])
    prepared = problem.prepare(**{"ctas_per_sm": 1, name: value})

    prepared.plan(problem.step())
    prepared.launch(*problem.arguments())

    assert checksum(prepared) == problem.want()


@pytest.mark.parametrize("block_words", [8, 8192, 8196, 3 * 8192, 256 * 128 * 8, 4 * 8209])
def test_rows_of_a_block_are_equal_and_short(block_words):
    """A block is cut into whole rows that a core's cache holds, as few as can be."""
    parts = num_parts(block_words)

    assert block_words % parts == 0
    assert block_words // parts <= 8192
    assert all(block_words % fewer or block_words // fewer > 8192 for fewer in range(1, parts))


@pytest.mark.parametrize("num_rows", [1, 7, 8, 1000])
def test_bags_cover_all_rows(num_rows):
    """Bags begin at row 0, in order, and are at most as many as planned."""
    offsets = bag_offsets(num_rows, num_threads=2).tolist()

    assert offsets[0] == 0
    assert offsets == sorted(set(offsets))
    assert len(offsets) <= 16
    assert offsets[-1] < num_rows

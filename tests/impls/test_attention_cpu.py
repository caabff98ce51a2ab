"""Every attention implementation that runs on a CPU against a dense softmax written out here, in every layout."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.ops.attention import AttentionSpec, AttentionStep
from harness.ops.dtypes import torch_dtype
from harness.ops.layouts import HND, KV_NHD, NHD
from harness.registry import Registry, Unsupported
from impls import IMPLS

HOUSE = Path(__file__).resolve().parents[2]
NAMES = ("numpy.dense", "numpy.online", "torch.gather", "torch.blocked", "torch.contiguous", "triton.split_kv")
ROWS = Registry(IMPLS).entries(NAMES)
#: relative L2 of a row's error
ALLOWED = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.2e-2}
#: no such block: whoever reads a table past a sequence's blocks fails at once, or reads far outside
WILD = 1 << 30


@dataclasses.dataclass(frozen=True)
class Shape:
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "f16"


SHAPES = {
    "lengths at block edges": Shape((1, 15, 16, 17, 33), (1,) * 5),
    "an empty sequence between others": Shape((5, 0, 7), (1, 1, 1), dtype="bf16"),
    "empty batch": Shape((), ()),
    "no query tokens": Shape((5, 9), (0, 0)),
    "ragged queries": Shape((5, 33, 9, 21), (3, 1, 0, 21), dtype="f32"),
    "queries before the first token": Shape((2, 20, 0), (4, 3, 2), dtype="bf16"),
    "group 7, head_dim 80, blocks of 24": Shape((49, 24), (1, 1), 14, 2, 80, 24),
    "one query head each, blocks of 1": Shape((19, 2), (1, 1), 3, 3, 32, 1, "f32"),
    "one long among short": Shape((300, 1, 3), (1, 1, 1), 8, 1, 64, 8, "bf16"),
}


class Problem:
    """Tensors of a shape: NaN in every slot that holds no token, wild ids in every unused table entry."""

    def __init__(self, shape: Shape, seed: int = 0, *, pool: int = 0) -> None:
        self.shape, dtype = shape, torch_dtype(shape.dtype)
        self.blocks = [-(-n // shape.block_size) for n in shape.seq_lens]
        self.num_blocks = pool or sum(self.blocks) + 3
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        deck = iter(rng.permutation(self.num_blocks).tolist())
        self.tables = np.full((len(self.blocks), max(self.blocks, default=0) + 2), WILD, np.int32)
        pool_shape = (self.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.pool = [torch.full(pool_shape, torch.nan, dtype=dtype) for _ in range(2)]
        self.tokens = []  # key and value of each sequence, [tokens, num_kv_heads, head_dim]
        for seq, (seq_len, count) in enumerate(zip(shape.seq_lens, self.blocks, strict=True)):
            self.tables[seq, :count] = [next(deck) for _ in range(count)]
            token_shape = (seq_len, shape.num_kv_heads, shape.head_dim)
            self.tokens.append([torch.randn(token_shape, generator=generator).to(dtype) for _ in range(2)])
            place = np.arange(seq_len)
            block = torch.from_numpy(self.tables[seq, place // shape.block_size].astype(np.int64))
            for cache, made in zip(self.pool, self.tokens[-1], strict=True):
                cache[block, :, torch.from_numpy(place % shape.block_size)] = made
        self.query = torch.randn((sum(shape.q_lens), shape.num_q_heads, shape.head_dim), generator=generator).to(dtype)
        self.starts = np.array([0, *np.cumsum(shape.q_lens)], np.int32)

    def caches(self, layout):
        if layout.paged:
            return layout.arrange(*self.pool)
        shape = (len(self.tokens), max(self.shape.seq_lens, default=0), *self.pool[0].shape[1::2])
        caches = [torch.full(shape, torch.nan, dtype=self.query.dtype) for _ in range(2)]
        for seq, made in enumerate(self.tokens):
            for cache, part in zip(caches, made, strict=True):
                cache[seq, : len(part)] = part
        return tuple(caches)

    def spec(self, entry, **changes) -> AttentionSpec:
        shape = self.shape
        fields = {
            "num_q_heads": shape.num_q_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
            "block_size": shape.block_size, "dtype": shape.dtype, "scale": shape.head_dim**-0.5, "layout": entry.layout,
            "num_blocks": self.num_blocks, "max_num_seqs": len(shape.seq_lens), "max_num_tokens": sum(shape.q_lens),
            "max_q_len": max(shape.q_lens, default=0), "max_seq_len": max(shape.seq_lens, default=0),
            "max_blocks_per_seq": self.tables.shape[1], "device": "cpu", "params": entry.impl.resolve_params({}), **changes,
        }
        return AttentionSpec(**fields)

    def step(self) -> AttentionStep:
        host = (self.tables, np.array(self.shape.seq_lens, np.int32), self.starts)
        tables, seq_lens, starts = (torch.from_numpy(array) for array in host)
        return AttentionStep(
            block_tables=tables, seq_lens=seq_lens, query_start_loc=starts,
            host_block_tables=host[0], host_seq_lens=host[1], host_query_start_loc=host[2],
        )

    def truth(self):
        """out and lse in float64: softmax over the keys that each token sees, row by row."""
        shape = self.shape
        out = np.zeros(self.query.shape)
        lse = np.full(self.query.shape[:2], -np.inf)
        for seq, (key, value) in enumerate(self.tokens):
            for i in range(shape.q_lens[seq]):
                visible = max(shape.seq_lens[seq] - shape.q_lens[seq] + i + 1, 0)
                for head in range(shape.num_q_heads if visible else 0):
                    kv_head = head // (shape.num_q_heads // shape.num_kv_heads)
                    keys, values = (part[:visible, kv_head].double().numpy() for part in (key, value))
                    row = self.starts[seq] + i
                    scores = keys @ self.query[row, head].double().numpy() * shape.head_dim**-0.5
                    weights = np.exp(scores - scores.max())
                    lse[row, head] = scores.max() + np.log(weights.sum())
                    out[row, head] = weights / weights.sum() @ values
        return out, lse


def prepared(entry, problem, **changes):
    """The implementation prepared for the problem, or a skip that says why this machine cannot."""
    reason = entry.impl.why_missing("cpu")
    if reason:
        pytest.skip(reason)
    try:
        return entry.impl.load()(problem.spec(entry, **changes))
    except Unsupported as why:
        pytest.skip(str(why))


def run(entry, problem, **changes):
    """Launch once into outputs full of NaN; returns out and lse."""
    made = prepared(entry, problem, **changes)
    made.plan(problem.step())
    out, lse = torch.full_like(problem.query, torch.nan), torch.full(problem.query.shape[:2], torch.nan)
    made.launch(problem.query, *problem.caches(entry.layout), out, lse)
    return out, lse


def assert_close(got, want, dtype):
    """Rows by relative L2, lse absolutely; rows that see no key exactly 0 and -inf."""
    (out, lse), (want_out, want_lse) = ([np.asarray(part, np.float64) for part in pair] for pair in (
        (got[0].double(), got[1].double()), want,
    ))
    blind = np.isneginf(want_lse)
    assert np.isfinite(out).all(), "out is not finite"
    assert not out[blind].any(), "out is not 0 where no key is visible"
    assert (np.isneginf(lse) == blind).all(), "lse is not -inf exactly where no key is visible"
    error = np.linalg.norm(out - want_out, axis=2)[~blind] / np.linalg.norm(want_out, axis=2)[~blind]
    assert error.max(initial=0.0) <= ALLOWED[dtype]
    assert np.abs(lse[~blind] - want_lse[~blind]).max(initial=0.0) <= 1e-4


@pytest.mark.parametrize("shape", SHAPES.values(), ids=[name.replace(" ", "_") for name in SHAPES])
@pytest.mark.parametrize("entry", ROWS, ids=str)
def test_attention_is_the_softmax_over_visible_keys(entry, shape):
    """Out and lse, with NaN in every slot that holds no token and wild ids in every table entry that is not used."""
    problem = Problem(shape)

    got = run(entry, problem)

    assert_close(got, problem.truth(), shape.dtype)


@pytest.mark.parametrize("entry", ROWS, ids=str)
def test_views_with_gaps_are_taken(entry):
    """The query is a slice of a fused projection, out and lse are slices of larger tensors."""
    problem = Problem(SHAPES["ragged queries"])
    tokens, heads, head_dim = problem.query.shape
    fused = torch.full((tokens, heads + 4, head_dim), torch.nan)
    fused[:, 2:-2] = problem.query
    outs, lses = torch.full((tokens, heads + 3, head_dim), torch.nan), torch.full((tokens, heads + 1), torch.nan)
    made = prepared(entry, problem)
    made.plan(problem.step())

    made.launch(fused[:, 2:-2], *problem.caches(entry.layout), outs[:, 1:-2], lses[:, 1:])

    assert_close((outs[:, 1:-2], lses[:, 1:]), problem.truth(), "f32")
    assert outs[:, [0, -2, -1]].isnan().all()
    assert lses[:, 0].isnan().all()


@pytest.mark.parametrize("entry", ROWS, ids=str)
def test_one_prepared_serves_steps_of_any_size_within_its_capacities(entry):
    """A second plan with fewer and shorter sequences leaves nothing of the first."""
    first, second = Problem(Shape((40, 17, 3), (1, 1, 1)), seed=1), Problem(Shape((18, 50), (1, 1)), seed=2)
    made = prepared(
        entry, first, max_num_seqs=5, max_num_tokens=9, max_seq_len=64, max_blocks_per_seq=8, num_blocks=64, max_q_len=4
    )
    for problem in (first, second):
        out, lse = torch.full_like(problem.query, torch.nan), torch.full(problem.query.shape[:2], torch.nan)
        made.plan(problem.step())
        made.launch(problem.query, *problem.caches(entry.layout), out, lse)

        assert_close((out, lse), problem.truth(), "f16")


@pytest.mark.parametrize("entry", ROWS, ids=str)
def test_a_launch_with_other_tokens_than_planned_is_refused(entry):
    """Silence would read or write past the end."""
    problem = Problem(Shape((5, 9), (1, 1)))
    made = prepared(entry, problem)
    made.plan(problem.step())
    query = torch.zeros((3, 4, 64), dtype=torch.float16)

    with pytest.raises(ValueError, match=r"planned for 2 query tokens \(got 3\)"):
        made.launch(query, *problem.caches(entry.layout), torch.empty_like(query), torch.empty(3, 4))


@pytest.mark.parametrize("entry", ROWS, ids=str)
def test_declared_workspace_is_what_is_held(entry):
    """Every tensor that a prepared and planned implementation holds is in workspace_bytes, exactly."""
    problem = Problem(Shape((40, 17, 3), (1, 1, 1)))
    made = prepared(entry, problem)
    made.plan(problem.step())
    held = {value.untyped_storage().data_ptr(): value for value in vars(made).values() if isinstance(value, torch.Tensor)}

    assert made.workspace_bytes == sum(value.untyped_storage().nbytes() for value in held.values())


@pytest.mark.parametrize("entry", [row for row in ROWS if row.layout is HND], ids=str)
def test_blocks_past_2_31_elements_are_reached(entry):
    """The last block of a pool of 2**31 elements and more; memory that nobody touches costs nothing."""
    small = Problem(Shape((11,), (1,), 2, 1, 128, 16), pool=1)
    num_blocks = 2**31 // (16 * 128) + 1
    caches = [torch.empty((num_blocks, 1, 16, 128), dtype=torch.float16) for _ in range(2)]
    for cache, part in zip(caches, small.pool, strict=True):
        cache[-1] = part[0]
    small.tables[0, 0], small.num_blocks = num_blocks - 1, num_blocks
    made = prepared(entry, small)
    made.plan(small.step())
    out, lse = torch.full_like(small.query, torch.nan), torch.full(small.query.shape[:2], torch.nan)

    made.launch(small.query, *caches, out, lse)

    assert_close((out, lse), small.truth(), "f16")


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16])
def test_the_number_of_splits_changes_no_result(splits):
    """triton.split_kv cut into more pieces than the short sequences have, ends on and beside every edge."""
    entry = Registry(IMPLS).entries(["triton.split_kv[NHD]"])[0]
    problem = Problem(Shape((1, 63, 64, 65, 200, 0), (1, 1, 1, 1, 3, 2), 4, 1, dtype="f32"))
    params = entry.impl.resolve_params({"splits": splits, "tile": 16})

    assert_close(run(entry, problem, params=params), problem.truth(), "f32")


@pytest.mark.parametrize("tile", [1, 16, 48, 1024])
def test_the_tile_changes_no_result(tile):
    """torch.blocked with tiles of one block, several, and more than there are."""
    entry = Registry(IMPLS).entries(["torch.blocked[HND]"])[0]
    problem = Problem(Shape((100, 17, 48), (2, 1, 17), dtype="f32"))

    assert_close(run(entry, problem, params={"tile": tile}), problem.truth(), "f32")


def test_batches_of_the_gather_are_at_most_half_padding():
    """Sequences share a call only when their numbers of blocks round up to one power of two."""
    problem = Problem(Shape((1000, 600, 500, 90, 17, 16, 1), (1,) * 7))
    made = prepared(Registry(IMPLS).entries(["torch.gather[NHD]"])[0], problem)
    made.plan(problem.step())

    for batch in made.batches:
        used = sum(-(-length // 16) for length in batch.lengths)
        assert batch.table.numel() < 2 * used
        assert batch.table.max() < WILD


@pytest.mark.parametrize("layout", [HND, NHD, KV_NHD], ids=str)
def test_chunks_of_a_gpu_follow_from_capacities(layout):
    """One chunk when there is work enough, many when one long sequence must fill the device; never a shorter one than 128."""
    problem = Problem(Shape((16,), (1,), 32, 8, 128))
    entry = Registry(IMPLS).entries([f"triton.split_kv[{layout.name}]"])[0]
    prepared(entry, problem)
    from impls.triton.split_kv import plan_chunk

    def chunk(num_seqs, context):
        sizes = {"max_num_seqs": num_seqs, "max_num_tokens": num_seqs, "max_seq_len": context}
        spec = problem.spec(entry, num_blocks=num_seqs * context * 5 // 64, **sizes)
        return plan_chunk(spec, splits=0, tile=64, rows=16, multiprocessors=132)

    assert chunk(256, 1024) >= 1024
    assert 512 <= chunk(1, 131072) <= 2048
    assert chunk(1, 2048) == 128
    assert 1024 <= chunk(64, 8192) <= 4096


AHEAD_OF_TIME = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from impls.triton.split_kv import attend_chunk, merge_chunks

shape = dict(num_q_heads=32, head_dim=80, dims=128, interpreted=False)
attend = dict(shape, group=4, num_kv_heads=8, block_size=24, rows=16, tile=64, is_split=True)
merge = dict(shape, chunks=16, tile=16)
floats = {"lse", "partial_out", "partial_lse"}
halves, ids = {"query", "key_cache", "value_cache", "out"}, {"block_tables", "seq_lens", "query_start_loc"}
for kernel, constants in ((attend_chunk, attend), (merge_chunks, merge)):
    kinds = {name: "constexpr" if name in constants else "*fp32" if name in floats else "*bf16" if name in halves
             else "*i32" if name in ids else "fp32" if name == "scale_log2" else "i32" for name in kernel.arg_names}
    built = triton.compile(
        ASTSource(kernel, kinds, constants), target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}
    )
    print(kernel.__name__, "mma.sync" in built.asm["ptx"], len(built.asm["cubin"]) > 0)
"""


def test_triton_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    """Both kernels build to cubin for sm_90, and the products of 16-bit tiles go to the tensor cores."""
    pytest.importorskip("triton.compiler", reason="needs triton")
    environment = {"PATH": "", "PYTHONPATH": str(HOUSE), "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", AHEAD_OF_TIME], capture_output=True, text=True, env=environment, check=False, timeout=300
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["attend_chunk", "True", "True", "merge_chunks", "False", "True"]

"""triton.split_kv: every sequence cut into chunks of equal length, partial results merged by a second kernel.

    partial(chunk)    m = max s, l = sum exp(s - m), o = sum exp(s - m) v over the chunk's visible keys; o / l and
                      m + log l are kept
    merge             lse = log sum_c exp(lse_c),  out = sum_c exp(lse_c - lse) out_c

A chunk's length is fixed when the kernel is prepared, from capacities alone, so a captured launch is right for whatever
lengths it meets. Cutting by length and not by count keeps the pieces of a skewed batch equal: a long sequence has many
chunks, a short one has one. Where one chunk holds the longest sequence there is no second kernel.

Works on a GPU (mma tiles of 16 rows: the query heads of a group, for each query token) and on a CPU in Triton's
interpreter. HND, NHD and KV_NHD are three sets of strides.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from harness.guards import workspace
from harness.ops.dtypes import ITEMSIZE, torch_dtype
from harness.registry import Prepared, Unsupported
from impls.triton.interpreter import why_missing

if TYPE_CHECKING:
    from harness.ops.attention import AttentionSpec, AttentionStep

#: chunks a GPU should get to work on, a multiprocessor: two waves of four programs that fit beside each other
CHUNKS_PER_MULTIPROCESSOR = 8
#: tokens; a shorter chunk costs more in merging than it wins in spreading
MIN_CHUNK = 128
MAX_PARTIAL_BYTES = 512 << 20
#: the pool is larger than what is in use; this share of it is planned for
POOL_IN_USE = 0.8
#: CUDA's limit on a grid's second and third dimension
MAX_GRID = 65535
#: rows of partial results that the merge reads at once
MERGE_TILE = 16


@triton.jit
def rounded(values, dtype: tl.constexpr, interpreted: tl.constexpr):
    """Round float32 to `dtype`, to nearest: the interpreter would cut bf16 off."""
    if interpreted and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        values = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return values.to(dtype)


@triton.jit(do_not_specialize=["table_stride", "num_tokens", "chunk"])  # or another batch would compile in the timed region
def attend_chunk(
    query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, out, lse, partial_out, partial_lse,
    scale_log2, table_stride, query_token_stride, query_head_stride, key_block_stride, value_block_stride,
    offset_stride, head_stride, out_token_stride, out_head_stride, lse_token_stride, num_tokens, chunk,
    group: tl.constexpr, num_q_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    block_size: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, dims: tl.constexpr, is_split: tl.constexpr,
    interpreted: tl.constexpr,
):  # fmt: skip
    """Grid (num_kv_heads * row tiles, chunks, num_seqs): heads of the same blocks run side by side, which is faster.

    Strides in elements; head_dim has no gaps.

    query, out       [num_tokens, num_q_heads, head_dim]
    lse              [num_tokens, num_q_heads]                   f32, natural logarithm
    partial_out      [chunks, num_tokens, num_q_heads, head_dim] f32, normalised within the chunk
    partial_lse      [chunks, num_tokens, num_q_heads]           f32

    `interpreted` multiplies in float32: the interpreter's dot takes bf16 for the integers that it keeps them in.
    """
    kv_head, part, seq = tl.program_id(0) % num_kv_heads, tl.program_id(1), tl.program_id(2)
    first_row = tl.program_id(0) // num_kv_heads * rows
    query_start = tl.load(query_start_loc + seq)
    q_len = tl.load(query_start_loc + seq + 1) - query_start
    if first_row < q_len * group:
        seq_len = tl.load(seq_lens + seq)
        row = first_row + tl.arange(0, rows)
        dim = tl.arange(0, dims)
        is_row = row < q_len * group
        head = kv_head * group + row % group
        token = (query_start + row // group).to(tl.int64)
        limit = tl.where(is_row, seq_len - q_len + row // group + 1, 0)  # keys that the row sees
        inside = is_row[:, None] & (dim < head_dim)[None, :]
        place = token[:, None] * query_token_stride + (head * query_head_stride)[:, None] + dim[None, :]
        queries = tl.load(query + place, inside, other=0.0)
        if interpreted:
            queries = queries.to(tl.float32)

        largest = tl.full([rows], float("-inf"), tl.float32)
        total = tl.zeros([rows], tl.float32)
        sums = tl.zeros([rows, dims], tl.float32)
        begin = part * chunk
        last_token = tl.minimum((first_row + rows - 1) // group, q_len - 1)
        end = tl.minimum(begin + chunk, seq_len - q_len + last_token + 1)
        for first in range(begin, end, tile):
            position = first + tl.arange(0, tile)
            is_key = position < end
            block = tl.load(block_tables + seq.to(tl.int64) * table_stride + position // block_size, is_key, other=0)
            block = block.to(tl.int64)
            within = (position % block_size) * offset_stride + kv_head * head_stride
            readable = is_key[:, None] & (dim < head_dim)[None, :]  # past the end nothing is loaded, so no NaN is met
            keys = tl.load(key_cache + (block * key_block_stride + within)[:, None] + dim[None, :], readable, other=0.0)
            values = tl.load(value_cache + (block * value_block_stride + within)[:, None] + dim[None, :], readable, other=0.0)
            weights_type = values.dtype
            if interpreted:
                keys, values = keys.to(tl.float32), values.to(tl.float32)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
            scores = tl.where(position[None, :] < limit[:, None], scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            # A row that has seen no key yet keeps -inf, from which nothing can be subtracted.
            shift = tl.where(larger == float("-inf"), 0.0, larger)
            rescale = tl.exp2(largest - shift)
            weights = tl.exp2(scores - shift[:, None])
            total = total * rescale + tl.sum(weights, 1)
            weights = rounded(weights, weights_type, interpreted).to(values.dtype)
            sums = sums * rescale[:, None] + tl.dot(weights, values, input_precision="ieee")
            largest = larger

        seen = total > 0.0
        divisor = tl.where(seen, total, 1.0)
        attended = sums / divisor[:, None]
        logs = tl.where(seen, (largest + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        if is_split:
            cell = (part.to(tl.int64) * num_tokens + token) * num_q_heads + head
            tl.store(partial_out + cell[:, None] * head_dim + dim[None, :], attended, inside & seen[:, None])
            tl.store(partial_lse + cell, logs, is_row)
        else:
            place = token[:, None] * out_token_stride + (head * out_head_stride)[:, None] + dim[None, :]
            tl.store(out + place, rounded(attended, out.dtype.element_ty, interpreted), inside)
            tl.store(lse + token * lse_token_stride + head, logs, is_row)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def merge_chunks(
    partial_out, partial_lse, out, lse, out_token_stride, out_head_stride, lse_token_stride, num_tokens, num_chunks,
    num_q_heads: tl.constexpr, head_dim: tl.constexpr, chunks: tl.constexpr, tile: tl.constexpr, dims: tl.constexpr,
    interpreted: tl.constexpr,
):  # fmt: skip
    """Grid (num_tokens, num_q_heads): one row of out. `chunks` is num_chunks rounded up to whole tiles of a power of two."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token * num_q_heads + head
    stride = num_tokens.to(tl.int64) * num_q_heads
    dim = tl.arange(0, dims)
    part = tl.arange(0, chunks)
    logs = tl.load(partial_lse + part * stride + row, part < num_chunks, other=float("-inf"))
    largest = tl.max(logs, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(logs - shift), 0)
    sums = tl.zeros([dims], tl.float32)
    for first in range(0, num_chunks, tile):
        member = first + tl.arange(0, tile)  # a name of its own: Triton 3.6 wants loop variables to keep their shape
        log = tl.load(partial_lse + member * stride + row, member < num_chunks, other=float("-inf"))
        counts = log > float("-inf")  # a chunk that saw no key wrote only its -inf
        cell = (member * stride + row)[:, None] * head_dim + dim[None, :]
        values = tl.load(partial_out + cell, counts[:, None] & (dim < head_dim)[None, :], other=0.0)
        sums += tl.sum(values * tl.exp(log - shift)[:, None], 0)
    divisor = tl.where(total > 0.0, total, 1.0)
    attended = sums / divisor
    place = token * out_token_stride + head * out_head_stride + dim
    tl.store(out + place, rounded(attended, out.dtype.element_ty, interpreted), dim < head_dim)
    tl.store(lse + token * lse_token_stride + head, tl.where(total > 0.0, shift + tl.log(divisor), float("-inf")))


def prepare(spec: AttentionSpec) -> SplitKV:
    reason = why_missing(torch.device(spec.device).type)
    if reason:
        raise Unsupported(reason)
    return SplitKV(spec)


def plan_rows(spec: AttentionSpec) -> int:
    """Rows of a tile: a power of two of at least 16, mma's smallest. Float32 has no mma here, and spills with more."""
    most = 16 if spec.dtype == "f32" else 64
    return min(most, max(16, triton.next_power_of_2(spec.group * max(spec.max_q_len, 1))))


def plan_warps(spec: AttentionSpec, rows: int, dims: int) -> int:
    """Eight warps where the sums of four would spill."""
    return 8 if spec.dtype == "f32" or rows * dims > 8192 else 4


def plan_tile(spec: AttentionSpec, dims: int, on_gpu: bool) -> int:
    """Tokens of a tile, a power of two. On a GPU K and V of a tile take 16 KiB; the interpreter likes few, large tiles."""
    if on_gpu:
        return min(128, max(16, (8 << 10) // (dims * ITEMSIZE[spec.dtype])))
    return min(512, max(16, triton.next_power_of_2(triton.cdiv(spec.max_seq_len, plan_interpreted_splits(spec)))))


def plan_interpreted_splits(spec: AttentionSpec) -> int:
    """The interpreter pays for programs: two chunks, so that merging is met there too, where that makes few of them."""
    programs = spec.max_num_seqs * spec.num_kv_heads + spec.max_num_tokens * spec.num_q_heads
    return 2 if programs <= 64 else 1


def plan_chunk(spec: AttentionSpec, *, splits: int, tile: int, rows: int, multiprocessors: int) -> int:
    """Tokens of a chunk, whole tiles: from `splits` of the longest sequence, or from the work there can be if that is 0."""
    longest = max(spec.max_seq_len, 1)
    if splits:
        return triton.cdiv(triton.cdiv(longest, splits), tile) * tile
    in_use = max(1, int(spec.num_blocks * spec.block_size * POOL_IN_USE))
    tokens = min(in_use, max(1, spec.max_num_seqs) * longest)
    row_tiles = max(1, triton.cdiv(spec.max_num_tokens * spec.group, max(1, spec.max_num_seqs) * rows))
    wanted = tokens * spec.num_kv_heads * row_tiles / (multiprocessors * CHUNKS_PER_MULTIPROCESSOR)
    partial_bytes = 4 * spec.max_num_tokens * spec.num_q_heads * (spec.head_dim + 1)
    fits = longest * partial_bytes / MAX_PARTIAL_BYTES
    return triton.cdiv(max(MIN_CHUNK, math.ceil(wanted), math.ceil(fits)), tile) * tile


class SplitKV(Prepared):
    """Workspace, where a sequence can have several chunks

    partial_out    [chunks, max_num_tokens, num_q_heads, head_dim]    f32
    partial_lse    [chunks, max_num_tokens, num_q_heads]              f32
    """

    ledger = {"split": "chunks of fixed length, partial results in float32, merged by a second kernel in the same launch"}

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        on_gpu = torch.device(spec.device).type == "cuda"
        multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count if on_gpu else 1
        self.rows = plan_rows(spec)
        self.dims = max(16, triton.next_power_of_2(spec.head_dim))
        self.warps = spec.params["warps"] or plan_warps(spec, self.rows, self.dims)
        splits = spec.params["splits"] or (0 if on_gpu else plan_interpreted_splits(spec))
        self.tile = int(spec.params["tile"]) or plan_tile(spec, self.dims, on_gpu)
        self.chunk = plan_chunk(spec, splits=splits, tile=self.tile, rows=self.rows, multiprocessors=multiprocessors)
        self.num_chunks = triton.cdiv(max(spec.max_seq_len, 1), self.chunk)
        self.row_tiles = triton.cdiv(max(spec.max_q_len, 1) * spec.group, self.rows)
        if max(self.num_chunks, spec.max_num_seqs) > MAX_GRID:
            raise Unsupported(f"chunks and sequences must be at most {MAX_GRID} (got {self.num_chunks}, {spec.max_num_seqs})")
        made = self.num_chunks if self.num_chunks > 1 else 0
        rows = (made, spec.max_num_tokens, spec.num_q_heads)
        self.partial_out = workspace((*rows, spec.head_dim), torch.float32, spec.device)
        self.partial_lse = workspace(rows, torch.float32, spec.device)
        self.workspace_bytes = 4 * (self.partial_out.numel() + self.partial_lse.numel())
        self.kernels = self._compile() if on_gpu else ()

    def plan(self, step: AttentionStep) -> None:
        self.step = step

    def launch(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        if len(query) != self.step.num_tokens:
            raise ValueError(f"triton.split_kv: planned for {self.step.num_tokens} query tokens (got {len(query)})")
        self._run(self.step, query, key_cache, value_cache, out, lse)

    def _run(self, step: Any, query: Any, key_cache: Any, value_cache: Any, out: Any, lse: Any) -> tuple[Any, ...]:
        """Launch both kernels; returns what Triton compiled them to."""
        spec = self.spec
        if not step.num_seqs or not len(query):
            return ()
        tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache, "out": out, "lse": lse}
        for name, tensor in tensors.items():
            if tensor.stride(-1) != 1:
                raise ValueError(f"triton.split_kv: {name} must have no gaps in its last dimension (got {tensor.stride()})")
        by_token = spec.layout.name in ("NHD", "KV_NHD")
        offset_stride, head_stride = key_cache.stride()[1:3] if by_token else (key_cache.stride(2), key_cache.stride(1))
        is_split = self.num_chunks > 1
        compiled = attend_chunk[(spec.num_kv_heads * self.row_tiles, self.num_chunks, step.num_seqs)](
            query, key_cache, value_cache, step.block_tables, step.seq_lens, step.query_start_loc,
            out, lse, self.partial_out, self.partial_lse,
            spec.scale * math.log2(math.e), step.block_tables.stride(0), query.stride(0), query.stride(1),
            key_cache.stride(0), value_cache.stride(0), offset_stride, head_stride,
            out.stride(0), out.stride(1), lse.stride(0), len(query), self.chunk,
            group=spec.group, num_q_heads=spec.num_q_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
            block_size=spec.block_size, rows=self.rows, tile=self.tile, dims=self.dims, is_split=is_split,
            interpreted=not query.is_cuda, num_warps=self.warps, num_stages=spec.params["stages"], enable_fp_fusion=True,
        )  # fmt: skip
        if not is_split:
            return (compiled,)
        merged = merge_chunks[(len(query), spec.num_q_heads)](
            self.partial_out, self.partial_lse, out, lse, out.stride(0), out.stride(1), lse.stride(0),
            len(query), self.num_chunks,
            num_q_heads=spec.num_q_heads, head_dim=spec.head_dim, chunks=triton.next_power_of_2(self.num_chunks),
            tile=MERGE_TILE, dims=self.dims, interpreted=not query.is_cuda, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
        return compiled, merged

    def _compile(self) -> tuple[dict[str, Any], ...]:
        """Launch once on an empty sequence, which reads no cache, so that no timed launch compiles."""
        spec = self.spec
        if not spec.max_num_tokens:
            return ()
        dtype = torch_dtype(spec.dtype)
        query = torch.empty((1, spec.num_q_heads, spec.head_dim), dtype=dtype, device=spec.device)
        caches = spec.layout.empty((1, spec.num_kv_heads, spec.block_size, spec.head_dim), dtype, spec.device)
        lse = torch.empty((1, spec.num_q_heads), dtype=torch.float32, device=spec.device)
        compiled = self._run(_empty_step(spec), query, *caches, torch.empty_like(query), lse)
        return tuple(
            {
                "name": kernel.metadata.name,
                "registers": kernel.n_regs,
                "shared_bytes": kernel.metadata.shared,
                "spill_bytes": kernel.n_spills * 4,
                "digest": hashlib.sha256(kernel.asm["cubin"]).hexdigest()[:12],
            }
            for kernel in compiled
        )


def _empty_step(spec: AttentionSpec) -> AttentionStep:
    """One sequence of no tokens with one query token."""
    import numpy as np

    from harness.ops.attention import AttentionStep

    host = (np.zeros((1, max(spec.max_blocks_per_seq, 1)), np.int32), np.zeros(1, np.int32), np.array([0, 1], np.int32))
    tables, seq_lens, starts = (torch.from_numpy(array).to(spec.device) for array in host)
    return AttentionStep(
        block_tables=tables, seq_lens=seq_lens, query_start_loc=starts,
        host_block_tables=host[0], host_seq_lens=host[1], host_query_start_loc=host[2],
    )  # fmt: skip

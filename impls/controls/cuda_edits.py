"""Controls that are edits of the CUDA kernels or of their host pages; they need a GPU."""

from __future__ import annotations

import functools

from harness.registry import Limits
from impls.controls.edit import edit

_cuda = functools.partial(edit, devices=("cuda",), available="impls.cuda.jit:why_missing")
_token = functools.partial(_cuda, right="cuda/per_token.py", op="attention", limits=Limits(max_head_dim=512))
_split = functools.partial(
    _cuda, right="cuda/split_kv.py", op="attention", params={"splits": (4,)},
    limits=Limits(head_dim_multiple=8, max_head_dim=256),
)
_write = functools.partial(_cuda, right="cuda/cache_write.py", op="cache_write", limits=Limits(head_dim_multiple=8))
_copy = functools.partial(_cuda, right="cuda/block_copy.py", op="block_copy", limits=Limits(head_dim_multiple=8))

_ROW = "return block * block_stride + ((long long)head * kBlockSize + slot) * kHeadDim;"
_ANY = {"max_seq_len": 1}
#: of a sequence that split_kv cuts whatever its tile
_CUT = {"max_seq_len": 1024}

EDITS = (
    # attention: where
    _token(
        "offsets_of_31_bits", ("paged.cuh", _ROW, _ROW.replace("return ", "return 0x7fffffff & (").replace(";", ");")),
        at_least={"num_elements": 9 << 28}, fault="element offsets in an int (vllm#1486)",
    ),
    _token(
        "offsets_of_32_bits", ("paged.cuh", _ROW, _ROW.replace("return ", "return (unsigned)(").replace(";", ");")),
        at_least={"num_elements": 33 << 27}, fault="element offsets wrap at 2^32 (flashinfer#3130)",
    ),
    _token(
        "values_of_another_head",
        ("per_token.cu", "value_head = {value_stride, num_kv_heads, q_head / kGroup}",
            "value_head = {value_stride, num_kv_heads, q_head % num_kv_heads}"),
        at_least={"group": 2, "num_kv_heads": 2, **_ANY}, fault="V by another map of heads than K (vllm-fork#503)",
    ),
    _token(
        "not_causal",
        ("paged.cuh", "num_tokens = seq_len - (end - begin) + (token - begin) + 1;", "num_tokens = seq_len;"),
        at_least={"max_q_len": 2, "max_seq_len": 2}, fault="every query token sees every key (transformers#48296)",
    ),
    _token(
        "query_stride_of_packed_heads",
        ("per_token.cu", "query[token * query_stride + q_head * kHeadDim + dim]",
            "query[((long long)token * num_q_heads + q_head) * kHeadDim + dim]"),
        at_least={"num_tokens": 2, **_ANY}, fault="the query's own stride is not used (flashinfer#1865)",
    ),
    _token(
        "row_past_the_grid",
        # No more than a canary holds: one LSE behind the last one.
        ("per_token.cu", "if (lane == 0) lse[(long long)token * num_q_heads + q_head] =",
            "const bool is_last = token + 1 == gridDim.x && q_head + 1 == gridDim.y;\n"
            "    if (lane <= is_last) lse[(long long)token * num_q_heads + q_head + lane] ="),
        at_least=_ANY, fault="a row too many is written (FA#2709)",
    ),
    _token(
        "wrong_stream",
        ("super().__init__(spec)", "super().__init__(spec)\n"
            "        import torch\n\n"
            "        self._side = torch.cuda.Stream(spec.device)"),
        ("THREADS, stream, *values)", "THREADS, self._side.cuda_stream, *values)"),
        at_least=_ANY, fault="work goes to a stream of its own, which nobody waits for (FA#1957)",
    ),
    _token(
        "plan_buffer_reused",
        ("super().__init__(spec)", "super().__init__(spec)\n"
            "        import torch\n"
            "        shape = (spec.max_num_seqs * spec.max_blocks_per_seq,)\n"
            "        self._ids = torch.empty(shape, dtype=torch.int32, device=spec.device)\n"
            "        self._pinned = self._ids.cpu().pin_memory()"),
        ("    def _enqueue(", "    def plan(self, step):\n"
            "        from dataclasses import replace\n"
            "        self._pinned.numpy()[: (count := step.host_block_tables.size)] = step.host_block_tables.ravel()\n"
            "        ids = self._ids[:count].copy_(self._pinned[:count], non_blocking=True)\n"
            "        super().plan(replace(step, block_tables=ids.view(step.block_tables.shape)))\n\n"
            "    def _enqueue("),
        at_least={"num_blocks_of_longest": 4},
        fault="the plan's host buffer is filled again before its copy is done (TRT-LLM#15546)",
    ),
    # attention: splits
    _split(
        "splits_added_up", ("merge_splits.cu", "const float weight = exp2f(stats.x - (most == -CUDART_INF_F ? 0.0f : most));",
            "const float weight = 1.0f;"),
        at_least=_CUT, fault="parts are merged as if each had the same maximum (flashinfer#58)",
    ),
    _split(
        "empty_split_merged", ("merge_splits.cu", "split < count; split += kTeams", "split < num_splits; split += kTeams"),
        ("merge_splits.cu", "thread < count ? split_stats", "thread < num_splits ? split_stats"),
        at_least={"num_lengths": 2, **_CUT}, fault="splits that hold no token are merged, NaN (vllm#28181, vllm#49294)",
    ),
    _split(
        "split_ends_early",
        ("split_kv.cu", "min(begin + splits.length, visible.num_tokens)",
            "min(begin + splits.length - 1, visible.num_tokens)"),
        at_least=_CUT, fault="the key at a split's end is dropped (sglang#2465)",
    ),
    _split(
        "split_lse_in_base_2", ("merge_splits.cu", "most * kLn2 + logf(total)", "most + log2f(total)"),
        at_least=_CUT, fault="LSE in base 2 where a row was split (flashinfer#4485)",
    ),
    # cache_write and block_copy
    _write(
        "last_vector_unwritten", ("cache_write.cu", "if (index >= num_vectors)", "if (index + 1 >= num_vectors)"),
        at_least={"num_written": 1}, fault="the grid is one thread short",
    ),
    _copy(
        "block_one_vector_short",
        ("block_copy.cu", "vector < kBlockVectors) destination", "vector + 1 < kBlockVectors) destination"),
        at_least={"num_copies": 1}, fault="a block's size is counted one vector short",
    ),
)  # fmt: skip

"""FlashInfer on a CPU: its signatures and refusals, the answers in torch.

Signatures of flashinfer-python 0.6.12: flashinfer/decode.py (BatchDecodeWithPagedKVCacheWrapper,
xqa_batch_decode_with_kv_cache), flashinfer/attention/_core.py (BatchAttention), flashinfer/prefill.py
(BatchPrefillWithPagedKVCacheWrapper), flashinfer/cascade.py and flashinfer/page.py; refusals also of csrc/page.cu,
csrc/batch_decode.cu, csrc/batch_prefill.cu, include/flashinfer/utils.cuh (groups), xqa.py and jit/xqa.py.
"""

from __future__ import annotations

import math
import types

import torch

from tests.peers.attend import attend, read_flat, require, write_flat

SEMAPHORES = 4096  # bytes; the library's are 8 MiB


def module():
    """The package and its module of decode."""
    package, decode, page = (types.ModuleType(f"flashinfer{name}") for name in ("", ".decode", ".page"))
    package.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    package.BatchAttention = BatchAttention
    package.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    package.MultiLevelCascadeAttentionWrapper = MultiLevelCascadeAttentionWrapper
    package.merge_state_in_place = merge_state_in_place
    decode.xqa_batch_decode_with_kv_cache = xqa_batch_decode_with_kv_cache
    page.append_paged_kv_cache = append_paged_kv_cache
    return {"flashinfer": package, "flashinfer.decode": decode, "flashinfer.page": page}


def by_token(caches, kv_layout):
    """Both caches as [num_pages, page_size, num_kv_heads, head_dim]."""
    require(isinstance(caches, tuple) and kv_layout in ("NHD", "HND"), "Unrecognized paged_kv_cache or layout")
    key, value = caches
    require(key.stride() == value.stride(), "strides of K and V must be equal")
    return (key, value) if kv_layout == "NHD" else (key.transpose(1, 2), value.transpose(1, 2))


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout="NHD"
):
    caches, tokens = by_token(paged_kv_cache, kv_layout), len(append_key)
    page_size = caches[0].shape[1]
    require(len(batch_indices) == len(positions) == tokens, "a sequence and a position for each token")
    require(len(kv_indptr) == len(kv_last_page_len) + 1, "kv_indptr.size(0) must be batch_size + 1")
    for table in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        require(table.dtype == torch.int32 and table.is_contiguous(), "tables are contiguous, of 32 bits")
    at = kv_indptr[batch_indices] * page_size + positions
    for cache, new in zip(caches, (append_key, append_value), strict=True):
        cache[kv_indices[at // page_size], at % page_size] = new


def require_tensor(tensor, shape, dtype, name):
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"Invalid shape of {name}: expected {shape}, got {tensor.shape}")
    if tensor.dtype != dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {dtype}, got {tensor.dtype}")


def tables_of(indptr, indices):
    """Block tables of pages listed one sequence after the other."""
    counts = indptr.diff().tolist()
    tables = torch.full((len(counts), max(counts, default=0)), -1, dtype=torch.int32)
    for seq, count in enumerate(counts):
        tables[seq, :count] = indices[int(indptr[seq]) : int(indptr[seq]) + count]
    return tables


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None,
    ):
        require(not float_workspace_buffer.any(), "the workspace must be zero for its first use")
        self._layout, self._graph, self._tensor_cores = kv_layout, use_cuda_graph, use_tensor_cores
        self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph and not all(torch.is_tensor(buffer) for buffer in self._buffers):
            raise ValueError("the buffers should be torch.Tensors in cudagraph mode")
        if use_cuda_graph and len(paged_kv_indptr_buffer) != len(paged_kv_last_page_len_buffer) + 1:
            raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE",
        window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, o_data_type=None, data_type=None,
        sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None,
        fixed_split_size=None, disable_split_kv=False,
    ):
        for tensor in (indptr, indices, last_page_len):
            require(tensor.dtype == torch.int32, "indptr, indices and last_page_len must be int32")
        group = num_qo_heads // num_kv_heads
        require(self._tensor_cores or group in (1, 2, 3, 4, 8), f"Unsupported group_size: {group}")
        held = (indptr, indices, last_page_len)
        if self._graph:
            if len(last_page_len) != len(self._buffers[2]):
                raise ValueError("The batch size should be fixed in cudagraph mode")
            if len(indices) > len(self._buffers[1]):
                raise ValueError("The size of indices should be less than or equal to the allocated buffer")
            held = tuple(buffer[: len(part)].copy_(part) for buffer, part in zip(self._buffers, held, strict=True))
        self._held, self._page_size, self._scale = held, page_size, sm_scale
        require(pos_encoding_mode == "NONE", "another kernel")
        self._masks = {"window_left": window_left, "softcap": logits_soft_cap}
        self._dtypes, self._heads = (q_data_type, kv_data_type or q_data_type), (num_qo_heads, num_kv_heads, head_dim)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, q_len_per_req=1, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        key, value = by_token(paged_kv_cache, self._layout)
        indptr, indices, last = self._held
        if (q.dtype, key.dtype) != self._dtypes:
            raise ValueError("the dtypes of q and kv do not match those given to plan")
        require((q.shape[1], *key.shape[2:]) == self._heads and key.shape[1] == self._page_size, "shapes are not as planned")
        if len(q) != len(last):
            raise ValueError("q.shape[0] does not match batch_size * q_len_per_req")
        seq_lens = (indptr.diff() - 1).clamp(min=0) * self._page_size + last
        scale = self._scale or q.shape[-1] ** -0.5
        require(all(one is None or isinstance(one, float) for one in (k_scale, v_scale)), "scales are numbers")
        scales = {"k_scale": 1.0 if k_scale is None else k_scale, "v_scale": 1.0 if v_scale is None else v_scale}
        tables, starts = tables_of(indptr, indices), torch.arange(len(q) + 1)
        made, logs = attend(q, key, value, tables, seq_lens, starts, scale, **self._masks, **scales)
        require_tensor(out, q.shape, q.dtype, "out")
        write_flat(out, made)
        if return_lse:
            require_tensor(lse, q.shape[:2], torch.float32, "lse")
            write_flat(lse, logs / math.log(2))
            return out, lse
        return out


class BatchAttention:
    def __init__(self, kv_layout="NHD", device="cuda"):
        self._layout = kv_layout
        self.float_workspace_buffer = torch.empty(1, dtype=torch.uint8, device=device)

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size,
        causal=False, sm_scale=None, logits_soft_cap=None, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        use_profiler=False,
    ):
        for tensor in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            require(tensor.dtype == torch.int32, "indices must be int32")
        self._starts, self._lens, self._causal = qo_indptr.clone(), kv_len_arr.clone(), causal
        self._indptr, self._indices, self._scale = kv_indptr.clone(), kv_indices, sm_scale
        self._dtype, self._page_size, self._heads = q_data_type, page_size, (num_qo_heads, num_kv_heads)

    def run(
        self, q, kv_cache, out=None, lse=None, k_scale=None, v_scale=None, logits_soft_cap=0.0, profiler_buffer=None,
        kv_cache_sf=None,
    ):
        key, value = by_token(kv_cache, self._layout)
        require(q.dtype == self._dtype and key.shape[1] == self._page_size, "not as planned")
        require((q.shape[1], key.shape[2]) == self._heads, "heads are not as planned")
        tables = tables_of(self._indptr, self._indices)
        made, logs = attend(q, key, value, tables, self._lens, self._starts, self._scale, self._causal)
        write_flat(out, made)
        write_flat(lse, logs / math.log(2))
        return out, lse


def xqa_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1,
    out=None, sinks=None, kv_layout="NHD", enable_pdl=None, q_len_per_req=1, o_scale=1.0, mask=None, kv_cache_sf=None,
):
    key, value = by_token(kv_cache, kv_layout)
    require(key.shape[1] in (16, 32, 64, 128), f"Invalid page_size: {key.shape[1]}, only 16, 32, 64, 128 are supported")
    require(query.dtype in (torch.float16, torch.bfloat16), "only float16 and bfloat16 input are supported")
    require(query.shape[-1] % 16 == 0 and query.shape[-1] <= 256, "Invalid head_dim")
    require(seq_lens.dtype == torch.uint32 and block_tables.dtype == torch.int32, "lengths are uint32, tables int32")
    require(len(query) == len(seq_lens) == len(block_tables), "one query token a sequence")
    require(workspace_buffer.dtype == torch.uint8 and not workspace_buffer[:SEMAPHORES].any(), "semaphores begin at 0")
    lens = seq_lens.view(torch.int32)
    starts = torch.arange(len(query) + 1)
    require(isinstance(bmm1_scale, float) and isinstance(bmm2_scale, float), "scales are numbers")
    require(sinks is None or sinks.dtype == torch.float32, "sinks are float32")
    made, _ = attend(
        read_flat(query), key, value, read_flat(block_tables), lens, starts, bmm1_scale, window_left=window_left, sinks=sinks
    )
    write_flat(out, made * bmm2_scale)
    return out


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto",
        jit_args=None, jit_kwargs=None,
    ):
        require(kv_layout in ("NHD", "HND") and backend in ("auto", "fa2", "fa3"), "layout or backend")
        self._layout, self._graph, self._backend, self._most_rows = kv_layout, use_cuda_graph, backend, None
        self._buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        if use_cuda_graph:
            if not all(torch.is_tensor(buffer) for buffer in self._buffers):
                raise ValueError("the buffers should be a torch.Tensor in CUDA graph mode")
            if not len(qo_indptr_buf) == len(paged_kv_indptr_buf) == len(paged_kv_last_page_len_buf) + 1:
                raise ValueError("The length of paged_kv_indptr_buf should be batch_size + 1.")

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
        page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None,
        q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None,
        token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None,
        block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
    ):
        held = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        require(all(part.dtype == torch.int32 and part.device.type == "cpu" for part in held), "int32, on the host here")
        require(self._backend != "fa3" or kv_data_type == q_data_type, "fa3 takes fp8 caches with fp8 queries alone")
        require((qo_indptr.diff() >= 0).all() and (paged_kv_indptr.diff() >= 0).all(), "should be non-negative")
        if self._graph:
            self._most_rows = self._most_rows or int(qo_indptr[-1])
            if int(qo_indptr[-1]) > self._most_rows:
                raise ValueError("The total number of rows in qo_indptr in cuda graph mode cannot exceed that of the first")
            if len(qo_indptr) != len(self._buffers[0]):
                raise ValueError("The batch size should be fixed during the lifecycle of the wrapper in cuda graph mode")
            if len(paged_kv_indices) > len(self._buffers[2]):
                raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")
            held = tuple(buffer[: len(part)].copy_(part) for buffer, part in zip(self._buffers, held, strict=True))
        self._held, self._page_size, self._scale, self._causal = held, page_size, sm_scale, causal
        require(pos_encoding_mode == "NONE" and not use_fp16_qk_reduction and custom_mask is None, "another kernel")
        self._masks = {"window_left": window_left, "softcap": logits_soft_cap}
        self._dtypes, self._heads = (q_data_type, kv_data_type or q_data_type), (num_qo_heads, num_kv_heads, head_dim_qk)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
    ):
        key, value = by_token(paged_kv_cache, self._layout)
        starts, indptr, indices, last = self._held
        if (q.dtype, key.dtype) != self._dtypes:
            raise ValueError("the dtypes of q and kv do not match those given to plan")
        require((q.shape[1], *key.shape[2:]) == self._heads and key.shape[1] == self._page_size, "shapes are not as planned")
        if len(q) != int(starts[-1]):
            raise ValueError("q.shape[0] does not match qo_indptr[-1]")
        require(all(one is None or isinstance(one, float) for one in (k_scale, v_scale)), "scales are numbers here")
        require(window_left is None and sinks is None, "as planned, and ignored by fa2 and fa3")
        seq_lens = (indptr.diff() - 1).clamp(min=0) * self._page_size + last
        made, logs = attend(
            q, key, value, tables_of(indptr, indices), seq_lens, starts, self._scale or q.shape[-1] ** -0.5, self._causal,
            **self._masks, k_scale=1.0 if k_scale is None else k_scale,
        )
        out = torch.zeros_like(q) if out is None else out
        require_tensor(out, q.shape, q.dtype, "out")
        write_flat(out, made.to(q.dtype) if v_scale is None else made.to(q.dtype) * v_scale)
        if return_lse:
            lse = torch.empty(q.shape[:2]) if lse is None else lse
            require_tensor(lse, q.shape[:2], torch.float32, "lse")
            write_flat(lse, logs / math.log(2))
            return out, lse
        return out


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    require(all(tensor.is_contiguous() for tensor in (v, s, v_other, s_other)), "must be contiguous")
    require(v.shape == v_other.shape and s.shape == s_other.shape == v.shape[:2], "shapes must be the same")
    whole = torch.maximum(s, s_other)
    mine, other = (s - whole).exp2(), (s_other - whole).exp2()
    share = (mine / (mine + other))[..., None]
    v.copy_(share * v.float() + (1 - share) * v_other.float())
    s.copy_((mine + other).log2() + whole)


class MultiLevelCascadeAttentionWrapper:
    def __init__(
        self, num_levels, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf_arr=None,
        paged_kv_indptr_buf_arr=None, paged_kv_indices_buf_arr=None, paged_kv_last_page_len_buf_arr=None,
    ):
        require(not use_cuda_graph, "not faked")
        made = BatchPrefillWithPagedKVCacheWrapper
        self._wrappers = [made(float_workspace_buffer, kv_layout) for _ in range(num_levels)]

    def plan(
        self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim, page_size, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
        logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
    ):
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for wrapper, *tensors in zip(self._wrappers, *arrays, strict=True):
            wrapper.plan(
                *tensors, num_qo_heads, num_kv_heads, head_dim, page_size, causal=causal and wrapper is self._wrappers[-1],
                pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction, sm_scale=sm_scale,
                window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type,
            )

    def run(self, q, paged_kv_cache):
        out, lse = self._wrappers[-1].run(q, paged_kv_cache, return_lse=True)
        for wrapper in self._wrappers[:-1]:
            merge_state_in_place(out, lse, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return out

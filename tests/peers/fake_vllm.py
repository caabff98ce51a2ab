"""vLLM's operators on a CPU: their schemas, word for word, and their refusals; the answers in torch.

Schemas of vLLM 0.24.0, as its libraries register them: _C_stable_libtorch.abi3.so (torch.ops._C, _C_cache_ops) and
vllm_flash_attn/_vllm_fa3_C.abi3.so. Refusals of csrc/libtorch_stable/attention/paged_attention_v1.cu and _v2.cu,
cache_kernels.cu, and hopper/flash_api.cpp of vllm-project/flash-attention. unified_attention is that of
vllm/v1/attention/ops/triton_unified_attention.py.
"""

from __future__ import annotations

import math

import torch

from tests.peers.attend import attend, read_flat, require, write_flat

SPARSE = (
    "int tp_rank, int blocksparse_local_blocks, int blocksparse_vert_stride, int blocksparse_block_size, "
    "int blocksparse_head_sliding_step"
)
PAGED = (
    "Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, "
    "int block_size, int max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, " + SPARSE
)
WRITE = (
    "(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, str kv_cache_dtype, "
    "Tensor k_scale, Tensor v_scale) -> ()"
)
FORWARD = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, "
    "int window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, "
    "int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)
METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, "
    "int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, "
    "int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) -> Tensor"
)
FORMATS = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
HEAD_SIZES, BLOCK_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256), (8, 16, 32)
PARTITION = 512


def load_library(path):
    """torch.ops.load_library of either file; a library stays loaded."""
    if path.endswith("_C_stable_libtorch.abi3.so"):
        _register("_C", "CUDA kernels", {
            f"paged_attention_v1(Tensor! out, {PAGED}) -> ()": paged_attention_v1,
            f"paged_attention_v2(Tensor! out, Tensor! exp_sums, Tensor! max_logits, Tensor! tmp_out, {PAGED}) -> ()":
                paged_attention_v2,
        })  # fmt: skip
        _register("_C_cache_ops", "cache kernels", {
            "reshape_and_cache" + WRITE: reshape_and_cache, "reshape_and_cache_flash" + WRITE: reshape_and_cache_flash,
        })  # fmt: skip
    elif path.endswith("_vllm_fa3_C.abi3.so"):
        _register("_vllm_fa3_C", "FlashAttention-3", {FORWARD: forward, METADATA: get_scheduler_metadata})
    else:
        raise OSError(f"{path}: cannot open shared object file")


_LOADED = {}


def _register(namespace, key, operators):
    if key in _LOADED:
        return
    _LOADED[key] = library = torch.library.Library(namespace, "FRAGMENT")
    for schema, function in operators.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")


def unpack(key_cache, value_cache):
    """v1's and v2's caches as [num_blocks, block_size, num_kv_heads, head_dim]; strides of blocks are those of K."""
    x = 16 // key_cache.element_size()
    num_blocks, num_heads, chunks, block_size, width = key_cache.shape
    require(width == x and value_cache.shape == (num_blocks, num_heads, chunks * x, block_size), "not packed by 16 bytes")
    require(key_cache.stride()[1:] == torch.empty(key_cache.shape, device="meta").stride()[1:], "read as if without gaps")
    value_cache = value_cache.as_strided(value_cache.shape, (key_cache.stride(0), *value_cache.stride()[1:]))
    return key_cache.permute(0, 3, 1, 2, 4).flatten(3), value_cache.permute(0, 3, 1, 2)


def _paged(out, query, key_cache, value_cache, num_kv_heads, scale, tables, seq_lens, block_size, max_seq_len, alibi_slopes,
           kv_cache_dtype, k_scale, v_scale, *sparse):  # fmt: skip
    require(query.shape[2] in HEAD_SIZES, f"Unsupported head size: {query.shape[2]}")
    require(block_size in BLOCK_SIZES and block_size == key_cache.shape[3], f"Unsupported block size: {block_size}")
    require(kv_cache_dtype in FORMATS and sparse[2] <= 1, "another kernel")
    require((key_cache.dtype == torch.uint8) == (kv_cache_dtype != "auto"), "quantised caches are bytes")
    require(k_scale.shape == v_scale.shape == (1,), "one scale each")
    require(seq_lens.dtype == tables.dtype == torch.int32, "lengths and tables are int32")
    require(int(seq_lens.max()) <= max_seq_len, "scores would lie past the end of shared memory")
    require(len(query) == len(seq_lens) == len(tables) and key_cache.shape[1] == num_kv_heads, "one token a sequence")
    formats = FORMATS[kv_cache_dtype] or key_cache.dtype
    key, value = (part.view(formats) for part in unpack(key_cache, value_cache))
    scales = {"k_scale": float(k_scale), "v_scale": float(v_scale)}
    starts = torch.arange(len(query) + 1)
    made = attend(query, key, value, read_flat(tables), seq_lens, starts, scale, alibi_slopes=alibi_slopes, **scales)
    write_flat(out, made[0])
    return key.float() * scales["k_scale"], value


def paged_attention_v1(out, *arguments):
    _paged(out, *arguments)


def paged_attention_v2(out, exp_sums, max_logits, tmp_out, query, *arguments):
    """Partial sums for the partitions that hold a token; the rest stays as it was."""
    key, _ = _paged(out, query, *arguments)
    _, _, _, scale, tables, seq_lens, _, max_seq_len, alibi_slopes, *_ = arguments
    shape = (len(query), query.shape[1], -(-max_seq_len // PARTITION))
    require(exp_sums.shape == max_logits.shape == shape and tmp_out.shape == (*shape, query.shape[2]), "partials do not fit")
    require(exp_sums.dtype == max_logits.dtype == torch.float32 and tmp_out.dtype == query.dtype, "types of partials")
    for seq, seq_len in enumerate(seq_lens.tolist()):
        tokens = key[tables[seq, : -(-seq_len // key.shape[1])].long()].flatten(0, 1)[:seq_len].float()
        rows = query[seq].float().unflatten(0, (key.shape[2], -1))
        scores = torch.einsum("hgd,thd->hgt", rows, tokens).flatten(0, 1) * scale
        if alibi_slopes is not None:
            scores += alibi_slopes[:, None] * torch.arange(1 - seq_len, 1)
        for partition, part in enumerate(scores.split(PARTITION, dim=1) if seq_len else ()):
            max_logits[seq, :, partition] = part.amax(1)
            exp_sums[seq, :, partition] = (part - part.amax(1, keepdim=True)).exp().sum(1)


def stored(tokens, kv_cache_dtype, scale):
    """Bytes of a quantised cache; else the tokens as they are."""
    dtype = FORMATS[kv_cache_dtype]
    if dtype is None:
        return tokens
    most = torch.finfo(dtype).max
    return (tokens.float() / float(scale)).clamp(-most, most).to(dtype).view(torch.uint8)


def reshape_and_cache(key, value, key_cache, value_cache, slots, kv_cache_dtype, k_scale, v_scale):
    """The first 512 chunks of 16 bytes of a token, and blocks as if without gaps."""
    key, value = stored(key, kv_cache_dtype, k_scale), stored(value, kv_cache_dtype, v_scale)
    x, block_size = key_cache.shape[4], key_cache.shape[3]
    require(key[0].is_contiguous() and key_cache.is_contiguous() and value_cache.is_contiguous(), "read without strides")
    for token, slot in enumerate(slots.tolist()):
        block, offset = slot // block_size, slot % block_size
        for chunk in range(min(key.shape[1] * key.shape[2] // x, 512) if slot >= 0 else 0):
            head, first = divmod(chunk * x, key.shape[2])
            key_cache[block, head, first // x, offset] = key[token, head, first : first + x]
            value_cache[block, head, first : first + x, offset] = value[token, head, first : first + x]


def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, kv_cache_dtype, k_scale, v_scale):
    require(key_cache.stride(0) == value_cache.stride(0), "strides of blocks differ")
    require(slots.dtype == torch.int64 and key_cache.shape[2:] == key.shape[1:], "slots are int64, heads before elements")
    key, value = stored(key, kv_cache_dtype, k_scale), stored(value, kv_cache_dtype, v_scale)
    written = slots >= 0
    place = (slots[written] // key_cache.shape[1], slots[written] % key_cache.shape[1])
    # As integers: torch's scatter of 16-bit floats on a CPU changes the payload of a NaN.
    for cache, tokens in ((key_cache, key), (value_cache, value)):
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
        cache.view(bits).index_put_(place, tokens[written].view(bits))


def metadata_of(batch_size, seqused_k, cu_seqlens_q, masks):
    """Stands for the real one: as long as the batch decides, with what it was made from inside."""
    return torch.cat([seqused_k, cu_seqlens_q, torch.tensor([batch_size, *map(int, masks)], dtype=torch.int32)])


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k, cu_seqlens_q,
    cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, page_size, max_seqlen_k_new, is_causal, window_size_left,
    window_size_right, has_softcap, num_splits, pack_gqa, sm_margin,
):  # fmt: skip
    dtypes = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    require(headdim == headdim_v and qkv_dtype in dtypes and page_size, "another kernel")
    require(seqused_k.shape == (batch_size,) and int(seqused_k.max()) <= max_seqlen_k, "seqused_k must have shape (batch_size)")
    require(is_causal and num_splits == 0, "not what is launched")
    return metadata_of(batch_size, seqused_k, cu_seqlens_q, (window_size_left, window_size_right, has_softcap))


def forward(
    q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale,
    softmax_scale, is_causal, window_size_left, window_size_right, softcap, is_rotary_interleaved, scheduler_metadata,
    num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank, cp_tot_seqused_k,
):  # fmt: skip
    """hopper/flash_api.cpp: what it checks for a paged cache and queries of varied lengths."""
    batch = len(cu_seqlens_q) - 1
    is_fp8 = q.dtype == torch.float8_e4m3fn
    require(q.dtype in (torch.float16, torch.bfloat16) or is_fp8, "FlashAttention only supports fp16, bf16 and fp8_e4m3")
    require(q.dtype == k.dtype == v.dtype, "query and key have the same dtype")
    for descale in (q_descale, k_descale, v_descale):
        require((descale is not None) == is_fp8, "scales are for fp8")
        require(not is_fp8 or descale.shape == (batch, k.shape[2]), "descales must have shape (batch_size, num_heads_k)")
    require(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    require(page_table.dtype == torch.int32 and page_table.stride(-1) == 1 and len(page_table) == batch, "page_table")
    require(cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.is_contiguous(), "cu_seqlens_q must be int32")
    require(seqused_k.dtype == torch.int32 and seqused_k.shape == (batch,), "seqused_k must have shape (batch_size)")
    require(q.shape[2] % 8 == 0 and q.shape[2] <= 256, "head_size should be a multiple of 8, at most 256")
    require(max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k >= int(seqused_k.max()), "capacities are too small")
    require(out.shape == q.shape and out.stride(-1) == 1, "out must have shape (total_q, ...)")
    require(out.dtype == (torch.bfloat16 if is_fp8 else q.dtype), "output must have the same dtype as inputs, bf16 of fp8")
    require(window_size_right == (0 if window_size_left >= 0 else -1) and cp_world_size == 1, "another kernel")
    require(s_aux is None or s_aux.dtype == torch.bfloat16, "sinks are bf16")
    if scheduler_metadata is not None:
        made_for = metadata_of(batch, seqused_k, cu_seqlens_q, (window_size_left, window_size_right, softcap > 0))
        require(torch.equal(scheduler_metadata, made_for), "scheduler_metadata must be that of this batch")
    scales = {} if not is_fp8 else {"k_scale": (q_descale * k_descale)[0][:, None], "v_scale": v_descale[0][:, None]}
    made, logs = attend(
        q, k, v, page_table, seqused_k, cu_seqlens_q, softmax_scale, is_causal, window_left=window_size_left, softcap=softcap,
        **scales,
    )
    out.copy_(made)
    empty = math.inf  # as some releases mark a row without a key
    return [out, logs.masked_fill(logs.isneginf(), empty).T.contiguous(), torch.empty(0), torch.empty(0)]


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table, softcap,
    q_descale, k_descale, v_descale, seq_threshold_3D=None, num_par_softmax_segments=None, softmax_segm_output=None,
    softmax_segm_max=None, softmax_segm_expsum=None, alibi_slopes=None, output_scale=None, qq_bias=None, sinks=None,
    mm_prefix_range=None, use_alibi_sqrt=False, kv_quant_mode=None, k_scale_cache=None, v_scale_cache=None, chunk_lookback=-1,
    use_td=False,
):  # fmt: skip
    """Writes through the segments' buffers where it would cut sequences, so that too small a one shows."""
    require(len(block_table) == len(seqused_k) == len(cu_seqlens_q) - 1 and block_table.dtype == torch.int32, "tables")
    require(max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= int(seqused_k.max()), "capacities")
    require(window_size[1] == (0 if window_size[0] >= 0 else -1), "another kernel")
    scales = [1.0 if descale is None else float(descale) for descale in (k_descale, v_descale)]
    if max_seqlen_q == 1 and len(seqused_k) <= seq_threshold_3D:
        shape = (len(seqused_k), q.shape[1], num_par_softmax_segments)
        for part in (softmax_segm_max, softmax_segm_expsum, softmax_segm_output):
            require(part.dtype == torch.float32 and part[: shape[0]].shape[:3] == shape, "segments do not fit")
        require(softmax_segm_output.shape[3] >= q.shape[2], "segments do not hold a head")
    out.copy_(attend(
        q, k, v, block_table, seqused_k, cu_seqlens_q, softmax_scale, causal, window_left=window_size[0], softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, k_scale=scales[0], v_scale=scales[1],
    )[0])  # fmt: skip

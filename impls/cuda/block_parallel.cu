// block_parallel.cu -- paged attention, one CTA per (query token, KV head): warps take different blocks of the sequence.
//
//   out[i,h,:] = sum_t softmax_t(scale * query[i,h,:] . key[t,g,:]) * value[t,g,:],   g = h / kGroup
//
// Tensors      innermost dimension last
//   query, out              [num_tokens, num_q_heads, kHeadDim], tokens strided      Scalar, 16-byte aligned
//   lse                     [num_tokens, num_q_heads]                                float, natural logarithm
//   key_cache, value_cache  by kLayout, blocks strided                               Scalar, 16-byte aligned
//   block_tables            [num_seqs, table_stride]                                 int32 block ids
//   query_start_loc         [num_seqs + 1]                                           int32
//   seq_lens                [num_seqs]                                               int32 tokens; 0 gives out = 0, lse = -inf
// Work         grid (num_tokens * num_kv_heads * kParts), block kWarps * 32 threads; see group.cuh, rows.cuh
// Reads        no table entry past the last block, no slot past the visible tokens; K and V once for kHeads query heads.
// Sums         in float.

#include "group.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) block_parallel(
    Scalar* out, float* lse, const Scalar* query, const Scalar* key_cache, const Scalar* value_cache,
    const int* block_tables, const int* query_start_loc, const int* seq_lens,
    int num_seqs, int num_q_heads, int num_kv_heads,
    long long table_stride, long long query_stride, long long out_stride, long long key_stride, long long value_stride,
    float scale) {
    Shared& shared = shared_memory();
    const int token = blockIdx.x / (num_kv_heads * kParts), kv_part = blockIdx.x % (num_kv_heads * kParts);
    const int kv_head = kv_part / kParts, part = kv_part % kParts;
    const int q_head = kv_head * kGroup + part * kHeads;  // first of the CTA's
    const int num_heads = min(kHeads, kGroup - part * kHeads);

    const Visible visible = find_visible(token, query_start_loc, seq_lens, num_seqs);
    attend(
        shared, query + token * query_stride + q_head * kHeadDim, num_heads, key_cache, value_cache,
        {key_stride, num_kv_heads, kv_head}, {value_stride, num_kv_heads, kv_head},
        block_tables + visible.seq * table_stride, 0, visible.num_tokens, scale);
    write_out(
        out + token * out_stride + q_head * kHeadDim, lse + (long long)token * num_q_heads + q_head, shared, num_heads);
}

// prefill.cu -- paged attention of many query tokens: warpgroups that multiply, and one that copies. sm_90a.
//
//   out[i,h,:] = sum_t softmax_t(scale * query[i,h,:] . key[t,g,:]) * value[t,g,:],   g = h / kGroup
//   token i of a sequence with q_len query tokens sees keys t <= seq_len - q_len + i
//
// Tensors      innermost dimension last
//   query, out              [num_tokens, num_q_heads, kHeadDim], tokens strided      Scalar, 16-byte aligned
//   lse                     [num_tokens, num_q_heads]                                float, natural logarithm
//   key_cache, value_cache  by kLayout, blocks strided                               Scalar, 16-byte aligned
//   block_tables            [num_seqs, table_stride]                                 int32 block ids
//   query_start_loc         [num_seqs + 1]                                           int32
//   seq_lens                [num_seqs]                                               int32 tokens; 0 gives out = 0, lse = -inf
//   counters                [2]                                                      int32 items drawn, CTAs done; 0 after a launch
// Work         a CTA an SM, block (kWarpgroups + 1) * 128 threads
//   CTA            an item at a time: kRows packed rows of one KV head of one sequence, dealt in deal.cuh
//   warpgroup 0    copies queries, keys and values to shared memory, a ring of kStages for either: stages.cuh
//   the others     64 rows each, over tiles of kTile tokens: warpgroup.cuh
// Reads        no table entry past the last block, no slot past seq_lens[s].
// Sums         in float; weights are rounded to Scalar for the second product.

#include "deal.cuh"
#include "roles.cuh"

// Write a warpgroup's rows of an item.
__device__ __forceinline__ void write(
    const Rows& rows, const Item& item, int row, int lane, Scalar* out, float* lse, long long out_stride, int num_q_heads) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float total = rows.whole_total(r);
        const int packed = row + 8 * r;
        if (packed >= item.num_rows()) continue;
        const long long token = item.first_query + packed / kGroup;
        const int head = item.kv_head * kGroup + packed % kGroup;
        const float factor = total == 0 ? 0.0f : 1.0f / total;
        if (lane % 4 == 0) {
            lse[token * num_q_heads + head] = total == 0 ? -CUDART_INF_F : fmaf(rows.most[r], rows.scale, log2f(total)) * kLn2;
        }
        rows.write(r, lane, factor, out + token * out_stride + head * kHeadDim);
    }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, 1) prefill(
    Scalar* out, float* lse, const Scalar* query, const Scalar* key_cache, const Scalar* value_cache,
    const int* block_tables, const int* query_start_loc, const int* seq_lens,
    int num_seqs, int num_q_heads, int num_kv_heads,
    long long table_stride, long long query_stride, long long out_stride, long long key_stride, long long value_stride,
    float scale, int* counters) {
    extern __shared__ __align__(1024) unsigned char memory[];    // sized by prefill.py
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = __shfl_sync(kAll, threadIdx.x / 32, 0), lane = threadIdx.x % 32, warpgroup = warp / 4 - 1;
    if (threadIdx.x == 0) initialise(shared);
    __syncthreads();

    if (warpgroup < 0) {
        const Tables tables{
            query, key_cache, value_cache, block_tables, table_stride, query_stride, key_stride, value_stride, num_kv_heads};
        copy_items<Deal>(
            shared, Copier(shared, tables, threadIdx.x, lane), counters, warp, query_start_loc, seq_lens, num_seqs, num_kv_heads,
            lane);
    } else {
        multiply_items(shared, scale, warpgroup, warp, lane, [&](const Rows& rows, const Item& item, int row) {
            write(rows, item, row, lane, out, lse, out_stride, num_q_heads);
        });
    }
}

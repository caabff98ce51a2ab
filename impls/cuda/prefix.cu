// prefix.cu -- what sequences have in common, attended to by warpgroups as in prefill.cu; the first of two launches. sm_90a.
//
//   most[p,h] >= about max_t a, total[p,h] = sum_t 2^(a - most), sums[p,h,:] = sum_t 2^(a - most) * value[t,g,:]
//   a = log2(e) * scale * query[i,h,:] . key[t,g,:],   g = h / kGroup,   t: the piece's tokens, p: its place for query token i
//
// Tensors      innermost dimension last; out and lse are not touched
//   query                   [num_tokens, num_q_heads, kHeadDim], tokens strided      Scalar, 16-byte aligned
//   key_cache, value_cache  by kLayout, blocks strided                               Scalar, 16-byte aligned
//   block_tables            [num_seqs, table_stride]                                 int32 block ids
//   places, ends            [num_pieces + 1], [num_pieces]                           int32; see pieces.cuh
//   prefix                  what the pieces are, and their sums: prefix.cuh
//   counters                [2]                                                      int32 items drawn, CTAs done; 0 after a launch
// Work         a CTA an SM, block (kWarpgroups + 1) * 128 threads; its roles are in roles.cuh
//   CTA            an item at a time: a piece for one KV head
// Reads        no table entry, and no slot, but of the pieces' tokens.
// Sums         in float; weights are rounded to Scalar for the second product.

#include "early.cuh"
#include "pieces.cuh"
#include "roles.cuh"

// Leave a warpgroup's rows of an item.
__device__ __forceinline__ void leave(
    const Rows& rows, const Item& item, int row, int lane, const Prefix& prefix, int num_q_heads) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float total = rows.whole_total(r);
        const int packed = row + 8 * r;
        if (packed >= item.num_rows()) continue;
        const long long place = item.first_place + packed / kGroup;
        const long long to = place * num_q_heads + item.kv_head * kGroup + packed % kGroup;
        if (lane % 4 == 0) prefix.stats[to] = make_float2(rows.whole_most(r), total);
        rows.store(r, lane, prefix.sums + to * (kHeadDim / 4));
    }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, 1) prefix_pieces(
    Scalar*, float*, const Scalar* query, const Scalar* key_cache, const Scalar* value_cache,
    const int* block_tables, const int* places, const int* ends,
    int num_pieces, int num_q_heads, int num_kv_heads,
    long long table_stride, long long query_stride, long long, long long key_stride, long long value_stride,
    float scale LAYER_PARAMETER, const Prefix prefix, int* counters) {
    extern __shared__ __align__(1024) unsigned char memory[];    // sized by prefill.py
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = __shfl_sync(kAll, threadIdx.x / 32, 0), lane = threadIdx.x % 32, warpgroup = warp / 4 - 1;
    if (threadIdx.x == 0) initialise(shared);
    let_next_begin();
    __syncthreads();

    if (warpgroup < 0) {
        const Tables tables{
            query, key_cache, value_cache, block_tables, table_stride, query_stride, key_stride, value_stride, num_kv_heads};
        copy_items<Pieces>(
            shared, Copier(shared, tables, threadIdx.x, lane), counters, warp, places, ends, num_pieces, num_kv_heads, lane, prefix);
    } else {
        multiply_items(shared, scale, warpgroup, warp, lane, [&](const Rows& rows, const Item& item, int row) {
            leave(rows, item, row, lane, prefix, num_q_heads);
        });
    }
}

// per_token.cu -- paged attention, one CTA per (query token, query head): the plainest kernel that is right.
//
//   out[i,h,:] = sum_t softmax_t(scale * query[i,h,:] . key[t,g,:]) * value[t,g,:],   g = h / kGroup
//
// and with it, where the build asks: softcap, then ALiBi, then the window, sinks in the sum, caches in fp8.
//
// Tensors      innermost dimension last
//   query, out              [num_tokens, num_q_heads, kHeadDim], tokens strided      Scalar
//   lse                     [num_tokens, num_q_heads]                                float, natural logarithm
//   key_cache, value_cache  by kLayout, blocks strided                               Cache
//   block_tables            [num_seqs, table_stride]                                 int32 block ids
//   query_start_loc         [num_seqs + 1]                                           int32
//   seq_lens                [num_seqs]                                               int32 tokens; 0 gives out = 0, lse = -inf
//   layer                   see paged.cuh
// Work         grid (num_tokens, num_q_heads), block 32 threads
//   warp           the query head's tokens in order, online softmax in registers
//   lane           elements lane, lane + 32, ... of the head
// Reads        no table entry past the last block, no slot past the visible tokens.
// Sums         in float.

#include "paged.cuh"

constexpr int kLanes = 32;
constexpr int kPerLane = (kHeadDim + kLanes - 1) / kLanes;
static_assert(kHeadDim <= 512, "PA_HEAD_DIM must be at most 512: query and sums live in registers");

__device__ float warp_sum(float x) {
    for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

extern "C" __global__ void __launch_bounds__(kLanes) per_token(
    Scalar* out, float* lse, const Scalar* query, const Cache* key_cache, const Cache* value_cache,
    const int* block_tables, const int* query_start_loc, const int* seq_lens,
    int num_seqs, int num_q_heads, int num_kv_heads,
    long long table_stride, long long query_stride, long long out_stride, long long key_stride, long long value_stride,
    float scale LAYER_PARAMETER) {
    const int token = blockIdx.x, q_head = blockIdx.y, lane = threadIdx.x;
    const Visible visible = find_visible(token, query_start_loc, seq_lens, num_seqs);
    const int* table = block_tables + visible.seq * table_stride;
    const KvHead key_head = {key_stride, num_kv_heads, q_head / kGroup};
    const KvHead value_head = {value_stride, num_kv_heads, q_head / kGroup};

    float q[kPerLane] = {}, sum[kPerLane] = {};
    for (int i = 0; i < kPerLane; ++i) {
        const int dim = i * kLanes + lane;
        if (dim < kHeadDim) q[i] = to_float(query[token * query_stride + q_head * kHeadDim + dim]);
    }

    float v_scale = 1.0f;
    if constexpr (kQuantised) {
        const int head = kHeadScales ? q_head / kGroup : 0;
        scale *= layer.k_scale[head], v_scale = layer.v_scale[head];
    }

    float most = -CUDART_INF_F, total = 0.0f;  // running maximum of the scores, sum of exp(score - most)
    if constexpr (kSinks) most = layer.sinks[q_head], total = 1.0f;  // the score of a key without a value
#pragma unroll 4
    for (int t = visible.first(layer); t < visible.num_tokens; ++t) {
        const int block = table[t / kBlockSize], slot = t % kBlockSize;
        float k[kPerLane] = {}, v[kPerLane] = {}, dot = 0.0f;
        for (int i = 0; i < kPerLane; ++i) {
            const int dim = i * kLanes + lane;
            if (dim >= kHeadDim) continue;
            k[i] = to_float(key_cache[key_head.key(block, slot, dim)]);
            v[i] = to_float(value_cache[value_head.value(block, slot, dim)]);
        }
        for (int i = 0; i < kPerLane; ++i) dot += q[i] * k[i];
        float score = warp_sum(dot) * scale;
        if constexpr (kSoftcap) score = layer.softcap * tanhf(score / layer.softcap);
        if constexpr (kAlibi) score += layer.alibi_slopes[q_head] * (t - (visible.num_tokens - 1));

        const float larger = fmaxf(most, score);
        const float base = larger == -CUDART_INF_F ? 0.0f : larger;  // exp(-inf - -inf) would be NaN
        const float keep = exp2f((most - base) * kLog2e), weight = exp2f((score - base) * kLog2e);
        total = total * keep + weight;
        for (int i = 0; i < kPerLane; ++i) sum[i] = sum[i] * keep + weight * v[i];
        most = larger;
    }

    const float inverse = total == 0.0f ? 0.0f : v_scale / total;  // no visible key: out = 0
    for (int i = 0; i < kPerLane; ++i) {
        const int dim = i * kLanes + lane;
        if (dim < kHeadDim) from_float(out[token * out_stride + q_head * kHeadDim + dim], sum[i] * inverse);
    }
    if (lane == 0) lse[(long long)token * num_q_heads + q_head] = total == 0.0f ? -CUDART_INF_F : most + logf(total);
}

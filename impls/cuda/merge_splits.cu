// merge_splits.cu -- merge what split_kv left of the rows that it cut in more than one split.
//
//   out = sum_s exp2(most_s - most) * sums_s / sum_s exp2(most_s - most) * total_s,   most = max_s most_s
//
// Tensors      innermost dimension last
//   out                     [num_tokens, num_q_heads, kHeadDim], tokens strided      Scalar
//   lse                     [num_tokens, num_q_heads]                                float, natural logarithm
//   split_sums              [num_tokens, num_q_heads, num_splits, kHeadDim]          float, 16-byte aligned
//   split_stats             [num_tokens, num_q_heads, num_splits]                    (most, total) of a split, most in log2
//   query_start_loc, seq_lens                                                        int32, as split_kv's
// Work         grid (num_tokens * num_q_heads), block kThreads threads
//   thread         first one split's weight, then four elements of every kTeams-th split
// Reads        no split past the row's last.
// Sums         in float.

#include "paged.cuh"
#include "splits.cuh"

constexpr int kThreads = PA_THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kQuads = kHeadDim / 4;          // threads that together take one split's row
constexpr int kTeams = kThreads / kQuads;     // splits taken at a time
static_assert(kHeadDim % 4 == 0 && kTeams >= 1, "PA_HEAD_DIM must be a multiple of 4, and at most 4 PA_THREADS");

struct Sum { __device__ float operator()(float a, float b) const { return a + b; } };
struct Max { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };

// Fold one value a thread over the CTA; all threads get the result.
template <typename Fold>
__device__ float fold(float* by_warp, float x, Fold with) {
    for (int offset = 16; offset > 0; offset /= 2) x = with(x, __shfl_xor_sync(0xffffffffu, x, offset));
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = by_warp[0];
    for (int w = 1; w < kWarps; ++w) x = with(x, by_warp[w]);
    return x;
}

extern "C" __global__ void __launch_bounds__(kThreads) merge_splits(
    Scalar* out, float* lse, const float* split_sums, const float2* split_stats,
    const int* query_start_loc, const int* seq_lens,
    int num_seqs, int num_q_heads, int num_splits, int min_split, long long out_stride) {
    __shared__ float weights[kThreads], most_by_warp[kWarps], total_by_warp[kWarps];
    __shared__ float4 sums[kThreads];
    const int token = blockIdx.x / num_q_heads, q_head = blockIdx.x % num_q_heads, thread = threadIdx.x;
    const int count = cut(find_visible(token, query_start_loc, seq_lens, num_seqs).num_tokens, num_splits, min_split).count;
    if (count == 1) return;  // finished by split_kv

    const long long row = blockIdx.x;
    const float2 stats = thread < count ? split_stats[row * num_splits + thread] : make_float2(-CUDART_INF_F, 0.0f);
    const float most = fold(most_by_warp, stats.x, Max());
    const float weight = exp2f(stats.x - (most == -CUDART_INF_F ? 0.0f : most));  // exp2(-inf - -inf) would be NaN
    weights[thread] = weight;
    const float total = fold(total_by_warp, stats.y * weight, Sum());

    const int team = thread / kQuads, quad = thread % kQuads;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (team < kTeams) {
        const float4* from = reinterpret_cast<const float4*>(split_sums + row * num_splits * kHeadDim) + quad;
#pragma unroll 8
        for (int split = team; split < count; split += kTeams) {
            const float4 x = from[split * kQuads];
            const float w = weights[split];
            sum.x += w * x.x, sum.y += w * x.y, sum.z += w * x.z, sum.w += w * x.w;
        }
    }
    sums[thread] = sum;
    __syncthreads();
    if (team != 0) return;
    for (int t = 1; t < kTeams; ++t) {
        const float4 x = sums[t * kQuads + quad];
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    Scalar* to = out + token * out_stride + q_head * kHeadDim + quad * 4;
    from_float(to[0], sum.x * inverse), from_float(to[1], sum.y * inverse);
    from_float(to[2], sum.z * inverse), from_float(to[3], sum.w * inverse);
    if (thread == 0) lse[row] = total == 0.0f ? -CUDART_INF_F : most * kLn2 + logf(total);
}

// paged.cuh -- where a token's key and value lie, and which keys a query token sees. Shared by all attention kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

enum Layout { HND, NHD, X_PACKED, HND_SWIZZLED };  // KV_NHD is NHD with twice the block stride

// Specialised by attention.py. What a build does not ask for is not defined, and costs nothing.
using Scalar = PA_SCALAR;                 // of query and out, and of caches that are not quantised
constexpr Layout kLayout = PA_LAYOUT;
constexpr int kHeadDim = PA_HEAD_DIM;     // elements
constexpr int kBlockSize = PA_BLOCK_SIZE; // tokens
constexpr int kGroup = PA_GROUP;          // query heads that read one KV head


#ifdef PA_CACHE_SCALAR
#include <cuda_fp8.h>
using Cache = PA_CACHE_SCALAR;            // of key_cache and value_cache
constexpr bool kQuantised = true;         // key = float(cache) * k_scale
constexpr bool kHeadScales = PA_HEAD_SCALES;  // one scale a KV head, else one for all
#else
using Cache = Scalar;
constexpr bool kQuantised = false, kHeadScales = false;
#endif
#ifdef PA_WINDOW
constexpr bool kWindow = true;
#else
constexpr bool kWindow = false;
#endif
#ifdef PA_SOFTCAP
constexpr bool kSoftcap = true;
#else
constexpr bool kSoftcap = false;
#endif
#ifdef PA_ALIBI
constexpr bool kAlibi = true;
#else
constexpr bool kAlibi = false;
#endif
#ifdef PA_SINKS
constexpr bool kSinks = true;
#else
constexpr bool kSinks = false;
#endif

// What a layer adds; null and 0 where the build does not ask for it. A kernel built for features takes it as its last
// parameter, written LAYER_PARAMETER; the others see this one, which nothing reads.
struct Layer {
    const float* alibi_slopes;  // [num_q_heads]
    const float* sinks;         // [num_q_heads]
    const float* k_scale;       // [num_kv_heads] or [1]
    const float* v_scale;
    int window;     // keys that a token sees at most, its own included
    float softcap;
};
#ifdef PA_LAYER
#define LAYER_PARAMETER , const Layer layer
#else
#define LAYER_PARAMETER
constexpr Layer layer = {};
#endif

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

#ifdef PA_CACHE_SCALAR
__device__ inline float to_float(Cache x) { return float(x); }
#endif

__device__ inline void from_float(float& to, float x) { to = x; }
__device__ inline void from_float(__half& to, float x) { to = __float2half_rn(x); }
__device__ inline void from_float(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }

// A cache as one KV head sees it. Element offsets are 64-bit: a pool may hold more than 2^31 elements.
struct KvHead {
    long long block_stride;  // elements from a block to the next
    int num_kv_heads;
    int head;

    // Element `dim` of the key, and of the value, in `slot` of `block`.
    __device__ long long key(int block, int slot, int dim) const {
        if constexpr (kLayout == X_PACKED) {  // [num_kv_heads, kHeadDim / kX, kBlockSize, kX]
            constexpr int kX = 16 / sizeof(Cache);
            const long long column = (long long)head * (kHeadDim / kX) + dim / kX;
            return block * block_stride + (column * kBlockSize + slot) * kX + dim % kX;
        }
        return row(block, slot) + dim;
    }
    __device__ long long value(int block, int slot, int dim) const {
        if constexpr (kLayout == X_PACKED) {  // [num_kv_heads, kHeadDim, kBlockSize]
            return block * block_stride + ((long long)head * kHeadDim + dim) * kBlockSize + slot;
        }
        return row(block, slot) + dim;
    }
    // Element 0 of a token's row, in the layouts where it is contiguous.
    __device__ long long row(int block, int slot) const {
        if constexpr (kLayout != NHD) {  // HND_SWIZZLED moves chunks inside a row
            return block * block_stride + ((long long)head * kBlockSize + slot) * kHeadDim;
        } else {
            return block * block_stride + ((long long)slot * num_kv_heads + head) * kHeadDim;
        }
    }
    // Elements from a row to that of the next token in the same block.
    __device__ long long row_stride() const { return kLayout != NHD ? kHeadDim : (long long)num_kv_heads * kHeadDim; }
};

struct Visible {
    int seq;         // sequence of the query token
    int num_tokens;  // keys that it sees: tokens 0 .. num_tokens - 1; may be 0

    // The first key that it sees, with a window.
    __device__ int first(const Layer& layer) const { return kWindow ? max(num_tokens - layer.window, 0) : 0; }
};

// Find the sequence that query token `token` belongs to: the last one that starts at or before it (some have no queries).
__device__ inline Visible find_visible(int token, const int* query_start_loc, const int* seq_lens, int num_seqs) {
    int seq = token;  // decode: one query token a sequence, found without a search
    if (token >= num_seqs || query_start_loc[token] != token || query_start_loc[token + 1] != token + 1) {
        seq = 0;
        for (int past = num_seqs; past - seq > 1;) {
            const int middle = (seq + past) / 2;
            if (query_start_loc[middle] <= token) seq = middle; else past = middle;
        }
    }
    const int begin = query_start_loc[seq], end = query_start_loc[seq + 1], seq_len = seq_lens[seq];
    if (token >= end) return {seq, 0};  // padding after the last sequence's queries
    const int num_tokens = seq_len - (end - begin) + (token - begin) + 1;
    return {seq, max(0, min(num_tokens, seq_len))};
}

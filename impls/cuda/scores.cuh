// scores.cuh -- what scores are before they are weights: scaled, capped, biased by distance, and -inf where a row sees no key.
//
//   softcap    a = cap * tanh(score / cap), by an exponential that may overflow: cap * (1 - 2 / (1 + exp(2 * score / cap)))
//   alibi      a + slope * (t - p) for token t seen by the query token at p
//   sees       p - kWindowTokens < t <= p
//
// Scores are in units of log2.
#pragma once

#include "fast.cuh"
#include "query.cuh"

// Specialised by tensor_core.py.
constexpr float kCap = PA_CAP;    // 0 without kSoftcap

constexpr bool kTransformed = kSoftcap || kAlibi;

__device__ inline float cache_scale(const float* scales, int kv_head) {
    if constexpr (kQuantised) return __ldg(scales + (kHeadScales ? kv_head : 0)) * kUnit;
    else return 1.0f;
}

// What scores are multiplied by, in all rows; a sign is the query's.
__device__ inline float scale_of(float scale, const Layer& layer, int kv_head) {
    const float unit = kSoftcap ? 2.0f * kLog2e / kCap : kLog2e;
    return fabsf(scale) * unit * cache_scale(layer.k_scale, kv_head);
}

// Of a lane's rows: lane % 4 * 2 and the next of each 8.
struct Scoring {
    const int lane;
    int first_row;                                // the warp's first, among the KV head's
    int num_tokens, num_queries;                  // of the sequence
    const float* units;                           // of the warp's rows, where they lie in shared memory
    float scale[kRescaled && kInRegisters ? kColumns : 1][2];    // set by the accumulator: to units of log2, or of softcap
    float slope[kAlibi ? kColumns : 1][2];

    // The warp's rows begin with `first_row` of the KV head's; none exists from `past_row` on. `q_head` is its first query head.
    __device__ Scoring(const Layer& layer, int lane, int first_row, int past_row, const Sequence& sequence, int q_head)
        : lane(lane), first_row(first_row), num_tokens(sequence.num_tokens),
          num_queries(kRole == SHARED ? 1 : sequence.num_queries()) {    // all rows see all of a run
        if constexpr (kAlibi) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = first_row + c * 8 + lane % 4 * 2 + h;
                    slope[c][h] = row < past_row ? __ldg(layer.alibi_slopes + q_head + row % kGroup) * kLog2e : 0.0f;
                }
            }
        }
    }

    __device__ int query_of(int c, int h) const {    // which of the sequence's query tokens the row is
        if constexpr (kQueries == 1 || kRole == SHARED) return 0;
        else return min((first_row + c * 8 + lane % 4 * 2 + h) / kGroup, num_queries - 1);
    }
    __device__ float scale_of(int c, int h) const {
        if constexpr (!kRescaled) return scale[0][0];
        else if constexpr (kInRegisters) return scale[c][h];
        else return scale[0][0] * units[c * 8 + lane % 4 * 2 + h];
    }

    __device__ int first_position() const { return num_tokens - num_queries; }    // of the query tokens

    // Whether some row does not see all of the tile's tokens.
    __device__ bool hides(int first_token) const {
        return first_token + kTile > first_position() + 1 || (kWindow && first_token < num_tokens - kWindowTokens);
    }
    // Whether any row may see the token; those that none may are not in shared memory.
    __device__ bool holds(int token) const {
        return token < num_tokens && (!kWindow || token > first_position() - kWindowTokens);
    }

    // Products of 16 tokens from `first_token` on and 8 rows to what `most` is compared with, but for a scale.
    __device__ void transform(int c, float (&scores)[4], int first_token) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int h = i % 2;
            if constexpr (kSoftcap) {
                const float inverse = inverse_fast(1.0f + exp2_fast(scores[i] * scale_of(c, h)));
                scores[i] = fmaf(-2.0f * kCap * kLog2e, inverse, kCap * kLog2e);
            } else if constexpr (kAlibi) {
                scores[i] *= scale_of(c, h);
            }
            if constexpr (kAlibi) {
                const int distance = first_token + lane / 4 + i / 2 * 8 - first_position() - query_of(c, h);
                scores[i] = fmaf(slope[c][h], (float)distance, scores[i]);
            }
        }
    }

    __device__ void hide(int c, float (&scores)[4], int first_token) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = first_token + lane / 4 + i / 2 * 8, position = first_position() + query_of(c, i % 2);
            const bool seen = token <= position && (!kWindow || token > position - kWindowTokens);
            if (!seen) scores[i] = -CUDART_INF_F;
        }
    }
};

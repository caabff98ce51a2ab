// left.cuh -- what pieces left of a sequence (prefix.cuh), added to what is its own.
#pragma once

#include "partials.cuh"
#include "prefix.cuh"

constexpr int kPieces = 8;    // added at a time: each turn costs a trip to L2

struct Left {
    int begin = 0, past = 0;    // the sequence's part of prefix.left

    __device__ Left() {}
    __device__ Left(const Prefix& prefix, int seq, const Sequence& sequence) {
        if (kRole != OWN || sequence.first() == 0) return;
        begin = __ldg(prefix.lists + seq), past = __ldg(prefix.lists + seq + 1);
    }

    // Of query token `query` of the sequence.
    __device__ void add_to(Merged& merged, const Prefix& prefix, int query, int num_q_heads, int head, int quad) const {
        for (int first = begin; first < past; first += kPieces) {
            int places[kPieces];
            float4 sums[kPieces];
            float2 stats[kPieces];
            float most = -CUDART_INF_F;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) places[i] = first + i < past ? __ldg(prefix.left + first + i) : 0;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), stats[i] = make_float2(-CUDART_INF_F, 0.0f);
                if (first + i >= past) continue;
                const long long place = (long long)(places[i] + query) * num_q_heads + head;
                sums[i] = __ldcg(prefix.sums + place * kQuads + quad), stats[i] = __ldcg(prefix.stats + place);
            }
#pragma unroll
            for (int i = 0; i < kPieces; ++i) most = fmaxf(most, stats[i].x);
            merged.rise(most);
#pragma unroll
            for (int i = 0; i < kPieces; ++i) merged.add(stats[i], sums[i]);
        }
    }
};

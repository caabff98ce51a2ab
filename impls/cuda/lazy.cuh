// lazy.cuh -- a warp's attention of kWarpRows query rows, in registers, a tile of K and V at a time.
//
// Scores, weights and sums are transposed: query rows are the columns of the MMA. A lane holds rows 2 * (lane % 4) and the next
// of each 8, of tokens (or elements) lane / 4 and 8 further on.
//
// Weights are relative to about the maximum of the scores: it is raised where a weight would exceed 2^kHighest, which after the
// first tile few do. So nothing is exchanged between lanes, and nothing rescaled, in nearly all tiles.
#pragma once

#include "operands.cuh"
#include "partials.cuh"

constexpr int kFragments = kTile / 16;               // of a tile
constexpr float kHighest = 15.0f;                    // log2 of a weight: f16 ends at 16
constexpr float kRaised = kIsF16<Factor> ? 8.0f : 0.0f;    // of the largest once it is raised: f16 begins at -24
constexpr float kNone = -1e30f;                      // instead of a maximum of no score: -inf less -inf is NaN

struct LazyAccumulator {
    const int lane;
    Scoring scoring;
    unsigned words[kInRegisters ? kColumns : 1][kSteps][2];    // B of the first product
    float sums[kColumns][kSteps][4] = {};                      // C of the second
    float most[kColumns][2];                                   // by row; the same in all lanes of it
    float total[kColumns][2] = {};                             // by row; of this lane's tokens
    const Queries* queries;                                    // where registers do not hold them
    int first_of_queries;

    // Rows `before` and after of a part, of which `num_rows` exist and which begins with the KV head's `first_row`; `query` is of
    // the KV head's first query head. `scale` is common to all rows, `sign` has that of the scores.
    __device__ LazyAccumulator(
        const Scalar* query, const Tokens& tokens, int first_row, int before, int num_rows, long long query_stride,
        const Queries* queries, float sign, float scale, const Scoring& scoring, int lane)
        : lane(lane), scoring(scoring), queries(queries), first_of_queries(before) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            float unit = 1.0f;
            if constexpr (kInRegisters) {
                const int row = before + c * 8 + lane / 4;
                const bool exists = row < num_rows;
                const Quarter quarter(query + row_offset(tokens, exists ? first_row + row : 0, query_stride), exists, sign, lane);
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    words[c][step][0] = quarter.words[step][0], words[c][step][1] = quarter.words[step][1];
                }
                unit = quarter.unit;
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                most[c][h] = kNone;
                if constexpr (kRescaled && kInRegisters) {
                    this->scoring.scale[c][h] = scale * __shfl_sync(0xffffffffu, unit, (lane % 4 * 2 + h) * 4);
                }
            }
        }
        if constexpr (!kRescaled || !kInRegisters) this->scoring.scale[0][0] = scale;
        if constexpr (!kInRegisters) this->scoring.units = queries->units + before;
    }

    // Attend to a tile whose first token is `first_token`; of its tokens at least one exists.
    __device__ void add(const unsigned char* stage, int first_token) {
        float scores[kFragments][kColumns][4] = {};
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            unsigned a[kFragments][2][4];
#pragma unroll
            for (int f = 0; f < kFragments; ++f) load_keys(a[f], row(stage, f * 16 + lane % 16, first_token), pair, lane / 16);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                unsigned b[4] = {};
                load_query(b, c, pair);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    if (2 * pair + s == kSteps) break;
                    const unsigned its[2] = {b[2 * s], b[2 * s + 1]};
#pragma unroll
                    for (int f = 0; f < kFragments; ++f) multiply_add(scores[f][c], a[f][s], its);
                }
            }
        }
        const bool hides = scoring.hides(first_token);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                if constexpr (kTransformed) scoring.transform(c, scores[f][c], first_token + f * 16);
                if (hides) scoring.hide(c, scores[f][c], first_token + f * 16);
            }
        }
        unsigned weights[kFragments][kColumns][2];    // B of the second product
        to_weights(scores, weights);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
            Held held;
            if (hides) held = {scoring, first_token + f * 16 + lane % 4 * 2};
            const Row values = row(stage + kTileBytes, f * 16 + lane % 8 + lane / 16 * 8, first_token);
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                unsigned a[2][4];
                load_values(a, values, pair, lane / 8 % 2, held);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    if (2 * pair + s == kSteps) break;
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) multiply_add(sums[c][2 * pair + s], a[s], weights[f][c]);
                }
            }
        }
    }

    // Store the warp's partials: rows kSlice * slice and the kSlice - 1 after it.
    __device__ void leave(Partials& to, int slice, float value_scale) {
#pragma unroll
        for (int i = 0; i < (kSlice + 7) / 8; ++i) {
            const int c = slice * (kSlice / 8) + i;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int head = i * 8 + lane % 4 * 2 + h;
                for (int offset = 4; offset < 32; offset *= 2) total[c][h] += __shfl_xor_sync(0xffffffffu, total[c][h], offset);
                if (head >= kSlice) continue;
                if (lane / 4 == 0) to.stats[head] = make_float2(most[c][h], total[c][h]);
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    if constexpr (kQuantised) {    // rows of the MMA are elements 0, 2, 4, ... 14, then 1, 3, 5, ... 15
                        *reinterpret_cast<float2*>(&to.sums[head][step * 16 + lane / 4 * 2]) =
                            make_float2(sums[c][step][h] * value_scale, sums[c][step][2 + h] * value_scale);
                    } else {
                        to.sums[head][step * 16 + lane / 4] = sums[c][step][h];
                        to.sums[head][step * 16 + 8 + lane / 4] = sums[c][step][2 + h];
                    }
                }
            }
        }
    }

    __device__ static Row row(const unsigned char* tile, int row, int first_token) {
        const int slot = kByRow ? row : (first_token + row) % kBlockSize;
        return {shared_address(tile + row * kPitch), slot % 8};
    }

    // B of the first product for steps 2 * pair and the next.
    __device__ void load_query(unsigned (&b)[4], int c, int pair) const {
        if constexpr (!kInRegisters) {
            queries->load(b, first_of_queries + c * 8, pair, lane);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (2 * pair + i / 2 < kSteps) b[i] = words[c][2 * pair + i / 2][i % 2];
            }
        }
    }

    __device__ float scale_of(int c, int h) const { return kTransformed ? 1.0f : scoring.scale_of(c, h); }

    __device__ void to_weights(
        const float (&scores)[kFragments][kColumns][4], unsigned (&weights)[kFragments][kColumns][2]) {
        bool exceeds = false;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                exceeds |= fmaf(largest(scores, c, h), scale_of(c, h), -most[c][h]) > kHighest;
            }
        }
        if (__any_sync(0xffffffffu, exceeds)) raise(scores);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                float weight[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    weight[i] = exp2_fast(fmaf(scores[f][c][i], scale_of(c, i % 2), -most[c][i % 2]));
                    total[c][i % 2] += weight[i];
                }
                weights[f][c][0] = transpose(pack(weight[0], weight[1]));
                weights[f][c][1] = transpose(pack(weight[2], weight[3]));
            }
        }
    }

    // Of the lane's tokens.
    __device__ static float largest(const float (&scores)[kFragments][kColumns][4], int c, int h) {
        float largest = -CUDART_INF_F;
#pragma unroll
        for (int f = 0; f < kFragments; ++f) largest = fmaxf(largest, fmaxf(scores[f][c][h], scores[f][c][2 + h]));
        return largest;
    }

    // Bring `most` to where the tile's largest weights are 2^kRaised, where they are above, and with it what was summed before.
    __device__ void raise(const float (&scores)[kFragments][kColumns][4]) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            float keep[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float top = largest(scores, c, h) * scale_of(c, h);
#pragma unroll
                for (int offset = 4; offset < 32; offset *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
                const float next = fmaxf(most[c][h], top - kRaised);
                keep[h] = exp2_fast(most[c][h] - next);
                most[c][h] = next;
                total[c][h] *= keep[h];
            }
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                sums[c][step][0] *= keep[0], sums[c][step][1] *= keep[1];
                sums[c][step][2] *= keep[0], sums[c][step][3] *= keep[1];
            }
        }
    }
};

// accumulator.cuh -- a warp's attention of kHeads query heads, in registers, a tile of K and V at a time.
//
// Scores, weights and sums are transposed: heads are the columns of the MMA. A lane holds heads 2 * (lane % 4) and the next of
// each 8, of rows lane / 4 and 8 further on: of scores these are tokens, of sums elements, in an order that the tiles set.
#pragma once

#include "partials.cuh"
#include PA_TILES    // ring.cuh or fragments.cuh: how tiles of K and V come, and which rows and columns their elements are

constexpr int kColumns = (kHeads + 7) / 8;      // MMA tiles of 8 heads
static_assert(kHeadDim % 16 == 0, "PA_HEAD_DIM must be a multiple of 16, the rows of an MMA tile");
static_assert(sizeof(Scalar) == 2, "PA_SCALAR must be of 16 bits");

struct Accumulator {
    const int lane;
    const float scale;                              // to units of log2
    unsigned query[kColumns][kKeySteps][2];         // B of the first product
    float sums[kColumns][kValueSteps][4] = {};      // C of the second
    float most[kColumns][2];                        // by head; the same in all lanes of it
    float total[kColumns][2] = {};                  // by head; of this lane's tokens

    // `query` points at the first of the warp's query heads, of which `num_heads` exist.
    __device__ Accumulator(const Scalar* query_rows, int num_heads, float scale, int lane) : lane(lane), scale(scale) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int head = c * 8 + lane / 4;
            const unsigned* row = reinterpret_cast<const unsigned*>(query_rows + head * kHeadDim);
#pragma unroll
            for (int i = 0; i < kKeySteps * 2; ++i) {
                const int word = Tiles::query_word(i / 2, i % 2, lane);
                query[c][i / 2][i % 2] = head < num_heads && word < kHeadDim / 2 ? __ldg(row + word) : 0;
            }
            most[c][0] = most[c][1] = -CUDART_INF_F;
        }
    }

    // Attend to the next of `tiles`, whose first token is `first_token`; `left` of its tokens exist, at least one.
    __device__ void add(Tiles& tiles, int first_token, int left) {
        tiles.wait(first_token, left);
        float scores[kColumns][kScoreSums][4] = {};
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
            unsigned a[4];
            tiles.key(a, step);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) multiply_add(scores[c][Tiles::score_sum(step)], a, query[c][step]);
        }
        tiles.keys_are_read();
        unsigned weights[kColumns][2];    // B of the second product
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            Tiles::join(scores[c]);
            to_weights(c, scores[c][0], weights[c], left);
        }
#pragma unroll
        for (int step = 0; step < kValueSteps; ++step) {
            unsigned a[4];
            tiles.value(a, step);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) multiply_add(sums[c][step], a, weights[c]);
        }
        tiles.values_are_read();
    }

    // Store the warp's partials.
    __device__ void leave(Partials& to) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int head = c * 8 + lane % 4 * 2 + h;
                for (int offset = 4; offset < 32; offset *= 2) total[c][h] += __shfl_xor_sync(0xffffffffu, total[c][h], offset);
                if (head >= kHeads) continue;
                if (lane / 4 == 0) to.stats[head] = make_float2(most[c][h], total[c][h]);
                Tiles::store(to.sums[head], sums[c], h, lane);
            }
        }
    }

    // From scores to weights, relative to the new maximum; what was summed before is brought to it.
    __device__ void to_weights(int c, const float (&scores)[4], unsigned (&weights)[2], int left) {
        const bool low = lane / 4 < left, high = lane / 4 + 8 < left;
        float keep[2], weight[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float a = low ? scores[h] * scale : -CUDART_INF_F, b = high ? scores[2 + h] * scale : -CUDART_INF_F;
            float larger = fmaxf(most[c][h], fmaxf(a, b));
#pragma unroll
            for (int offset = 4; offset < 32; offset *= 2) {
                larger = fmaxf(larger, __shfl_xor_sync(0xffffffffu, larger, offset));
            }
            const float base = larger == -CUDART_INF_F ? 0.0f : larger;
            weight[h] = exp2f(a - base), weight[2 + h] = exp2f(b - base);
            keep[h] = exp2f(most[c][h] - base);
            most[c][h] = larger;
            total[c][h] = total[c][h] * keep[h] + weight[h] + weight[2 + h];
        }
        if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
            for (int step = 0; step < kValueSteps; ++step) {
                sums[c][step][0] *= keep[0], sums[c][step][1] *= keep[1];
                sums[c][step][2] *= keep[0], sums[c][step][3] *= keep[1];
            }
        }
        weights[0] = transpose(pack(weight[0], weight[1]));
        weights[1] = transpose(pack(weight[2], weight[3]));
    }
};

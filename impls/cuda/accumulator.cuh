// accumulator.cuh -- a warp's attention of kHeads query heads, in registers, a tile of K and V at a time.
//
// Scores, weights and sums are transposed: heads are the columns of the MMA. A lane holds heads 2 * (lane % 4) and the next of
// each 8, of tokens (or elements) lane / 4 and 8 further on.
#pragma once

#include "mma.cuh"
#include "partials.cuh"
#include "ring.cuh"

constexpr int kColumns = (kHeads + 7) / 8;      // MMA tiles of 8 heads
constexpr int kSteps = kLoads ? (kHeadDim + 63) / 64 * 4 : kHeadDim / 16;    // MMA tiles of 16 elements; by loads, of whole lines
static_assert(kHeadDim % 16 == 0, "PA_HEAD_DIM must be a multiple of 16, the rows of an MMA tile");
static_assert(sizeof(Scalar) == 2, "PA_SCALAR must be of 16 bits");

// Where a lane's row of a tile is, when matrices are loaded.
struct Row {
    unsigned address;    // in shared memory
    int slot;            // of its token, modulo 8: what its chunks are permuted by

    __device__ unsigned chunk(int step, int half) const {
        if constexpr (!kSwizzled) return address + (2 * step + half) * 16;
        return address + (2 * step >= kWholeChunks ? 2 * step + half : (2 * step + half) ^ slot) * 16;
    }
};

struct Accumulator {
    const int lane;
    const float scale;                          // to units of log2
    unsigned query[kColumns][kSteps][2];        // B of the first product
    float sums[kColumns][kSteps][4] = {};       // C of the second
    float most[kColumns][2];                    // by head; the same in all lanes of it
    float total[kColumns][2] = {};              // by head; of this lane's tokens

    // `query` points at the first of the warp's query heads, of which `num_heads` exist.
    __device__ Accumulator(const Scalar* query_rows, int num_heads, float scale, int lane) : lane(lane), scale(scale) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int head = c * 8 + lane / 4;
            const unsigned* row = reinterpret_cast<const unsigned*>(query_rows + head * kHeadDim) + lane % 4;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                query[c][step][0] = head < num_heads ? __ldg(row + step * 8) : 0;
                query[c][step][1] = head < num_heads ? __ldg(row + step * 8 + 4) : 0;
            }
            most[c][0] = most[c][1] = -CUDART_INF_F;
        }
    }

    // Without a query yet.
    __device__ Accumulator(float scale, int lane) : lane(lane), scale(scale) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) most[c][0] = most[c][1] = -CUDART_INF_F;
    }

    // Attend to a tile whose first token is `first_token`; `left` of its tokens exist, at least one.
    __device__ void add(const unsigned char* stage, int first_token, int left) {
        float scores[kColumns][4] = {};
        const Row keys = row(stage, lane % 16, first_token);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            unsigned a[4];
            load_matrices(a, keys.chunk(step, lane / 16));
#pragma unroll
            for (int c = 0; c < kColumns; ++c) multiply_add(scores[c], a, query[c][step]);
        }
        unsigned weights[kColumns][2];    // B of the second product
#pragma unroll
        for (int c = 0; c < kColumns; ++c) to_weights(c, scores[c], weights[c], left);

        // Slots without a token may hold anything, and 0 * NaN is NaN.
        const int token = lane % 4 * 2;
        const unsigned low = exist(left - token), high = exist(left - token - 8);
        const Row values = row(stage + kTileBytes, lane % 8 + lane / 16 * 8, first_token);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            unsigned a[4];
            load_transposed(a, values.chunk(step, lane / 8 % 2));
            a[0] &= low, a[1] &= low, a[2] &= high, a[3] &= high;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) multiply_add(sums[c][step], a, weights[c]);
        }
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
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    to.sums[head][step * 16 + lane / 4] = sums[c][step][h];
                    to.sums[head][step * 16 + 8 + lane / 4] = sums[c][step][2 + h];
                }
            }
        }
    }

    __device__ static Row row(const unsigned char* tile, int row, int first_token) {
        const int slot = kByRow ? row : (first_token + row) % kBlockSize;
        return {shared_address(tile + row * kPitch), slot % 8};
    }

    // A mask of two 16-bit halves, the elements of two tokens, where `left` of them and all after them exist.
    __device__ static unsigned exist(int left) { return left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0; }

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
            for (int step = 0; step < kSteps; ++step) {
                sums[c][step][0] *= keep[0], sums[c][step][1] *= keep[1];
                sums[c][step][2] *= keep[0], sums[c][step][3] *= keep[1];
            }
        }
        weights[0] = transpose(pack(weight[0], weight[1]));
        weights[1] = transpose(pack(weight[2], weight[3]));
    }
};

// warpgroup.cuh -- attention of 64 packed rows by four warps: scores and sums in registers, a tile of keys and values at a time.
//
//   order      scores of tile t are begun first, then the sums over tile t - 1, so that these go on while weights of t are computed
//   queries    are read from shared memory by every product, or held in registers, which spares shared memory a fifth of its reads
//   turns      one warpgroup begins its products while the others compute weights
//   maximum    of a row is raised only where a weight would be above 2^kSlack: sums are seldom rescaled. Nothing is lost by it, as
//              weights have the same relative precision wherever they lie.
#pragma once

#include "fast.cuh"
#include "stages.cuh"

// Specialised by prefill.py.
enum class Query { SHARED, REGISTERS };    // where products read queries
constexpr bool kHoldsQuery = Query::PA_QUERY == Query::REGISTERS;

constexpr float kSlack = 8;
constexpr int kSums = kHeadDim < 128 ? kHeadDim : 128;    // columns of sums of one product
constexpr int kHalves = kHeadDim / kSums;                 // products side by side
static_assert(kHeadDim % kSums == 0, "PA_HEAD_DIM must be 64 or a multiple of 128");

// Turns of the warpgroups to begin products.
struct Turns {
    const int warpgroup;
    static constexpr int kBarrier = 1 + kWarpgroups + 1;    // and those behind it, past those of teams

    __device__ Turns(int warpgroup) : warpgroup(warpgroup) {    // the last one lets the first begin
        if (kWarpgroups > 1 && warpgroup == kWarpgroups - 1) pass_by<256>(kBarrier);
    }
    __device__ void take() const {
        if constexpr (kWarpgroups > 1) meet<256>(kBarrier + warpgroup);
    }
    __device__ void pass() const {
        if constexpr (kWarpgroups > 1) pass_by<256>(kBarrier + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1));
    }
};

// Two elements at once, where they lie so; tokens of `out` may be any number of elements apart.
__device__ __forceinline__ void write_two(Scalar* to, float first, float second) {
    if (reinterpret_cast<unsigned long long>(to) % 4 == 0) *reinterpret_cast<unsigned*>(to) = pack(first, second);
    else from_float(to[0], first), from_float(to[1], second);
}

// What a thread has of an item: two rows, 8 apart, and in each the columns of its place among the four lanes of a row.
struct Rows {
    float sums[kHalves][kSums / 2];
    float most[2], total[2];           // scores' maximum, unscaled; sum of the thread's weights
    unsigned weights[kTile / 16][4];
    float scale, sign;                 // to units of log2; both factors of a score
    int bounds[2];                     // keys that a row sees

    __device__ Rows(float scale_log2, const int (&keys)[2]) : scale(fabsf(scale_log2)), sign(scale_log2 < 0 ? -1.0f : 1.0f) {
#pragma unroll
        for (int r = 0; r < 2; ++r) most[r] = -CUDART_INF_F, total[r] = 0, bounds[r] = keys[r];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int i = 0; i < kSums / 2; ++i) sums[half][i] = 0;
        }
    }

    // From a tile's scores to weights, in place; what was summed before is to be multiplied by `keep`.
    __device__ void weigh(float (&scores)[kTile / 2], int first_token, int lane, float (&keep)[2]) {
        if (first_token + kTile > bounds[0] || sign < 0) mask(scores, first_token + lane % 4 * 2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = scores[2 * r];
#pragma unroll
            for (int i = 0; i < kTile / 8; ++i) {
                largest = fmaxf(largest, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
            const bool raise = (largest - most[r]) * scale > kSlack;    // -inf - -inf is NaN: not raised
            const float base = (raise ? largest : most[r]) * scale, minus = base == -CUDART_INF_F ? 0.0f : -base;
            keep[r] = raise ? exp2_fast(fmaf(most[r], scale, minus)) : 1.0f;
            most[r] = raise ? largest : most[r];
            float sum = 0;
#pragma unroll
            for (int i = 0; i < kTile / 8; ++i) {
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    scores[4 * i + e] = exp2_fast(fmaf(scores[4 * i + e], scale, minus));
                    sum += scores[4 * i + e];
                }
            }
            total[r] = fmaf(total[r], keep[r], sum);
        }
    }

    __device__ void mask(float (&scores)[kTile / 2], int token) const {
#pragma unroll
        for (int i = 0; i < kTile / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& score = scores[4 * i + e];
                score = token + 8 * i + e % 2 < bounds[e / 2] ? score * sign : -CUDART_INF_F;
            }
        }
    }

    // Bring sums to a raised maximum.
    __device__ void rescale(const float (&keep)[2]) {
        if (!__any_sync(kAll, keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int i = 0; i < kSums / 2; ++i) sums[half][i] *= keep[i / 2 % 2];
        }
    }

    __device__ void round(const float (&scores)[kTile / 2]) {
#pragma unroll
        for (int i = 0; i < kTile / 4; ++i) weights[i / 4][i % 4] = pack(scores[2 * i], scores[2 * i + 1]);
    }

    // The sum of a row's weights, to all lanes that have a part of it; and its maximum in units of log2.
    __device__ float whole_total(int r) const {
        const float two = total[r] + __shfl_xor_sync(kAll, total[r], 1);
        return two + __shfl_xor_sync(kAll, two, 2);
    }
    __device__ float whole_most(int r) const { return most[r] == -CUDART_INF_F ? most[r] : most[r] * scale; }

    // Leave a row's sums at `to`, as floats.
    __device__ void store(int r, int lane, float4* to) const {
        float2* twos = reinterpret_cast<float2*>(to) + lane % 4;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int i = 0; i < kSums / 8; ++i) {
                const float* two = sums[half] + 4 * i + 2 * r;
                twos[half * (kSums / 2) + 4 * i] = make_float2(two[0], two[1]);
            }
        }
    }
    // Write them times `factor`, rounded.
    __device__ void write(int r, int lane, float factor, Scalar* to) const {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int i = 0; i < kSums / 8; ++i) {
                const float* two = sums[half] + 4 * i + 2 * r;
                write_two(to + half * kSums + 8 * i + lane % 4 * 2, two[0] * factor, two[1] * factor);
            }
        }
    }
};

// A warpgroup's products; all tiles are those of `shared`.
struct Products {
    const unsigned query, keys, values;    // where they begin in shared memory, the warpgroup's own rows of queries
    unsigned held[kHoldsQuery ? kHeadDim / 16 : 1][4];    // the warp's queries, 16 elements after the other

    __device__ Products(const Shared& shared, int warpgroup)
        : query(shared_address(shared.query) + warpgroup * 64 * kPitch), keys(shared_address(shared.keys)),
          values(shared_address(shared.values)) {}

    // Take an item's queries to registers.
    __device__ void hold(int warp, int lane) {
        const int row = warp * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            const int chunk = k % 4 * 2 + lane / 16;
            load_matrices(held[k], query + k / 4 * kRows * kPitch + row * kPitch + (chunk ^ row % 8) * 16);
        }
        __syncwarp();    // all lanes have read
    }

    __device__ void score(float (&scores)[kTile / 2], int stage) const {
        const Matrix a = matrix_at(query, kRows * kPitch), b = matrix_at(keys + stage * kTileBytes, kTile * kPitch);
        begin_products();
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            const int column = k / 4, within = k % 4 * 32;
            const Matrix those = advance(b, column * kTile * kPitch + within);
            if constexpr (kHoldsQuery) multiply_rows(scores, held[k], those, k > 0);
            else multiply_rows(scores, advance(a, column * kRows * kPitch + within), those, k > 0);
        }
        end_products();
    }

    __device__ void sum(Rows& rows, int stage) const {
        const Matrix b = matrix_at(values + stage * kTileBytes, kTile * kPitch);
        begin_products();
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int k = 0; k < kTile / 16; ++k) {
                const int bytes = half * (kSums / kWidth) * kTile * kPitch + k * 16 * kPitch;
                multiply_columns(rows.sums[half], rows.weights[k], advance(b, bytes));
            }
        }
        end_products();
    }
};

__device__ __forceinline__ void settle(Rows& rows) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) settle(rows.sums[half]);
}

// A stage is free once a lane of every warp has said so.
__device__ __forceinline__ void give_back(Barrier* barrier, int lane) {
    if (lane == 0) arrive(barrier);
}

// Let an item go by of which the warpgroup has no row: tiles come, and turns, as for the others.
__device__ __forceinline__ void pass_over(
    Shared& shared, const Turns& turns, Place& keys, Place& values, int num_tiles, int lane) {
    give_back(&shared.query_empty, lane);
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
        wait(&shared.keys_full[keys.stage], keys.parity);
        turns.take();
        turns.pass();
        give_back(&shared.keys_empty[keys.stage], lane);
        keys.step();
        wait(&shared.values_full[values.stage], values.parity);
        give_back(&shared.values_empty[values.stage], lane);
        values.step();
    }
}

// Attend to the keys of an item, `num_tiles` at least 1, and give its queries back.
__device__ __forceinline__ void attend(
    Rows& rows, Shared& shared, const Products& products, const Turns& turns, Place& keys, Place& values, int num_tiles,
    int lane) {
    float keep[2];
    {
        float scores[kTile / 2];
        wait(&shared.keys_full[keys.stage], keys.parity);
        see_copies();
        turns.take();
        products.score(scores, keys.stage);
        turns.pass();
        wait_for_products<0>();
        settle(scores);
        give_back(&shared.keys_empty[keys.stage], lane);
        keys.step();
        rows.weigh(scores, 0, lane, keep);    // nothing is summed yet
        rows.round(scores);
    }
#pragma unroll 1
    for (int tile = 1; tile < num_tiles; ++tile) {
        float scores[kTile / 2];
        wait(&shared.keys_full[keys.stage], keys.parity);
        wait(&shared.values_full[values.stage], values.parity);
        see_copies();
        turns.take();
        products.score(scores, keys.stage);
        products.sum(rows, values.stage);
        turns.pass();
        wait_for_products<1>();
        settle(scores);
        give_back(&shared.keys_empty[keys.stage], lane);
        keys.step();
        rows.weigh(scores, tile * kTile, lane, keep);
        finish(rows.total[0] + rows.total[1], products.query);
        wait_for_products<0>();
        settle(rows);
        give_back(&shared.values_empty[values.stage], lane);
        values.step();
        rows.rescale(keep);
        rows.round(scores);
    }
    if constexpr (!kHoldsQuery) give_back(&shared.query_empty, lane);
    wait(&shared.values_full[values.stage], values.parity);
    see_copies();
    products.sum(rows, values.stage);
    wait_for_products<0>();
    settle(rows);
    give_back(&shared.values_empty[values.stage], lane);
    values.step();
}

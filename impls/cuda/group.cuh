// group.cuh -- attention of the query heads of one KV head over a range of tokens, by all warps of a CTA.
//
//   warp   a tile at a time (see rows.cuh): scores by team, softmax once a (head, token), then the weighted values.
//          A row is read once for all kHeads query heads. Tiles pass through a ring of kSlots slots: keys, values, keys of
//          the next tile ...; a slot is filled again as soon as it is read, so that two tiles are on their way at any time,
//          whatever order the compiler finds for the arithmetic.
//   CTA    warps take every kWarps-th tile, and are merged in shared memory, where the queries are, too
#pragma once

#include "rows.cuh"

// Specialised by group.py, as rows.cuh is.
constexpr int kHeads = PA_HEADS;       // query heads that a CTA takes; a larger group is cut into kParts
constexpr int kStep = PA_STEP;         // tokens that a CTA takes at a time
constexpr int kCtas = PA_CTAS;         // that an SM must hold at once, which bounds the registers of each

constexpr int kSlots = 3;              // of a warp's ring: keys, values, and the keys of the next tile
constexpr int kParts = (kGroup + kHeads - 1) / kHeads;
static_assert(kStep == kWarps * kTile, "PA_STEP must be what kWarps warps take at a time");

// What the warps of a CTA share, and leave for merging. Maxima and scores are in units of log2.
struct Shared {
    float4 query[kHeads][kPerLane][kQuads][kLanes];    // each lane's chunks; zero where there is no head or element
    union {
        Slot ring[kSlots];
        float sums[kHeads][kHeadDim];                  // of exp2(score - most) * value; when nothing is left to copy
    } of_warp[kWarps];
    alignas(16) float weights[kWarps][kHeads][kTile];  // scores of a tile, then exp2(score - most)
    float most[kWarps][kHeads];                        // maximum of the scores
    float total[kWarps][kHeads];                       // of exp2(score - most)
};
static_assert(sizeof(Shared) == PA_SHARED, "PA_SHARED must be the bytes of Shared, which the launch gives");

// The CTA's dynamic shared memory.
__device__ inline Shared& shared_memory() {
    extern __shared__ uint4 memory[];
    return *reinterpret_cast<Shared*>(memory);
}

// Rows taken at once. Four of eight would not fit the registers of many heads; four of four need no loop, and do.
constexpr int kBatch = kRows % 4 != 0 ? 1 : kHeads <= 4 || kRows == 4 ? 4 : 2;
constexpr int kDots = kHeads * kBatch;
constexpr int kHeld = held_after(kDots, kLanes);    // sums that a lane ends up with
constexpr int kCopies = kLanes * kHeld / kDots;     // lanes of a team that end up with the same ones

// The CTA's queries times `scale`, as floats, where each lane finds its chunks of them. num_heads of kHeads exist.
__device__ inline void load_query(Shared& shared, const Scalar* query, int num_heads, float scale, const Lane& me) {
    for (int i = me.thread; i < kHeads * kPerLane * kLanes; i += kThreads) {
        const int h = i / (kPerLane * kLanes), chunk = i % (kPerLane * kLanes);
        const bool there = h < num_heads && chunk < kChunks;
        const uint4* from = reinterpret_cast<const uint4*>(query + h * kHeadDim) + chunk;
        const uint4 raw = there ? __ldg(from) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
            float x[4];
            unpack_quad(raw, quad, x);
            shared.query[h][chunk / kLanes][quad][chunk % kLanes] =
                make_float4(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
        }
    }
    __syncthreads();
}

// Scores of a tile: the lane's share of the dot products, summed over its team, into weights[head][token of the tile].
__device__ inline void score_tile(Shared& shared, const Slot& keys, const Lane& me, int first, int end) {
    float(&weights)[kHeads][kTile] = shared.weights[me.warp];
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += kBatch) {
        float dots[kDots] = {};
#pragma unroll
        for (int c = 0; c < kPerLane; ++c) {
            uint4 chunks[kBatch];
#pragma unroll
            for (int r = 0; r < kBatch; ++r) chunks[r] = keys[(begin + r) * kPerLane + c][me.lane];
#pragma unroll
            for (int quad = 0; quad < kQuads; ++quad) {
                float k[kBatch][4];
#pragma unroll
                for (int r = 0; r < kBatch; ++r) unpack_quad(chunks[r], quad, k[r]);
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    const float4 q = shared.query[h][c][quad][me.member];
#pragma unroll
                    for (int r = 0; r < kBatch; ++r) {
                        float& dot = dots[h * kBatch + r];
                        dot += q.x * k[r][0], dot += q.y * k[r][1], dot += q.z * k[r][2], dot += q.w * k[r][3];
                    }
                }
            }
        }
        int held = 0;
        sum_over<kDots, kLanes>(dots, me.lane, held);
        if (me.member % kCopies == 0) {
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                const int h = (held + i) / kBatch, r = begin + (held + i) % kBatch;
                weights[h][me.team * kRows + r] = first + r < end ? dots[i] : -CUDART_INF_F;
            }
        }
    }
}

// Add the values of a tile, weighted, to the lane's sums.
__device__ inline void add_values(
    float (&sums)[kHeads][kPerLane][kChunk], const float (&weights)[kHeads][kTile], const Slot& values, const Lane& me) {
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += kBatch) {
        float weight[kHeads][kBatch];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const float* from = &weights[h][me.team * kRows + begin];
            if constexpr (kBatch == 4) {
                const float4 four = *reinterpret_cast<const float4*>(from);
                weight[h][0] = four.x, weight[h][1] = four.y, weight[h][2] = four.z, weight[h][3] = four.w;
            } else if constexpr (kBatch == 2) {
                const float2 two = *reinterpret_cast<const float2*>(from);
                weight[h][0] = two.x, weight[h][1] = two.y;
            } else {
                weight[h][0] = *from;
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
#pragma unroll
            for (int c = 0; c < kPerLane; ++c) {
                const uint4 chunk = values[(begin + i) * kPerLane + c][me.lane];
#pragma unroll
                for (int quad = 0; quad < kQuads; ++quad) {
                    float v[4];
                    unpack_quad(chunk, quad, v);
#pragma unroll
                    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) sums[h][c][quad * 4 + e] += weight[h][i] * v[e];
                    }
                }
            }
        }
    }
}

// exp2(x - most), where a maximum of -inf stands for "no score yet" and must not give NaN.
__device__ inline float exp2_below(float x, float most) { return exp2f(x - (most == -CUDART_INF_F ? 0.0f : most)); }

// Leave a warp's share in `shared`, for all threads to read: sums of its teams added up, in the place of its ring.
__device__ inline void leave_sums(
    Shared& shared, float (&sums)[kHeads][kPerLane][kChunk], float (&most)[kHeads], float (&total)[kHeads]) {
    const Lane me;
    __syncwarp();  // slots read by all
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        for (int offset = 16; offset > 0; offset /= 2) total[h] += __shfl_xor_sync(0xffffffffu, total[h], offset);
        if (me.lane == 0) shared.most[me.warp][h] = most[h], shared.total[me.warp][h] = total[h];
#pragma unroll
        for (int c = 0; c < kPerLane; ++c) {
            const int chunk = c * kLanes + me.member;
#pragma unroll
            for (int e = 0; e < kChunk; ++e) {
                float sum = sums[h][c][e];
                for (int offset = 16; offset >= kLanes; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
                if (me.team == 0 && chunk < kChunks) shared.of_warp[me.warp].sums[h][chunk * kChunk + e] = sum;
            }
        }
    }
    __syncthreads();
}

// Attend to tokens begin .. end - 1 of one sequence; `begin` is a multiple of kStep. Leaves each warp's share in `shared`,
// for all threads to read. `query` points at the first of the CTA's query heads, of which `num_heads` exist.
__device__ inline void attend(
    Shared& shared, const Scalar* query, int num_heads, const Scalar* key_cache, const Scalar* value_cache,
    const KvHead& key_head, const KvHead& value_head, const int* table, int begin, int end, float scale) {
    const Lane me;
    float(&weights)[kHeads][kTile] = shared.weights[me.warp];

    float sums[kHeads][kPerLane][kChunk] = {};
    float most[kHeads], total[kHeads] = {};  // total: of the tokens that this lane took through the softmax
#pragma unroll
    for (int h = 0; h < kHeads; ++h) most[h] = -CUDART_INF_F;

    int tile = begin + me.warp * kTile;  // first token of the warp's tile
    int first = tile + me.team * kRows;  // first token of the lane
    int turn = 0;                        // slot of the tile's keys; its values are in the one after it, around the ring
    const auto slot = [&](int after) -> Slot& {
        const int place = turn + after;
        return shared.of_warp[me.warp].ring[place < kSlots ? place : place - kSlots];
    };
    const auto copy = [&](int after, const Scalar* cache, const KvHead& head, const int(&ids)[kIds], int first) {
        copy_rows(slot(after), cache, head, ids, first, end, me);
    };
    int ids[kIds], next_ids[kIds], later_ids[kIds];  // of this tile, the next, and the one after it
    find_blocks(ids, table, first, end);
    find_blocks(next_ids, table, first + kStep, end);
    find_blocks(later_ids, table, first + 2 * kStep, end);
    copy(0, key_cache, key_head, ids, first);
    copy(1, value_cache, value_head, ids, first);
    copy(2, key_cache, key_head, next_ids, first + kStep);
    load_query(shared, query, num_heads, scale * kLog2e, me);

    while (tile < end) {
        wait_for_batch<kSlots - 1>();
        score_tile(shared, slot(0), me, first, end);
        __syncwarp();
        copy(0, value_cache, value_head, next_ids, first + kStep);

        float score[kHeads];  // lane t takes token t of the tile; lanes past it repeat them and count nothing
#pragma unroll
        for (int h = 0; h < kHeads; ++h) score[h] = weights[h][me.lane % kTile];
        __syncwarp();  // read by all, before they are overwritten
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            float larger = fmaxf(most[h], score[h]);
#pragma unroll
            for (int offset = kTile / 2; offset > 0; offset /= 2) {
                larger = fmaxf(larger, __shfl_xor_sync(0xffffffffu, larger, offset));
            }
            const float weight = exp2_below(score[h], larger), keep = exp2_below(most[h], larger);
            total[h] = total[h] * keep + (me.lane < kTile ? weight : 0.0f);
            if (larger > most[h]) {
#pragma unroll
                for (int c = 0; c < kPerLane; ++c) {
#pragma unroll
                    for (int e = 0; e < kChunk; ++e) sums[h][c][e] *= keep;
                }
                most[h] = larger;
            }
            if (me.lane < kTile) weights[h][me.lane] = weight;
        }
        __syncwarp();
        wait_for_batch<kSlots - 1>();
        add_values(sums, weights, slot(1), me);
        copy(1, key_cache, key_head, later_ids, first + 2 * kStep);
        __syncwarp();  // weights read by all, before the next scores

        tile += kStep, first += kStep;
        turn = turn == 0 ? kSlots - 1 : turn - 1;
#pragma unroll
        for (int i = 0; i < kIds; ++i) next_ids[i] = later_ids[i];
        find_blocks(later_ids, table, first + 2 * kStep, end);
    }
    wait_for_batch<0>();  // rows of zeros past the end
    leave_sums(shared, sums, most, total);
}

struct Merged {
    float most;   // log2
    float total;
    float sum;
};

// Element `dim` of head `h`, over all warps.
__device__ inline Merged merge_warps(const Shared& shared, int h, int dim) {
    Merged merged = {-CUDART_INF_F, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) merged.most = fmaxf(merged.most, shared.most[w][h]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        const float weight = exp2_below(shared.most[w][h], merged.most);
        merged.total += weight * shared.total[w][h];
        merged.sum += weight * shared.of_warp[w].sums[h][dim];
    }
    return merged;
}

// Normalise and write the CTA's heads: out at the first of them, lse likewise.
__device__ inline void write_out(Scalar* out, float* lse, const Shared& shared, int num_heads) {
    for (int i = Lane().thread; i < num_heads * kHeadDim; i += kThreads) {
        const int h = i / kHeadDim, dim = i % kHeadDim;
        const Merged merged = merge_warps(shared, h, dim);
        const bool empty = merged.total == 0.0f;  // no visible key: out = 0, lse = -inf
        from_float(out[i], empty ? 0.0f : merged.sum / merged.total);
        if (dim == 0) lse[h] = empty ? -CUDART_INF_F : merged.most * kLn2 + logf(merged.total);
    }
}

// partials.cuh -- what warps, and shares, hold of the same query rows, merged: first within a team, in shared memory, then, where a
// sequence lies in several shares, by the team that arrives last, from global memory.
//
//   partial    of a row, one head of one query token: most, the maximum of its scores (log2); total, of exp2(score - most); sums, of that * value
#pragma once

#include "loads.cuh"
#include "meet.cuh"
#include "paged.cuh"
#include "shares.cuh"

constexpr int kQuads = kHeadDim / 4;    // of a row of sums
constexpr int kAtOnce = PA_AT_ONCE;     // partials of other teams read at a time: each turn costs a trip to L2

constexpr int kWarpRows = kRows / kCrew;                    // of a warp
constexpr int kSlice = kWarpRows <= 16 ? kWarpRows : 8;    // rows of a warp that are merged at once, in so much shared memory
constexpr int kSlices = kWarpRows / kSlice;
static_assert(kWarpRows % kSlice == 0, "PA_ROWS must be a multiple of 8 for a warp of more than 16");

// A warp's partials of a segment. The padding spreads what a warp stores at once over all banks (accumulator.cuh).
struct Partials {
    alignas(16) float sums[kSlice][kHeadDim + 4];
    float2 stats[kSlice];    // most, total
};

struct Merged {
    float most = -CUDART_INF_F;
    float total = 0.0f;
    float4 sums = {0.0f, 0.0f, 0.0f, 0.0f};

    // exp2(x - most), where a maximum of -inf stands for "no score yet" and must not give NaN.
    __device__ float weight(float x) const { return exp2f(x - (most == -CUDART_INF_F ? 0.0f : most)); }

    // Count a score (log2) that has no value.
    __device__ void add_sink(float score) {
        rise(score);
        total += weight(score);
    }
    __device__ void rise(float to) {
        const float old = most;
        most = fmaxf(most, to);
        const float keep = weight(old);
        total *= keep;
        sums.x *= keep, sums.y *= keep, sums.z *= keep, sums.w *= keep;
    }
    __device__ void add(float2 stats, const float4& x) {    // of a partial whose maximum is not above `most`
        const float w = weight(stats.x);
        total += w * stats.y;
        sums.x += w * x.x, sums.y += w * x.y, sums.z += w * x.z, sums.w += w * x.w;
    }
};

// Wait for all warps of the team, and see what they wrote.
__device__ __forceinline__ void team_sync(int team) {
    __syncwarp();
    if constexpr (kTeam > 1) meet<kTeam * 32>(1 + team);
}

// Four elements of a row, over the crews of a team; `partials` begin with those of the first crew's warp that has it.
template <int kMerged = kTeam> __device__ inline Merged merge_team(const Partials* partials, int head, int quad) {
    Merged merged;
#pragma unroll
    for (int w = 0; w < kMerged; w += kCrew) merged.most = fmaxf(merged.most, partials[w].stats[head].x);
#pragma unroll
    for (int w = 0; w < kMerged; w += kCrew) {
        merged.add(partials[w].stats[head], *reinterpret_cast<const float4*>(&partials[w].sums[head][quad * 4]));
    }
    return merged;
}

// How partials of other shares are counted and read; what it costs is waiting, too.
//   FENCES    by a counting between two fences
//   RELEASE   by one counting that releases and acquires; where they are is worked out before the tiles
enum Closing { FENCES, RELEASE };
#ifdef PA_CLOSING
constexpr Closing kClosing = PA_CLOSING;
#else
constexpr Closing kClosing = FENCES;
#endif

// Workspace in global memory: two places a team, for the segments at the two ends of its share.
struct Workspace {
    float4* sums;        // [teams * 2, kRows, kQuads]
    float2* stats;       // [teams * 2, kRows]
    unsigned* arrived;   // [num_seqs, num_kv_heads * kParts]    shares that left their partials; 0 between launches
};

// The shares that hold parts of one sequence, for one head.
struct Spread {
    int first_column, last_column, lane, lanes;
    bool begins_share;    // the sequence begins where share first_column does

    __device__ Spread(const Shares& shares, int first, int past, int lane)
        : first_column(shares.column_of(first)), last_column(shares.column_of(past - 1)), lane(lane), lanes(shares.lanes),
          begins_share(shares.begin(first_column) == first) {}

    __device__ Spread() {}
    __device__ int count() const { return last_column - first_column + 1; }

    // Where the partials of `column` are: place 0 of its team for what begins the share, 1 for what begins inside.
    __device__ int place(int column) const {
        return (column * lanes + lane) * 2 + (column == first_column && !begins_share ? 1 : 0);
    }
};

__device__ inline void store(const Workspace& workspace, int place, int head, int quad, const Merged& merged) {
    const int row = place * kRows + head;
    workspace.sums[(long long)row * kQuads + quad] = merged.sums;
    if (quad == 0) workspace.stats[row] = make_float2(merged.most, merged.total);
}

// What a share holds of a sequence: all of it, or where its partials go.
struct Holding {
    bool whole;
    Spread spread;
    int place;

    __device__ Holding() {}
    __device__ Holding(const Shares& shares, const Segment& segment, int column, int lane)
        : Holding(shares, segment, segment.first + tiles_of(shares.sequences[segment.seq]), column, lane) {}
    __device__ Holding(const Shares& shares, const Segment& segment, int past, int column, int lane)
        : whole(segment.begin == segment.first && segment.end == past), spread(shares, segment.first, past, lane),
          place(spread.place(column)) {}

    // The same, worked out here and not where it is used.
    __device__ Holding kept() const {
        Holding kept = *this;
        kept.spread.first_column = opaque(spread.first_column), kept.spread.last_column = opaque(spread.last_column);
        kept.place = opaque(place);
        return kept;
    }
};

// Four elements of a head, over all shares.
__device__ inline Merged merge_shares(const Workspace& workspace, const Spread& spread, int head, int quad) {
    Merged merged;
    for (int begin = spread.first_column; begin <= spread.last_column; begin += kAtOnce) {
        float4 sums[kAtOnce];
        float2 stats[kAtOnce];
        float most = -CUDART_INF_F;
        const int first_row = spread.place(begin) * kRows + head;
        const int inner_row = (begin * spread.lanes + spread.lane) * 2 * kRows + head;    // RELEASE: a shorter way to the others
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), stats[i] = make_float2(-CUDART_INF_F, 0.0f);
            if (begin + i > spread.last_column) continue;
            int row = spread.place(begin + i) * kRows + head;
            if constexpr (kClosing == RELEASE) row = i == 0 ? first_row : inner_row + i * spread.lanes * 2 * kRows;
            sums[i] = __ldcg(workspace.sums + (long long)row * kQuads + quad);
            stats[i] = __ldcg(workspace.stats + row);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, stats[i].x);
        merged.rise(most);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) merged.add(stats[i], sums[i]);
    }
    return merged;
}

// Whether this team is the last of `count` to arrive. All threads of the team call it, after what it left in global memory.
__device__ inline bool arrives_last(unsigned* arrived, int count, int team, bool leads) {
    __shared__ bool last[kTeams];
    team_sync(team);
    if (leads) {
        if constexpr (kClosing == RELEASE) {
            last[team] = count_arrival(arrived) == count - 1;
            if (last[team]) *arrived = 0;    // for the next launch
        } else {
            __threadfence();
            last[team] = atomicAdd(arrived, 1u) == count - 1;
            if (last[team]) *arrived = 0;
            __threadfence();
        }
    }
    team_sync(team);
    return last[team];
}

// Normalise four elements of a head and write them; lse with the first four.
__device__ inline void write_out(Scalar* out, float* lse, int quad, const Merged& merged) {
    const bool empty = merged.total == 0.0f;
    const float inverse = empty ? 0.0f : 1.0f / merged.total;
    Scalar four[4];
    from_float(four[0], merged.sums.x * inverse), from_float(four[1], merged.sums.y * inverse);
    from_float(four[2], merged.sums.z * inverse), from_float(four[3], merged.sums.w * inverse);
    for (int e = 0; e < 4; ++e) out[quad * 4 + e] = four[e];
    if (quad == 0) *lse = empty ? -CUDART_INF_F : merged.most * kLn2 + logf(merged.total);
}

// Rows of query tokens without a key, of every gridDim.x-th sequence.
__device__ inline void write_empty(
    Scalar* out, float* lse, const Shares& shares, const int* query_start_loc, int num_q_heads, long long out_stride,
    const float* sinks) {
    for (int seq = blockIdx.x; seq < shares.num_seqs; seq += gridDim.x) {
        if (shares.sequences[seq].num_tokens > 0) continue;
        const int past = query_start_loc[seq + 1];
        for (int token = query_start_loc[seq]; token < past; ++token) {
            for (int i = threadIdx.x; i < num_q_heads * kQuads; i += kThreads) {
                const int head = i / kQuads;
                Merged none;
                if constexpr (kSinks) none.add_sink(__ldg(sinks + head) * kLog2e);
                write_out(
                    out + token * out_stride + head * kHeadDim, lse + (long long)token * num_q_heads + head, i % kQuads, none);
            }
        }
    }
}

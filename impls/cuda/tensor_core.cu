// tensor_core.cu -- paged decode attention on tensor cores: persistent CTAs, equal shares, one launch. sm_80 and newer.
//
//   out[i,h,:] = sum_t softmax_t(scale * query[i,h,:] . key[t,g,:]) * value[t,g,:],   g = h / kGroup
//
// Tensors      innermost dimension last
//   query, out              [num_tokens, num_q_heads, kHeadDim], tokens strided      Scalar, 16-byte aligned
//   lse                     [num_tokens, num_q_heads]                                float, natural logarithm
//   key_cache, value_cache  by kLayout, blocks strided                               Scalar, 16-byte aligned
//   block_tables            [num_seqs, table_stride]                                 int32 block ids
//   query_start_loc         [num_seqs + 1]                                           int32, at most one token a sequence
//   seq_lens                [num_seqs]                                               int32 tokens; 0 gives out = 0, lse = -inf
//   sums, stats, arrived    the workspace of partials.cuh
// Work         at most a CTA an SM, block kWarps * 32 threads; how they share it is in shares.cuh
//   team           kTeam warps, the same heads of one share, merged in partials.cuh
//   warp           its own ring of kStages stages, each a tile of K and V, filled by copies that it issues itself: ring.cuh;
//                  or a tile in registers, as 16-byte loads bring it: fragments.cuh
//   tile           scores^T = K query^T, then sums^T += V^T weights^T: tokens and elements are the 16 rows of the MMA and
//                  heads its 8 columns, so that a group of up to 8 leaves no half of a tile empty
// Reads        no table entry past the last block, no slot past seq_lens[s]; K and V once for kHeads query heads.
// Hides        the block id of a tile is fetched one fill ahead, a tile's bytes kStages tiles (by loads, one) ahead, also across segments.
// Sums         in float; weights are rounded to Scalar for the second product.

#include "accumulator.cuh"
#include "mbarrier.cuh"
#include "partials.cuh"
#include "ring.cuh"

// How tiles come, and what sums them.
#if PA_STAGES == 0
#include "fragments.cuh"
using Tiles = Fragments;
using Sums = FragmentAccumulator;
#else
using Tiles = Ring;
using Sums = Accumulator;
#endif

static_assert(kRingBytes + sizeof(Partials) == PA_WARP_BYTES, "PA_WARP_BYTES must be what a warp takes of shared memory");

// Merge and write, or leave for a later team, what the team's warps hold of a segment.
__device__ __forceinline__ void finish(
    Partials* partials, const Shares& shares, const Segment& segment, const Holding& early, const Workspace& workspace, int column,
    int lane_of_heads, int team, int num_heads, unsigned* arrived, Scalar* out, float* lse) {
    const int thread = threadIdx.x % (kTeam * 32);
    const Holding holding = kClosing == RELEASE ? early : Holding(shares, segment, column, lane_of_heads);
    const Spread& spread = holding.spread;
    const bool whole = holding.whole;
    const int place = holding.place;
    team_sync(team);
    for (int i = thread; i < num_heads * kQuads; i += kTeam * 32) {
        const int head = i / kQuads, quad = i % kQuads;
        const Merged merged = merge_team(partials, head, quad);
        if (whole) write_out(out + head * kHeadDim, lse + head, quad, merged);
        else store(workspace, place, head, quad, merged);
    }
    if (!whole && arrives_last(arrived, spread.count(), team, thread == 0)) {
        for (int i = thread; i < num_heads * kQuads; i += kTeam * 32) {
            const int head = i / kQuads, quad = i % kQuads;
            write_out(out + head * kHeadDim, lse + head, quad, merge_shares(workspace, spread, head, quad));
        }
    }
    team_sync(team);    // all have read the partials, before the next are stored
}

// Write what a warp holds of a sequence that it took by itself.
__device__ __forceinline__ void finish_solo(const Partials& partials, int lane, int num_heads, Scalar* out, float* lse) {
    __syncwarp();
    for (int i = lane; i < num_heads * kQuads; i += 32) {
        const int head = i / kQuads, quad = i % kQuads;
        write_out(out + head * kHeadDim, lse + head, quad, merge_team<1>(&partials, head, quad));
    }
    __syncwarp();    // all have read the partials
}

// Rows without a key, of every gridDim.x-th sequence.
__device__ inline void write_empty(
    Scalar* out, float* lse, const Shares& shares, const int* query_start_loc, int num_q_heads, long long out_stride) {
    for (int seq = blockIdx.x; seq < shares.num_seqs; seq += gridDim.x) {
        if (shares.sequences[seq].num_tokens > 0) continue;
        const int token = query_start_loc[seq];
        if (token == query_start_loc[seq + 1]) continue;
        for (int i = threadIdx.x; i < num_q_heads * kQuads; i += kThreads) {
            const int head = i / kQuads;
            write_out(
                out + token * out_stride + head * kHeadDim, lse + (long long)token * num_q_heads + head, i % kQuads, Merged());
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) tensor_core(
    Scalar* out, float* lse, const Scalar* query, const Scalar* key_cache, const Scalar* value_cache,
    const int* block_tables, const int* query_start_loc, const int* seq_lens,
    int num_seqs, int num_q_heads, int num_kv_heads,
    long long table_stride, long long query_stride, long long out_stride, long long key_stride, long long value_stride,
    float scale, float4* sums, float2* stats, unsigned* arrived, int lanes) {
    extern __shared__ __align__(128) unsigned char memory[];    // rings, partials, sequences; sized by tensor_core.py
    __shared__ Barrier barriers[kWarps][kStages + kLoads];    // no array is empty
    Partials* all_partials = reinterpret_cast<Partials*>(memory + kWarps * kRingBytes);
    Sequence* sequences = reinterpret_cast<Sequence*>(all_partials + kWarps);

    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (lane == 0) {
        for (int stage = 0; stage < kStages; ++stage) initialise(&barriers[warp][stage], kArrivals);
        publish_barriers();
    }
    list_sequences(sequences, seq_lens, query_start_loc, num_seqs);
    if constexpr (kSolo > 0) list_solo(sequences, num_seqs);

    const int team = warp / kTeam, global_team = blockIdx.x * kTeams + team, num_heads_kv = num_kv_heads * kParts;
    const Shares shares(sequences, num_seqs, lanes, num_heads_kv / lanes, gridDim.x * kTeams);
    const int column = global_team / lanes, lane_of_heads = global_team % lanes;
    if (column < shares.columns || kSolo > 0) {
        int end = shares.begin(column + 1);
        const int begin = shares.begin(column);
        Segment segment = shares.find(begin, end);
        int position = begin + (warp % kTeam + kTeam - begin % kTeam) % kTeam;    // the warp's: every kTeam-th
        if constexpr (kOpening != PLAIN) {
            const int heads = segment.round * lanes + lane_of_heads;
            ask_for_rows(
                query + query_start_loc[segment.seq] * query_stride + (heads / kParts * kGroup + heads % kParts * kHeads) * kHeadDim,
                kHeads * kHeadDim * sizeof(Scalar), threadIdx.x % (kTeam * 32));
        }
        Way way(shares, num_heads_kv / lanes);
        Tiles tiles(
            {key_cache, value_cache, block_tables, key_stride, value_stride, table_stride, num_kv_heads, lanes, lane_of_heads},
            shares, segment, position, end, memory + warp * kRingBytes, barriers[warp], lane);
        const Workspace workspace = {sums, stats, arrived};
        for (bool more = kSolo == 0 || begin < end || way.go_on(shares, segment, end, position); more;) {
            const int heads = segment.round * lanes + lane_of_heads;    // which part of which KV head
            const int q_head = heads / kParts * kGroup + heads % kParts * kHeads;
            const int num_heads = min(kHeads, kGroup - heads % kParts * kHeads);
            const int token = query_start_loc[segment.seq], num_tokens = sequences[segment.seq].num_tokens;

            Sums mine(query + token * query_stride + q_head * kHeadDim, num_heads, scale * kLog2e, lane);
            Holding early;
            if constexpr (kClosing == RELEASE) early = Holding(shares, segment, column, lane_of_heads).kept();
            for (; position < segment.end; position += way.stride()) {
                const int first_token = (position - segment.first) * kTile;
                mine.add(tiles.wait(), first_token, num_tokens - first_token);
                tiles.refill();
            }
            mine.leave(all_partials[warp]);
            if (way.solo) {
                finish_solo(
                    all_partials[warp], lane, num_heads, out + token * out_stride + q_head * kHeadDim,
                    lse + (long long)token * num_q_heads + q_head);
            } else {
                finish(
                    all_partials + team * kTeam, shares, segment, early, workspace, column, lane_of_heads, team, num_heads,
                    arrived + (long long)segment.seq * num_heads_kv + heads,
                    out + token * out_stride + q_head * kHeadDim, lse + (long long)token * num_q_heads + q_head);
            }
            if constexpr (kSolo > 0) {
                more = way.go_on(shares, segment, end, position);
            } else {
                if (segment.end == end) break;
                segment = shares.after(segment, end);
            }
        }
    }
    write_empty(out, lse, shares, query_start_loc, num_q_heads, out_stride);
}

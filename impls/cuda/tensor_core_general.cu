// tensor_core_general.cu -- as tensor_core.cu, with all that is asked besides plain decode: several query tokens a sequence, 8-bit
// caches, a sliding window, softcap, ALiBi, sinks.
//
//   out[i,h,:] = sum_t softmax_t(a[i,h,t]) * value[t,g,:],   g = h / group,   a: scores.cuh, t: the tokens that token i sees
//
// Tensors      as in tensor_core.cu, but for
//   query_start_loc         [num_seqs + 1]                                           int32, at most kQueries tokens a sequence
//   key_cache, value_cache  by kLayout, blocks strided                               Cache, 16-byte aligned
//   layer                   scales of 8-bit caches, sinks, slopes: scores.cuh        float
// Work         as in tensor_core.cu. Rows of the second factor of both products are query heads of all query tokens of a sequence:
//              8 a column of MMA tiles, of which a warp has up to 4; more rows are a crew's, whose warps read the same tiles
// Reads        no table entry of a block, and no slot of a tile, that no query token sees; K and V once for kRows query rows.
// Sums         in float; weights are rounded to Factor for the second product.

#include "early.cuh"
#include "lazy.cuh"
#include "left.cuh"
#include "mbarrier.cuh"

static_assert(
    kWarps / kCrew * kRingBytes + kWarps * sizeof(Partials) + kTeams * kQueriesBytes == PA_CTA_BYTES,
    "PA_CTA_BYTES must be what a CTA takes of shared memory, besides the list of sequences");

constexpr bool kAlone = kCrew == 1 && kSlices == 1;    // a warp leaves all rows of the part at once

// Where the rows of a part go.
struct Output {
    Scalar* out;
    float* lse;
    const float* sinks;    // from the KV head's first query head on
    Tokens tokens;         // of the sequence
    int first_row;         // of the part, among the KV head's
    int q_head;            // the KV head's first
    int num_q_heads;
    long long out_stride;
    Prefix prefix;
    Left left;             // OWN

    // Four elements of a row; its statistics, or its lse, with the first four.
    __device__ void write(int row, int quad, Merged merged) const {
        const int of_head = first_row + row, head = of_head % kGroup;
        if constexpr (kRole == SHARED) {
            const long long place = (tokens.first + of_head / kGroup) * num_q_heads + q_head + head;
            prefix.sums[place * kQuads + quad] = merged.sums;
            if (quad == 0) prefix.stats[place] = make_float2(merged.most, merged.total);
        } else {
            const long long token = tokens[of_head / kGroup], its = token * num_q_heads + q_head + head;
            if constexpr (kRole == OWN) left.add_to(merged, prefix, of_head / kGroup, num_q_heads, q_head + head, quad);
            if constexpr (kSinks) merged.add_sink(__ldg(sinks + head) * kLog2e);
            write_out(out + token * out_stride + (q_head + head) * kHeadDim, lse + its, quad, merged);
        }
    }
};

// Merge what the team's warps left of a slice of the part's rows, and write it or store it for a later team.
__device__ __forceinline__ void merge_slice(
    const Partials* partials, int slice, bool whole, const Workspace& workspace, int place, int thread, int num_rows,
    const Output& output) {
    for (int i = thread; i < (kAlone ? num_rows : kCrew * kSlice) * kQuads; i += kTeam * 32) {
        int row = i / kQuads, of_slice = row, warp = 0;
        const int quad = i % kQuads;
        if constexpr (!kAlone) {
            warp = row / kSlice, of_slice = row % kSlice, row = warp * kWarpRows + slice * kSlice + of_slice;
            if (row >= num_rows) continue;
        }
        const Merged merged = merge_team(partials + warp, of_slice, quad);
        if (whole) output.write(row, quad, merged);
        else store(workspace, place, row, quad, merged);
    }
}

// Merge and write, or leave for a later team, what the team's warps hold of a segment.
__device__ __forceinline__ void finish(
    LazyAccumulator& mine, Partials& own, const Partials* partials, const Shares& shares, const Segment& segment,
    const Holding& early, const Workspace& workspace, int column, int lane_of_heads, int team, int num_rows, float value_scale,
    unsigned* arrived, const Output& output) {
    mine.leave(own, 0, value_scale);
    const int thread = threadIdx.x % (kTeam * 32);
    const Holding holding = kClosing == RELEASE ? early : Holding(shares, segment, column, lane_of_heads);
    const Spread& spread = holding.spread;
    const bool whole = holding.whole;
    const int place = holding.place;
    team_sync(team);
    merge_slice(partials, 0, whole, workspace, place, thread, num_rows, output);
#pragma unroll
    for (int slice = 1; slice < kSlices; ++slice) {
        team_sync(team);    // all have read the slice before
        mine.leave(own, slice, value_scale);
        team_sync(team);
        merge_slice(partials, slice, whole, workspace, place, thread, num_rows, output);
    }
    if (!whole && arrives_last(arrived, spread.count(), team, thread == 0)) {
        for (int i = thread; i < num_rows * kQuads; i += kTeam * 32) {
            const int row = i / kQuads, quad = i % kQuads;
            output.write(row, quad, merge_shares(workspace, spread, row, quad));
        }
    }
    team_sync(team);    // all have read the partials, before the next are stored
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) tensor_core_general(
    Scalar* out, float* lse, const Scalar* query, const Cache* key_cache, const Cache* value_cache,
    const int* block_tables, const int* query_start_loc, const int* seq_lens,
    int num_seqs, int num_q_heads, int num_kv_heads,
    long long table_stride, long long query_stride, long long out_stride, long long key_stride, long long value_stride,
    float scale LAYER_PARAMETER PREFIX_PARAMETER, float4* sums, float2* stats, unsigned* arrived, int lanes) {
    extern __shared__ __align__(128) unsigned char memory[];    // rings, partials, queries, sequences; sized by tensor_core.py
    __shared__ Barrier barriers[kWarps / kCrew][kStages];
    Partials* all_partials = reinterpret_cast<Partials*>(memory + kWarps / kCrew * kRingBytes);
    unsigned char* all_queries = reinterpret_cast<unsigned char*>(all_partials + kWarps);
    Sequence* sequences = reinterpret_cast<Sequence*>(all_queries + kTeams * kQueriesBytes);

    if constexpr (kRole == SHARED) let_next_begin();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int crew = warp / kCrew;    // of the CTA
    if (lane == 0 && warp % kCrew == 0) {
        for (int stage = 0; stage < kStages; ++stage) initialise(&barriers[crew][stage], kArrivals);
        publish_barriers();
    }
    list_sequences(sequences, seq_lens, query_start_loc, num_seqs, prefix.firsts);

    const int team = warp / kTeam, global_team = blockIdx.x * kTeams + team, num_parts = num_kv_heads * kParts;
    const Shares shares(sequences, num_seqs, lanes, num_parts / lanes, gridDim.x * kTeams);
    const int column = global_team / lanes, lane_of_heads = global_team % lanes;
    if (column < shares.columns) {
        const int end = shares.begin(column + 1), begin = shares.begin(column);
        Segment segment = shares.find(begin, end);
        int position = begin + (crew % kCrews + kCrews - begin % kCrews) % kCrews;    // the crew's: every kCrews-th
        if constexpr (kOpening != PLAIN) {    // of the first query token
            const int q_head = (segment.round * lanes + lane_of_heads) / kParts * kGroup;
            ask_for_rows(
                query + query_start_loc[segment.seq] * query_stride + q_head * kHeadDim, kGroup * kHeadDim * sizeof(Scalar),
                threadIdx.x % (kTeam * 32));
        }
        Ring ring(
            {key_cache, value_cache, block_tables, key_stride, value_stride, table_stride, num_kv_heads, lanes, lane_of_heads,
             prefix.table_rows},
            shares, segment, position, end, memory + crew * kRingBytes, barriers[crew], lane, crew, warp % kCrew == 0);
        const Workspace workspace = {sums, stats, arrived};
        Queries* queries = reinterpret_cast<Queries*>(all_queries) + team;
        while (true) {
            const int part = segment.round * lanes + lane_of_heads;    // of all KV heads' parts
            const int kv_head = part / kParts, first_row = part % kParts * kRows;
            const Sequence& sequence = sequences[segment.seq];
            const int num_rows = min(kRows, kGroup * sequence.num_queries() - first_row);
            const int q_head = kv_head * kGroup;    // the first
            const int first_query = query_start_loc[segment.seq];
            const Tokens tokens = {first_query, kRole == SHARED ? prefix.tokens + first_query : nullptr};
            const Left left(prefix, segment.seq, sequence);
            const Scalar* rows = query + q_head * kHeadDim;
            if constexpr (!kInRegisters) {
                queries->fill(rows, tokens, first_row, num_rows, query_stride, scale, threadIdx.x % (kTeam * 32));
                team_sync(team);
            }
            const int before = warp % kCrew * kWarpRows;
            const Scoring scoring(layer, lane, first_row + before, first_row + num_rows, sequence, q_head);
            LazyAccumulator mine(
                rows, tokens, first_row, before, num_rows, query_stride, queries, scale, scale_of(scale, layer, kv_head), scoring,
                lane);
            Holding early;
            float value_scale = 1.0f;
            if constexpr (kClosing == RELEASE) {
                early = Holding(shares, segment, column, lane_of_heads).kept();
                value_scale = cache_scale(layer.v_scale, kv_head);
            }
            for (; position < segment.end; position += kCrews) {
                const unsigned char* stage = ring.wait();
                if (kCrew == 1 || before < num_rows) mine.add(stage, shares.token_of(segment, position));
                ring.refill();
            }
            if constexpr (kRole == OWN) wait_for_launch_before();    // which left the pieces' sums
            finish(
                mine, all_partials[warp], all_partials + team * kTeam, shares, segment, early, workspace, column,
                lane_of_heads, team, num_rows, kClosing == RELEASE ? value_scale : cache_scale(layer.v_scale, kv_head),
                arrived + (long long)segment.seq * num_parts + part,
                {out, lse, kSinks ? layer.sinks + q_head : nullptr, tokens, first_row, q_head, num_q_heads, out_stride, prefix,
                 left});
            if (segment.end == end) break;
            segment = shares.after(segment, end);
        }
    }
    if constexpr (kRole == OWN) wait_for_launch_before();
    if constexpr (kRole != SHARED) write_empty(out, lse, shares, query_start_loc, num_q_heads, out_stride, layer.sinks);
}

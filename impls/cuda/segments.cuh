// segments.cuh -- which rows a CTA of warpgroups takes next where few query tokens see many keys: its share of all tiles (shares.cuh),
// segment by segment.
//
// An item is a segment: kRows query rows of one KV head of one sequence, over a range of its tokens.
#pragma once

#include "left.cuh"

constexpr unsigned kAll = 0xffffffffu;
static_assert(kTeam == 4 && kCrew == 4, "PA_TEAM and PA_CREW must be 4: each warpgroup merges rows of its own");

// What a CTA works on; as it lies in shared memory.
struct Item {
    int seq, first_query, num_queries;
    int begin, num_tokens;    // the segment, and the tokens up to its end
    int sees;                 // keys of the sequence that its first query token sees; none where it is not positive
    int part;                 // of all KV heads
    int kv_head;
    int first_row;            // of the part, among the KV head's; -1: there is nothing more to do
    int place;                // in the workspace
    bool whole;               // nothing is to be merged with it
    Spread spread;
    Left left;

    __device__ int first_token() const { return begin; }
    __device__ long long token(int query) const { return first_query + query; }    // which of all query tokens
    __device__ int num_rows() const { return num_queries * kGroup; }
    __device__ int num_keys() const { return first_row < num_rows() ? num_tokens - begin : 0; }    // that any row sees
    // Keys that row `row` sees; rows past the last one are like it.
    __device__ int num_keys(int row) const {
        const int query = min(row / kGroup, num_queries - 1);
        return max(0, min(sees + query, num_tokens) - begin);
    }
};

// A CTA's share.
struct Segments {
    static constexpr bool kDrawn = false;
    const Shares& shares;
    const Prefix& prefix;
    const int* query_start_loc;
    const int lane, column, lane_of_heads;
    int position, end;    // what is left of it

    __device__ Segments(const Shares& shares, const Prefix& prefix, const int* query_start_loc, int lane)
        : shares(shares), prefix(prefix), query_start_loc(query_start_loc), lane(lane), column(blockIdx.x / shares.lanes),
          lane_of_heads(blockIdx.x % shares.lanes) {
        const bool there = column < shares.columns;
        position = there ? shares.begin(column) : 0, end = there ? shares.begin(column + 1) : 0;
    }

    // Write the next segment to `to`, by one lane. The number is of no use.
    __device__ void find(int, Item* to) {
        if (position == end) {
            if (lane == 0) to->first_row = -1;
            return;
        }
        const Segment segment = shares.find(position, end);
        position = segment.end;
        if (lane != 0) return;
        const Sequence& sequence = shares.sequences[segment.seq];
        const int past = segment.first + tiles_of(sequence), part = segment.round * shares.lanes + lane_of_heads;
        const Spread spread(shares, segment.first, past, lane_of_heads);
        const Left left(prefix, segment.seq, sequence);
        *to = {segment.seq, __ldg(query_start_loc + segment.seq), sequence.num_queries(),
               shares.token_of(segment, segment.begin), min(shares.token_of(segment, segment.end), sequence.num_tokens),
               sequence.num_tokens - sequence.num_queries() + 1, part, part / kParts, part % kParts * kRows, spread.place(column),
               segment.begin == segment.first && segment.end == past && left.begin == left.past, spread, left};
    }
};

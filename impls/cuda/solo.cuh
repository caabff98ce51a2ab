// solo.cuh -- short sequences, of up to kSolo tiles, which single warps take whole, each by itself.
//
// To begin and to end a sequence costs a team two trips to memory, a merge and two barriers, also where each warp has one tile of it.
// So of many short ones every warp takes some, and waits for no other. They are on no line. A share is its piece of the line and
// then solo sequences, as many for all teams, to within one a warp: shares cost the same, whatever it costs to begin a sequence, and
// what they hold of a long one is merged while others still work.
#pragma once

#include "shares.cuh"

// A warp's way through its share: segments of the line with its team's other warps, then solo ones.
template <bool kSomeSolo> struct WayOf {
    static constexpr bool solo = false;    // whether the segment is

    __device__ WayOf(const Shares&, int) {}
    __device__ static int stride() { return kCrews; }    // from a tile of the warp to its next
    __device__ static bool go_on(const Shares&, Segment&, int&, int&) { return false; }    // nobody asks
};

// They are numbered, those of a line's first round before those of the next, and dealt to teams by kTeam at a time.
template <> struct WayOf<true> {
    bool solo = false;
    int next = 0, past = 0;    // the warp's: every kTeam-th

    // On lines of so many rounds.
    __device__ WayOf(const Shares& shares, int rounds) {
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), team = blockIdx.x * kTeams + warp / kTeam;
        const int columns = gridDim.x * kTeams / shares.lanes, column = team / shares.lanes;
        if (column >= columns) return;
        const int all = list_of(shares)[shares.num_seqs] * rounds, deals = (all + kTeam - 1) / kTeam;
        const int fewer = deals / columns, more = deals - fewer * columns;    // the last `more` teams have one more
        const int first = column * fewer + max(column + more - columns, 0);
        next = first * kTeam + warp % kTeam;
        past = min((first + fewer + (column + more >= columns)) * kTeam, all);
    }
    __device__ int stride() const { return solo ? 1 : kCrews; }

    // Go on to the next segment, which ends a share that ends at `end`, at its first tile of the warp; return false where there is none.
    __device__ bool go_on(const Shares& shares, Segment& segment, int& end, int& position) {
        if (segment.end < end) {
            segment = shares.after(segment, end);
            return true;
        }
        if (next >= past) return false;
        segment = find(shares, next), end = segment.end, position = 0;
        solo = true, next += kTeam;
        return true;
    }

    __device__ static const int* list_of(const Shares& shares) {
        return reinterpret_cast<const int*>(shares.sequences + shares.num_seqs + 1);
    }
    __device__ static Segment find(const Shares& shares, int number) {
        const int* list = list_of(shares);
        const int each = list[shares.num_seqs], seq = list[number % each];
        return {seq, number / each, 0, 0, tiles_of(shares.sequences[seq])};
    }
};
using Way = WayOf<(kSolo > 0)>;

// List which sequences are solo, and behind as many as there are sequences, how many: [num_seqs + 1], behind `sequences`. All threads
// call it.
__device__ inline void list_solo(Sequence* sequences, int num_seqs) {
    __shared__ int by_warp[kWarps];
    int* list = reinterpret_cast<int*>(sequences + num_seqs + 1);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;    // in earlier turns
    for (int begin = 0; begin <= num_seqs; begin += kThreads) {
        const int seq = begin + threadIdx.x, tiles = seq < num_seqs ? tiles_of(sequences[seq]) : 0;
        const bool is_solo = tiles > 0 && tiles <= kSolo;
        const unsigned solo = __ballot_sync(0xffffffffu, is_solo);
        if (lane == 0) by_warp[warp] = __popc(solo);
        __syncthreads();
        int past = before;
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) past += by_warp[w];
            before += by_warp[w];
        }
        if (is_solo) list[past + __popc(solo & ((1u << lane) - 1))] = seq;
        if (seq == num_seqs) list[num_seqs] = before;
        __syncthreads();    // the list is there, and by_warp may be overwritten
    }
}

// shares.cuh -- the plan, made on the device at the start of each launch: every team of warps gets an equal share of all work.
//
//   part      query heads of one KV head that a warp takes at once; all of a group up to 16
//   tile      kTile tokens of one sequence, the last one perhaps fewer, for one part
//   row       all tiles of all sequences for one part, in order, then (`rounds` times) for the part `lanes` further on
//   lanes     parts that walk the same row side by side, so that heads of a block are read at about the same time; a few teams
//             may be left over, and have no share
//   share     an equal part of a row: teams column * lanes + 0 .. lanes - 1 take share `column`, each for its own part
//   segment   what a share holds of one sequence
//
// Nothing depends on the host but how many teams there are: a captured launch stays right when lengths change.
#pragma once

#include "paged.cuh"

// Specialised by tensor_core.py.
constexpr int kHeads = PA_HEADS;    // query heads of a part
constexpr int kWarps = PA_WARPS;    // of a CTA
constexpr int kTeam = PA_TEAM;      // warps of a team: they take the tiles of a share in turn

constexpr int kParts = (kGroup + kHeads - 1) / kHeads;    // of a group
constexpr int kThreads = kWarps * 32;
constexpr int kTeams = kWarps / kTeam;    // of a CTA
constexpr int kTile = 16;                 // tokens
static_assert(kWarps % kTeam == 0, "PA_TEAM must divide PA_WARPS");

struct alignas(8) Sequence {
    int first_tile;    // tiles of all sequences before it
    int num_tokens;    // 0 without a query token
};

__device__ inline int tiles_of(const Sequence& sequence) { return (sequence.num_tokens + kTile - 1) / kTile; }

// List `sequences` [num_seqs + 1] in shared memory, for all threads to read; the last one ends the list. All threads call it.
__device__ inline void list_sequences(Sequence* sequences, const int* seq_lens, const int* query_start_loc, int num_seqs) {
    __shared__ int by_warp[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;    // tiles of earlier turns
    for (int begin = 0; begin <= num_seqs; begin += kThreads) {
        const int seq = begin + threadIdx.x;
        int num_tokens = 0;
        if (seq < num_seqs) {    // three loads at once, none waits for another
            const int first_query = query_start_loc[seq], past_query = query_start_loc[seq + 1], seq_len = seq_lens[seq];
            num_tokens = first_query < past_query ? max(seq_len, 0) : 0;
        }
        const int tiles = (num_tokens + kTile - 1) / kTile;
        int sum = tiles;    // of the lanes up to this one
        for (int offset = 1; offset < 32; offset *= 2) {
            const int below = __shfl_up_sync(0xffffffffu, sum, offset);
            if (lane >= offset) sum += below;
        }
        if (lane == 31) by_warp[warp] = sum;
        __syncthreads();
        int past = before;
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) past += by_warp[w];
            before += by_warp[w];
        }
        if (seq <= num_seqs) sequences[seq] = {past + sum - tiles, num_tokens};
        __syncthreads();    // the list is there, and by_warp may be overwritten
    }
}

// Positions count the tiles of a row.
struct Segment {
    int seq, round;
    int first;         // position of the sequence's first tile
    int begin, end;    // of what the share holds
};

struct Shares {
    const Sequence* sequences;
    int num_seqs;
    int num_tiles;    // of all sequences
    int lanes;
    int columns;      // shares that a row is cut into; each holds at least one tile
    int shorter;      // tiles of a share; the first `longer` of them have one more
    int longer;

    __device__ Shares(const Sequence* sequences, int num_seqs, int lanes, int rounds, int num_teams)
        : sequences(sequences), num_seqs(num_seqs), num_tiles(sequences[num_seqs].first_tile), lanes(lanes) {
        const int length = num_tiles * rounds;
        columns = min(num_teams / lanes, (length + kTeam - 1) / kTeam);    // a tile for each warp before another share
        shorter = length / max(columns, 1), longer = length - shorter * columns;
    }

    // Where share `column` begins, and the share that `position` is in.
    __device__ int begin(int column) const { return column * shorter + min(column, longer); }
    __device__ int column_of(int position) const {
        const int first_shorter = longer * (shorter + 1);
        return position < first_shorter ? position / (shorter + 1) : longer + (position - first_shorter) / shorter;
    }

    // The segment that begins at `position`, of a share that ends at `end`.
    __device__ Segment find(int position, int end) const {
        const int round = position / num_tiles, tile = position % num_tiles;
        int seq = 0;    // the last sequence that begins at or before the tile; empty ones are passed over
        for (int past = num_seqs; past - seq > 1;) {
            const int middle = (seq + past) / 2;
            if (sequences[middle].first_tile <= tile) seq = middle; else past = middle;
        }
        return make(seq, round, position, end);
    }
    __device__ Segment after(const Segment& segment, int end) const {
        int seq = segment.seq, round = segment.round;
        do {
            if (++seq == num_seqs) seq = 0, ++round;
        } while (sequences[seq].num_tokens == 0);
        return make(seq, round, segment.end, end);
    }
    __device__ Segment make(int seq, int round, int begin, int end) const {
        const int origin = round * num_tiles;
        return {seq, round, origin + sequences[seq].first_tile, begin, min(origin + sequences[seq + 1].first_tile, end)};
    }
};

// shares.cuh -- the plan, made on the device at the start of each launch: every team of warps gets an equal share of all work.
//
//   row       a query row: one head of one query token. Those that read one KV head are counted token by token
//   part      query rows of one KV head that are taken at once; all of a group up to 16, of several tokens up to 64
//   crew      kCrew warps that take a part's tiles together, each for rows of its own; one warp up to 32 rows
//   tile      kTile tokens of one sequence, the last one perhaps fewer, for one part; none that no query token sees
//   line      all tiles of all sequences for one part, in order, then (`rounds` times) for the part `lanes` further on
//   lanes     parts that walk the same line side by side, so that heads of a block are read at about the same time; a few teams
//             may be left over, and have no share
//   share     an equal piece of a line: teams column * lanes + 0 .. lanes - 1 take share `column`, each for its own part
//   segment   what a share holds of one sequence
//   solo      sequences of up to kSolo tiles may be single warps', and then are on no line: solo.cuh
//
// Nothing depends on the host but how many teams there are: a captured launch stays right when lengths change.
#pragma once

#include "paged.cuh"
#include "tile.cuh"

// Specialised by tensor_core.py.
constexpr int kQueries = PA_QUERIES;    // query tokens of a sequence, at most
constexpr int kWindowTokens = PA_WINDOW_TOKENS;    // that a query token sees, itself included; 0 without kWindow
constexpr int kRows = PA_ROWS;          // query rows of a part
constexpr int kHeads = kRows;           // of one query token
constexpr int kWarps = PA_WARPS;        // of a CTA
constexpr int kTeam = PA_TEAM;          // warps of a team: its crews take the tiles of a share in turn
constexpr int kCrew = PA_CREW;          // warps of a crew
#ifdef PA_SOLO
constexpr int kSolo = PA_SOLO;          // tiles
#else
constexpr int kSolo = 0;
#endif

constexpr int kParts = (kGroup * kQueries + kRows - 1) / kRows;    // of a KV head's query rows
constexpr int kThreads = kWarps * 32;
constexpr int kTeams = kWarps / kTeam;    // of a CTA
constexpr int kCrews = kTeam / kCrew;     // of a team
static_assert(kWarps % kTeam == 0, "PA_TEAM must divide PA_WARPS");
static_assert(kTeam % kCrew == 0, "PA_CREW must divide PA_TEAM");
static_assert(kSolo == 0 || kCrew == 1, "PA_SOLO is for warps that have a ring each");
static_assert(kTile % 16 == 0, "PA_TILE must be a multiple of 16, the rows of an MMA tile");

// What a sequence is to one kernel or the other; see prefix.cuh for what it is where prefixes are shared.
enum Role { ALONE, SHARED, OWN };
#ifdef PA_ROLE
constexpr Role kRole = PA_ROLE;
#else
constexpr Role kRole = ALONE;
#endif

// How a launch begins. What it costs is waiting: for lengths, then block ids, then K and V.
//   PLAIN    the list of sequences by all warps, then a search in it
//   QUICK    up to 32 sequences are listed by one warp and found by a vote; L2 is asked for query rows before anyone needs them
enum Opening { PLAIN, QUICK };
#ifdef PA_OPENING
constexpr Opening kOpening = PA_OPENING;
#else
constexpr Opening kOpening = PLAIN;
#endif
constexpr int kFew = kOpening == PLAIN ? 0 : 32;    // sequences, at most, of a quick opening
static_assert(kOpening == PLAIN || (kRole == ALONE && kSolo == 0), "PA_OPENING is for kernels without prefixes and solo sequences");

template <bool kSeveral> struct alignas(8) SequenceOf {
    int first_tile;    // tiles of all sequences before it, on a line
    int num_tokens;    // 0 without a query token

    __device__ SequenceOf(int first_tile, int num_tokens, int, int) : first_tile(first_tile), num_tokens(num_tokens) {}
    __device__ int num_queries() const { return 1; }
    __device__ int first() const { return 0; }
};
template <> struct alignas(16) SequenceOf<true> {
    int first_tile, num_tokens;
    int queries;         // query tokens
    int first_token;     // that is its own, or its part's; a multiple of kTile

    __device__ SequenceOf(int first_tile, int num_tokens, int queries, int first_token)
        : first_tile(first_tile), num_tokens(num_tokens), queries(queries), first_token(first_token) {}
    __device__ int num_queries() const { return queries; }
    __device__ int first() const { return first_token; }
};
using Sequence = SequenceOf<(kQueries > 1 || kRole != ALONE)>;

// The first token that a query token sees: the earliest's window begins first.
__device__ inline int first_seen(const Sequence& sequence) {
    if constexpr (kRole != ALONE) return sequence.first();
    return !kWindow ? 0 : max(sequence.num_tokens - sequence.num_queries() - kWindowTokens + 1, 0);
}
__device__ inline int tiles_of(const Sequence& sequence) {
    return (sequence.num_tokens + kTile - 1) / kTile - first_seen(sequence) / kTile;
}

// Those on a line.
__device__ inline int line_tiles_of(const Sequence& sequence) {
    const int tiles = tiles_of(sequence);
    if constexpr (kSolo > 0) return tiles > kSolo ? tiles : 0;
    return tiles;
}

// The sum of `x` over the lanes up to this one.
__device__ inline int sum_up_to(int x) {
    for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, x, offset);
        if (static_cast<int>(threadIdx.x % 32) >= offset) x += below;
    }
    return x;
}

// As list_sequences, of 1 to kFew sequences, a lane of the first warp each; no load waits for another.
__device__ inline void list_few(Sequence* sequences, const int* seq_lens, const int* query_start_loc, int num_seqs) {
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x, seq = min(lane, num_seqs - 1);
        const int first_query = query_start_loc[seq], past_query = query_start_loc[seq + 1], seq_len = seq_lens[seq];
        const int num_queries = lane < num_seqs ? past_query - first_query : 0;
        const int num_tokens = max(seq_len, 0) & ((min(num_queries, 0) - num_queries) >> 31);    // 0 without a query token
        const int tiles = tiles_of(Sequence(0, num_tokens, num_queries, 0)), sum = sum_up_to(tiles);
        if (lane < num_seqs) {
            sequences[lane] = Sequence(sum - tiles, num_tokens, num_queries, 0);
            if (lane == num_seqs - 1) sequences[num_seqs] = Sequence(sum, 0, 0, 0);
        }
    }
    __syncthreads();
}

// List `sequences` [num_seqs + 1] in shared memory, for all threads to read; the last one ends the list. All threads call it.
// `firsts` [num_seqs] are first tokens, where prefixes are shared.
__device__ inline void list_sequences(
    Sequence* sequences, const int* seq_lens, const int* query_start_loc, int num_seqs, const int* firsts = nullptr) {
    if constexpr (kFew > 0) {
        if (num_seqs > 0 && num_seqs <= kFew) return list_few(sequences, seq_lens, query_start_loc, num_seqs);
    }
    __shared__ int by_warp[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;    // tiles of earlier turns
    for (int begin = 0; begin <= num_seqs; begin += kThreads) {
        const int seq = begin + threadIdx.x;
        int num_tokens = 0, num_queries = 0, first = 0;
        if (seq < num_seqs) {    // three loads at once, none waits for another
            const int first_query = query_start_loc[seq], past_query = query_start_loc[seq + 1], seq_len = seq_lens[seq];
            num_tokens = first_query < past_query ? max(seq_len, 0) : 0;
            if constexpr (kQueries > 1 || kRole != ALONE) num_queries = past_query - first_query;
            if constexpr (kRole != ALONE) first = firsts[seq];
            // A sequence that has become shorter than what it shared is all its own.
            if constexpr (kRole == OWN) first = num_tokens - num_queries >= first ? first : 0;
        }
        const int tiles = line_tiles_of(Sequence(0, num_tokens, num_queries, first));
        const int sum = sum_up_to(tiles);
        if (lane == 31) by_warp[warp] = sum;
        __syncthreads();
        int past = before;
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) past += by_warp[w];
            before += by_warp[w];
        }
        if (seq <= num_seqs) sequences[seq] = Sequence(past + sum - tiles, num_tokens, num_queries, first);
        __syncthreads();    // the list is there, and by_warp may be overwritten
    }
}

// Positions count the tiles of a line.
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
    int columns;      // shares that a line is cut into; each holds at least one tile
    int shorter;      // tiles of a share; the first `longer` of them have one more
    int longer;

    __device__ Shares(const Sequence* sequences, int num_seqs, int lanes, int rounds, int num_teams)
        : sequences(sequences), num_seqs(num_seqs), num_tiles(sequences[num_seqs].first_tile), lanes(lanes) {
        const int length = num_tiles * rounds;
        columns = min(num_teams / lanes, (length + kCrews - 1) / kCrews);    // a tile for each crew before another share
        shorter = length / max(columns, 1), longer = length - shorter * columns;
    }

    // Where share `column` begins, and the share that `position` is in.
    __device__ int begin(int column) const {
        if constexpr (kSolo > 0) column = min(column, columns);    // teams without a piece of the line may have solo sequences
        return column * shorter + min(column, longer);
    }
    __device__ int column_of(int position) const {
        const int first_shorter = longer * (shorter + 1);
        return position < first_shorter ? position / (shorter + 1) : longer + (position - first_shorter) / shorter;
    }

    // The first token of a segment's tile.
    __device__ int token_of(const Segment& segment, int position) const {
        return (position - segment.first + first_seen(sequences[segment.seq]) / kTile) * kTile;
    }

    // The segment that begins at `position`, of a share that ends at `end`.
    __device__ Segment find(int position, int end) const {
        if constexpr (kFew > 0) {
            if (num_seqs <= kFew) return find_few(position, end);
        }
        if constexpr (kSolo > 0) if (position == end) return {0, 0, end, end, end};
        const int round = position / num_tiles, tile = position % num_tiles;
        int seq = 0;    // the last sequence that begins at or before the tile; empty ones are passed over
        for (int past = num_seqs; past - seq > 1;) {
            const int middle = (seq + past) / 2;
            if (sequences[middle].first_tile <= tile) seq = middle; else past = middle;
        }
        return make(seq, round, position, end);
    }
    __device__ Segment find_few(int position, int end) const {    // all lanes of a warp call it
        int round = 0, tile = position;
        for (; tile >= num_tiles; tile -= num_tiles) ++round;
        const int lane = threadIdx.x % 32;
        const bool begins = lane < num_seqs && sequences[min(lane, num_seqs - 1)].first_tile <= tile;
        return make(__popc(__ballot_sync(0xffffffffu, begins)) - 1, round, position, end);
    }
    __device__ Segment after(const Segment& segment, int end) const {
        int seq = segment.seq, round = segment.round;
        do {
            if (++seq == num_seqs) seq = 0, ++round;
        } while (kSolo > 0 ? line_tiles_of(sequences[seq]) == 0 : sequences[seq].num_tokens == 0);
        return make(seq, round, segment.end, end);
    }
    __device__ Segment make(int seq, int round, int begin, int end) const {
        const int origin = round * num_tiles;
        return {seq, round, origin + sequences[seq].first_tile, begin, min(origin + sequences[seq + 1].first_tile, end)};
    }
};

// ring.cuh -- a warp's tiles of K and V on their way to shared memory: it issues the copies of those to come itself.
// fragments.cuh is the way without shared memory; both ask the cursor which tile is next.
//
//   BULK     a run at a time, the tokens of a tile that follow one another in memory and end up so in a stage; lanes 0-15 copy
//            the runs of K, 16-31 those of V; where there are more than 16, each lane copies one of K and one of V
//   ASYNC    16 bytes a lane, as sm_80 has it, too
//
// A crew of warps has one ring, which its first warp fills; all its warps read every stage.
#pragma once

#include "mbarrier.cuh"
#include "meet.cuh"
#include "solo.cuh"

// Specialised by tensor_core.py.
constexpr int kStages = PA_STAGES;
enum Copy { BULK, ASYNC, LOAD, LOAD_ONCE };
constexpr Copy kCopy = PA_COPY;
constexpr bool kLoads = kCopy == LOAD || kCopy == LOAD_ONCE;    // no ring: kStages is 0

__device__ constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// A swizzled cache lands as it lies there; chunk by chunk, as it would if the tile were one block's, so that rows of blocks below eight
// tokens are spread over the banks, too. Rows of others are spread by 16 bytes of padding.
constexpr bool kSwizzled = kLayout == HND_SWIZZLED;
constexpr int kRun = kCopy == BULK && kSwizzled ? greatest_common_divisor(kBlockSize, kTile) : 1;    // tokens
constexpr int kRuns = kTile / kRun;
constexpr int kRunLanes = kRuns <= 16 ? 16 : 32;                  // that fetch a block each, and copy a run each of K or of V
constexpr int kRowBytes = kHeadDim * sizeof(Cache);
constexpr int kChunks = kRowBytes / 16;                           // of a row
constexpr int kWholeChunks = kRowBytes / 128 * 8;                 // that are swizzled, in groups of eight
constexpr bool kByRow = kCopy != BULK || kBlockSize % 8 == 0;     // by the token's row of the tile, not its slot of the block
constexpr int kPitch = kSwizzled || kChunks % 2 == 1 ? kRowBytes : kRowBytes + 16;    // bytes from a row to the next, in a stage
constexpr int kTileBytes = kTile * kPitch;                        // of K or of V
constexpr int kRingBytes = kStages * 2 * kTileBytes;
constexpr int kArrivals = kCopy == BULK ? 1 : 32;                 // at a stage's barrier, besides the bytes
constexpr bool kOneBlock = kBlockSize % kTile == 0;               // holds all tokens of a tile
static_assert(kRuns <= 32, "a lane copies one run");
static_assert(kCopy != BULK || kHasBulkCopies, "PA_COPY=BULK needs sm_90 or newer");

// The caches, as the teams of one lane see them.
struct Caches {
    const Cache* key_cache;
    const Cache* value_cache;
    const int* block_tables;
    long long key_stride, value_stride, table_stride;
    int num_kv_heads, lanes, lane_of_heads;
    const int* table_rows = nullptr;    // [num_seqs], with SHARED: whose table has the run
};

// Ask L2 for what `thread` has of a team's `bytes` of query rows.
__device__ inline void ask_for_rows(const Scalar* rows, int bytes, int thread) {
    if (thread * 128 < bytes) ask_ahead(reinterpret_cast<const unsigned char*>(rows) + thread * 128);
}

// The next tile to copy: every kCrews-th of a share that ends at `end`, across segments; then of solo ones.
struct Cursor : Way {
    const Caches caches;
    const Shares& shares;
    const int lane;
    int end;
    const bool fills;    // else another warp of the crew does

    Segment segment;    // of the tile
    int position;       // of it
    int block;          // that holds the lane's run of it, fetched ahead

    __device__ Cursor(
        const Caches& caches, const Shares& shares, const Segment& segment, int position, int end, int lane, bool fills = true)
        : Way(shares, caches.num_kv_heads * kParts / caches.lanes), caches(caches), shares(shares), lane(lane), end(end),
          fills(fills), segment(segment), position(position) {
        fetch();
    }

    __device__ void advance() {
        position += stride();
        fetch();
    }

    __device__ int kv_head() const { return (segment.round * caches.lanes + caches.lane_of_heads) / kParts; }
    __device__ int tile_token() const { return shares.token_of(segment, position); }    // the first
    __device__ int tile_tokens() const { return min(kTile, shares.sequences[segment.seq].num_tokens - tile_token()); }

    // Whether a query token sees any of the tile's first `tokens`. If not, their block may be another sequence's by now.
    __device__ bool is_seen(int tokens) const {
        return tile_token() + tokens > first_seen(shares.sequences[segment.seq]);
    }

    // Find the segment of `position`, and the block of the lane's run; no table entry past the last token's is read.
    __device__ void fetch() {
        if constexpr (kSolo > 0) while (position >= segment.end && go_on(shares, segment, end, position)) {}
        if (position >= end || (kCrew > 1 && !fills)) return;
        if constexpr (kSolo == 0) while (position >= segment.end) segment = shares.after(segment, end);
        const int run_token = kOneBlock ? 0 : lane % kRunLanes % kRuns * kRun;
        if (run_token >= tile_tokens()) return;
        if constexpr (kWindow && !kOneBlock) if (!is_seen(run_token + kRun)) return;
        int table_row = segment.seq;
        if constexpr (kRole == SHARED) table_row = __ldg(caches.table_rows + segment.seq);
        block = caches.block_tables[table_row * caches.table_stride + (tile_token() + run_token) / kBlockSize];
    }
};

struct Ring : Cursor {
    unsigned char* const stages;    // [kStages, 2, kTileBytes]
    Barrier* const barriers;        // [kStages]
    const int crew;                 // of the CTA

    int stage = 0;    // to be read next
    unsigned parity = 0;

    // Start the copies of the first kStages tiles from `position` on, every kCrews-th of a share that ends at `end`.
    __device__ Ring(
        const Caches& caches, const Shares& shares, const Segment& segment, int position, int end, unsigned char* stages,
        Barrier* barriers, int lane, int crew = 0, bool fills = true)
        : Cursor(caches, shares, segment, position, end, lane, fills), stages(stages), barriers(barriers), crew(crew) {
#pragma unroll 1    // one copy of the code that fills is enough
        for (int i = 0; i < kStages; ++i) fill(i);
    }

    // The stage of the next tile, once it has landed.
    __device__ const unsigned char* wait() const {
        ::wait(barriers + stage, parity);
        return stages + stage * 2 * kTileBytes;
    }

    // Give the stage back, which all lanes of the crew have read, for a tile to come.
    __device__ void refill() {
        if constexpr (kCrew == 1) __syncwarp();
        else meet<kCrew * 32>(1 + kTeams + crew);
        fill(stage);
        if (++stage == kStages) stage = 0, parity ^= 1;
    }

    __device__ void fill(int to) {
        if (position >= end || (kCrew > 1 && !fills)) return;
        const int kv_head = this->kv_head();
        unsigned char* keys = stages + to * 2 * kTileBytes;
        if constexpr (kCopy == BULK) {
            if constexpr (kRunLanes == 16) {
                const bool is_value = lane >= 16;
                copy_run(
                    keys + is_value * kTileBytes, is_value ? caches.value_cache : caches.key_cache,
                    {is_value ? caches.value_stride : caches.key_stride, caches.num_kv_heads, kv_head}, barriers + to);
            } else {
                copy_run(keys, caches.key_cache, {caches.key_stride, caches.num_kv_heads, kv_head}, barriers + to);
                copy_run(
                    keys + kTileBytes, caches.value_cache, {caches.value_stride, caches.num_kv_heads, kv_head}, barriers + to);
            }
            __syncwarp();
            if (lane == 0) arrive(barriers + to);    // the phase ends with the last byte, not before all said what they expect
        } else {
            copy_chunks(keys, caches.key_cache, {caches.key_stride, caches.num_kv_heads, kv_head});
            copy_chunks(keys + kTileBytes, caches.value_cache, {caches.value_stride, caches.num_kv_heads, kv_head});
            arrive_after_copies(barriers + to);
        }
        advance();
    }

    __device__ void copy_run(unsigned char* tile, const Cache* cache, const KvHead& head, Barrier* barrier) {
        const int run = lane % kRunLanes, tokens = run < kRuns ? min(kRun, tile_tokens() - run * kRun) : 0;
        if (tokens <= 0) return;
        if constexpr (kWindow) if (!is_seen((run + 1) * kRun)) return;
        const Cache* from = cache + head.row(block, (tile_token() + run * kRun) % kBlockSize);
        copy_bulk(tile + run * kRun * kPitch, from, tokens * kRowBytes, barrier);
    }

    __device__ void copy_chunks(unsigned char* tile, const Cache* cache, const KvHead& head) {
        const int tokens = tile_tokens(), first_slot = tile_token() % kBlockSize;
        const Cache* first_row = cache + head.row(block, first_slot);    // where one block holds them all
#pragma unroll
        for (int begin = 0; begin < kTile * kChunks; begin += 32) {
            const int i = begin + lane, row = i / kChunks, chunk = i % kChunks;
            const Cache* from = first_row + row * head.row_stride();
            if constexpr (!kOneBlock) {
                const int its_block = __shfl_sync(0xffffffffu, block, row % kTile);
                from = cache + head.row(its_block, (first_slot + row) % kBlockSize);
            }
            if constexpr (kWindow) if (!is_seen(row + 1)) continue;
            int place = chunk;
            if constexpr (kSwizzled && kBlockSize % 8 != 0) {
                if (chunk < kWholeChunks) place ^= ((first_slot + row) % kBlockSize ^ row) % 8;
            }
            if (row < tokens) copy_chunk(tile + row * kPitch + place * 16, from + chunk * (16 / sizeof(Cache)));
        }
    }
};

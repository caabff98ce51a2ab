// parcels.cuh -- the warpgroup that copies, where a cache is swizzled: bulk copies of whole runs, as they lie there, to a ring of
// parcels, and from there to the rings of stages.cuh. One copies 4 KB where copies of 16 bytes a lane are 256.
//
// A row of a swizzled cache is what products want of it, but for its columns of 64 elements, which they want one behind the other: a
// parcel's chunks move as they are, 128 bytes of a row at a time. A parcel is half a tile of keys or of values; parcels are fed in the
// order in which tiles are used, kParcels ahead and on into the next items.
#pragma once

#include "roles.cuh"

constexpr int kParcels = PA_PARCELS;
constexpr int kParcelTokens = kTile / 2;
constexpr int kRowBytes = kHeadDim * sizeof(Scalar);

__device__ constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }
constexpr int kRun = greatest_common_divisor(kBlockSize, kParcelTokens);    // tokens that follow one another in the cache
constexpr int kRuns = kParcelTokens / kRun;                                 // of a parcel, a lane each
static_assert(kLayout == HND_SWIZZLED, "PA_LAYOUT must be HND_SWIZZLED for parcels");
static_assert(kRun % 8 == 0 && kRuns <= 32, "PA_BLOCK_SIZE must be a multiple of 8: a slot's chunks lie as its row's do");

struct Staging {
    alignas(1024) unsigned char parcels[kParcels][kParcelTokens * kRowBytes];
    Barrier full[kParcels];
    Item item;    // that parcels are fed of
};
static_assert(sizeof(Staging) == PA_STAGING, "PA_STAGING must be the bytes of Staging, which the launch gives");

// By one thread, before all others begin, and before stages.cuh's are published.
__device__ inline void initialise(Staging& staging) {
    for (int parcel = 0; parcel < kParcels; ++parcel) initialise(&staging.full[parcel], 1);
}

// A place in the ring of parcels.
struct ParcelPlace {
    int parcel = 0;
    unsigned parity = 0;
    __device__ void step() { if (++parcel == kParcels) parcel = 0, parity ^= 1; }
};

// The warp that feeds the ring, number 0, as Copier takes the tiles of items: keys 0, keys 1, values 0, keys 2, values 1, ...
struct Feeder {
    Staging& staging;
    const Tables& tables;
    Segments segments;
    const int lane;
    int seq = 0, begin = 0, num_tokens = 0, kv_head = 0;    // of the item
    int num_tiles = 0, next = 0;    // of the item, and which half of a tile of keys or of values comes next
    bool ended;
    int block = 0;                  // of the lane's run in it, fetched ahead
    ParcelPlace place;

    __device__ Feeder(Staging& staging, const Tables& tables, const Segments& segments, int warp, int lane)
        : staging(staging), tables(tables), segments(segments), lane(lane), ended(warp > 0) {
        find();
        for (int i = 0; i < kParcels; ++i) feed();
    }

    __device__ bool is_keys() const { return next / 2 != 2 * num_tiles - 1 && (next / 2 == 0 || next / 2 % 2 == 1); }
    __device__ int tile() const {
        const int unit = next / 2;
        return unit == 0 ? 0 : unit == 2 * num_tiles - 1 ? num_tiles - 1 : unit % 2 == 1 ? (unit + 1) / 2 : unit / 2 - 1;
    }
    __device__ int token() const { return begin + tile() * kTile + next % 2 * kParcelTokens + lane * kRun; }    // the lane's first
    __device__ bool there() const { return lane < kRuns && token() < num_tokens; }

    // Go to the next item where one is done, and fetch block ids. No table entry past the last token's is read.
    __device__ void find() {
        while (!ended && next == 4 * num_tiles) {
            segments.find(0, &staging.item);
            __syncwarp();
            const Item& item = staging.item;
            ended = item.first_row < 0;
            seq = item.seq, begin = item.begin, num_tokens = item.num_tokens, kv_head = item.kv_head;
            num_tiles = ended ? 0 : (item.num_keys() + kTile - 1) / kTile, next = 0;
            __syncwarp();
        }
        if (!ended && there()) block = __ldg(tables.block_tables + seq * tables.table_stride + token() / kBlockSize);
    }

    // Fill a parcel that all have read.
    __device__ void feed() {
        if (ended) return;
        Barrier* full = &staging.full[place.parcel];
        if (there()) {
            const bool keys = is_keys();
            const KvHead head{keys ? tables.key_stride : tables.value_stride, tables.num_kv_heads, kv_head};
            const Scalar* from = (keys ? tables.key_cache : tables.value_cache) + head.row(block, token() % kBlockSize);
            unsigned char* to = staging.parcels[place.parcel] + lane * kRun * kRowBytes;
            copy_bulk(to, from, min(kRun, num_tokens - token()) * kRowBytes, full);
        }
        __syncwarp();
        if (lane == 0) arrive(full);
        place.step();
        ++next;
        find();
    }
};

// A thread that copies.
struct Mover : Copier {
    static constexpr int kRowsOfThread = kParcelTokens / kStride;
    Staging& staging;
    Feeder feeder;
    ParcelPlace from;

    __device__ Mover(Shared& shared, const Tables& tables, const Segments& segments, Staging& staging, int warp, int lane)
        : Copier(shared, tables, warp * 32 + lane, lane), staging(staging), feeder(staging, tables, segments, warp, lane) {}

    // As Copier::copy.
    __device__ void copy(const Item& item) {
        const int num_tiles = (item.num_keys() + kTile - 1) / kTile;
        if (num_tiles > 0) move_keys(item, 0);
        wait(&shared.query_empty, query_parity);
        if (num_tiles > 0) copy_query(item);
        publish();
        query_parity ^= 1;
#pragma unroll 1
        for (int tile = 0; tile < num_tiles; ++tile) {
            if (tile + 1 < num_tiles) move_keys(item, tile + 1);
            wait(&shared.values_empty[values.stage], values.parity);
            move(shared.values[values.stage], item, tile);
            arrive(&shared.values_full[values.stage]);
            values.step();
        }
    }
    __device__ void move_keys(const Item& item, int tile) {
        wait(&shared.keys_empty[keys.stage], keys.parity);
        move(shared.keys[keys.stage], item, tile);
        arrive(&shared.keys_full[keys.stage]);
        keys.step();
    }

    // Two parcels to a stage; rows that are not there are zeros.
    __device__ void move(unsigned char* stage, const Item& item, int tile) {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            const int first_token = item.first_token() + tile * kTile + half * kParcelTokens + row();
            const unsigned char* rows = staging.parcels[from.parcel] + row() * kRowBytes + chunk() * 16;
            unsigned char* to = stage + (half * kParcelTokens + row()) * kPitch + chunk() * 16;
            wait(&staging.full[from.parcel], from.parity);
            uint4 chunks[kRowsOfThread][kColumns];
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) {
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const uint4* lies = reinterpret_cast<const uint4*>(rows + i * kStride * kRowBytes + c * kPitch);
                    chunks[i][c] = first_token + i * kStride < item.num_tokens ? *lies : uint4{0, 0, 0, 0};
                }
            }
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) {
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    *reinterpret_cast<uint4*>(to + (c * kTile + i * kStride) * kPitch) = chunks[i][c];
                }
            }
            meet<kCopiers>(kCopierBarrier);    // all have read the parcel
            feeder.feed();
            from.step();
        }
    }
};

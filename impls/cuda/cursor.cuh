// cursor.cuh -- the next tile that a warp fetches: every kTeam-th of its share, across segments.
#pragma once

#include "shares.cuh"

constexpr bool kOneBlock = kBlockSize % kTile == 0;    // holds all tokens of a tile

// The caches, as the teams of one lane see them.
struct Caches {
    const Scalar* key_cache;
    const Scalar* value_cache;
    const int* block_tables;
    long long key_stride, value_stride, table_stride;
    int num_kv_heads, lanes, lane_of_heads;
};

struct Cursor {
    const Caches caches;
    const Shares& shares;
    const int end;         // of the share
    const int own_token;   // of a tile: the one whose block this lane looks up

    Segment segment;    // of the tile
    int position;       // of it
    int tokens;         // that it holds; 0 past the end
    int block = 0;      // that holds the lane's token

    __device__ Cursor(const Caches& caches, const Shares& shares, const Segment& segment, int position, int end, int own_token)
        : caches(caches), shares(shares), end(end), own_token(own_token), segment(segment), position(position) {
        find();
    }

    __device__ int first_token() const { return (position - segment.first) * kTile; }
    __device__ int kv_head() const { return (segment.round * caches.lanes + caches.lane_of_heads) / kParts; }
    __device__ KvHead keys() const { return {caches.key_stride, caches.num_kv_heads, kv_head()}; }
    __device__ KvHead values() const { return {caches.value_stride, caches.num_kv_heads, kv_head()}; }

    __device__ void advance() {
        position += kTeam;
        find();
    }

    // Find the segment of `position`, and the block of the lane's token; no table entry past the last token's is read.
    __device__ void find() {
        tokens = 0;
        if (position >= end) return;
        while (position >= segment.end) segment = shares.after(segment, end);
        tokens = min(kTile, shares.sequences[segment.seq].num_tokens - first_token());
        if (own_token >= tokens) return;
        block = caches.block_tables[segment.seq * caches.table_stride + (first_token() + own_token) / kBlockSize];
    }
};

// deal.cuh -- which rows a CTA takes next: items are dealt from a counter, those of many keys first.
//
// The query heads of one KV head are packed: row r of a sequence is head r % kGroup of its query token r / kGroup. An item is
// kRows rows of one KV head; its cost is the number of keys that its last row sees. Costs are put in kClasses classes. In a
// sequence they rise from item to item, so how many of its items a class has follows from its lengths: nothing is listed, sorted or
// read back, and a captured launch stays right when lengths change. The heads of the same rows come one after the other, as do the
// items of a sequence in a class: they read the same blocks at about the same time.
#pragma once

#include "paged.cuh"

// Specialised by prefill.py.
constexpr int kRows = PA_ROWS;     // of an item
constexpr int kClasses = 16;       // of costs, as many lanes
constexpr unsigned kAll = 0xffffffffu;

// The query tokens of a sequence.
struct Sequence {
    int seq, num_tokens;           // tokens in the cache, the new ones included
    int first_query, num_queries;

    __device__ Sequence(int seq, int num_seqs, const int* query_start_loc, const int* seq_lens) : seq(seq) {
        const bool there = seq < num_seqs;
        num_tokens = there ? __ldg(seq_lens + seq) : 0;
        first_query = there ? __ldg(query_start_loc + seq) : 0;
        num_queries = there ? __ldg(query_start_loc + seq + 1) - first_query : 0;
    }
    __device__ int num_rows() const { return num_queries * kGroup; }
    __device__ int num_items() const { return (num_rows() + kRows - 1) / kRows; }

    // The first item whose last row sees more keys than `num_keys`.
    __device__ int first_above(int num_keys) const {
        const int query = num_keys - (num_tokens - num_queries);    // the last that sees no more is the one before
        return query >= num_queries ? num_items() : query <= 0 ? 0 : query * kGroup / kRows;
    }
};

// What a CTA works on; as it lies in shared memory.
struct Item {
    int seq, num_tokens, first_query, num_queries, kv_head;
    int first_row;    // -1: there is nothing more to do

    __device__ static int first_token() { return 0; }    // that its rows see
    __device__ long long token(int query) const { return first_query + query; }    // which of all query tokens
    __device__ int num_rows() const { return num_queries * kGroup; }
    // Keys that row `row` sees; rows past the last one are like it.
    __device__ int num_keys(int row) const {
        const int query = min(row / kGroup, num_queries - 1);
        return max(0, min(num_tokens - num_queries + query + 1, num_tokens));
    }
    __device__ int num_keys() const { return num_keys(first_row + kRows - 1); }    // that any row sees
};

// A warp's view of all items.
struct Deal {
    static constexpr bool kDrawn = true;
    const int *query_start_loc, *seq_lens;
    const int num_seqs, num_kv_heads, lane;
    int width = 1, longest = 0;    // keys of a class, and of the longest sequence
    int upto;                      // items of this lane's class and those before it, of one head

    __device__ Deal(const int* query_start_loc, const int* seq_lens, int num_seqs, int num_kv_heads, int lane)
        : query_start_loc(query_start_loc), seq_lens(seq_lens), num_seqs(num_seqs), num_kv_heads(num_kv_heads), lane(lane) {
        for (int seq = lane; seq < num_seqs; seq += 32) {
            const Sequence one = sequence(seq);
            if (one.num_queries > 0) longest = max(longest, one.num_tokens);
        }
        longest = __reduce_max_sync(kAll, longest);
        width = longest / kClasses + 1;
        upto = 0;
        for (int first = 0; first < num_seqs; first += 32) {
            const Sequence one = sequence(first + lane);
#pragma unroll 4
            for (int c = 0; c < kClasses; ++c) {
                const int items = __reduce_add_sync(kAll, one.num_items() - first_of(one, c));
                if (lane == c) upto += items;
            }
        }
    }
    __device__ Sequence sequence(int seq) const { return Sequence(seq, num_seqs, query_start_loc, seq_lens); }

    // The first item of the sequence in class `c` or one before it; the last class takes all the rest.
    __device__ int first_of(const Sequence& one, int c) const {
        return c < 0 ? one.num_items() : c == kClasses - 1 ? 0 : one.first_above(longest - (c + 1) * width);
    }

    // Write the item of this number to `to`, by one lane.
    __device__ void find(int number, Item* to) const {
        const int entry = number / num_kv_heads, c = __popc(__ballot_sync(kAll, lane < kClasses && upto <= entry));
        if (c == kClasses) {
            if (lane == 0) to->first_row = -1;
            return;
        }
        const int before = __shfl_sync(kAll, upto, max(c - 1, 0));
        int rest = entry - (c == 0 ? 0 : before);    // of the class's items
        for (int first = 0;; first += 32) {
            const Sequence one = sequence(first + lane);
            const int past = first_of(one, c - 1), items = past - first_of(one, c);
            int with = items;    // those of lanes before, too
            for (int offset = 1; offset < 32; offset *= 2) {
                const int other = __shfl_up_sync(kAll, with, offset);
                if (lane >= offset) with += other;
            }
            const int total = __shfl_sync(kAll, with, 31);
            if (rest >= total) {
                rest -= total;
                continue;
            }
            if (rest < with && rest >= with - items) {
                *to = {one.seq, one.num_tokens, one.first_query, one.num_queries, number % num_kv_heads,
                       (past - 1 - (rest - (with - items))) * kRows};
            }
            return;
        }
    }
};

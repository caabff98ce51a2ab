// prefix.cuh -- a prefix that several sequences share is read once: two launches.
//
//   SHARED    the first takes, in place of sequences, runs of tokens that several sequences' tables have in common, each for so
//             many of their query tokens as its rows hold. All rows see all of a run. Its sums are left here, row by row
//   OWN       the second takes the sequences themselves, from the first token on that no run has, and adds the runs' sums
//
// Runs are found by prefix.py on block ids. One run may continue another, for fewer sequences: they are of different depths.
#pragma once

#include "scores.cuh"

// In global memory, but for the sums written by prefix.py. Counts are those of runs with SHARED, of sequences with OWN.
struct Prefix {
    const int* firsts;        // [count] first token of the run; of what is the sequence's own
    const int* table_rows;    // [count] whose table has the run
    const int* depths;        // [count] of the run; how many runs the sequence has
    const int* tokens;        // query tokens of the runs; with SHARED query_start_loc counts these
    float4* sums;             // [depths, num_tokens, num_q_heads, kQuads]
    float2* stats;            // [depths, num_tokens, num_q_heads]
    long long depth_rows;     // num_tokens * num_q_heads, as many as there may be
};
#ifdef PA_ROLE
#define PREFIX_PARAMETER , const Prefix prefix
#else
#define PREFIX_PARAMETER
constexpr Prefix prefix = {};
#endif

// splits.cuh -- how a sequence is cut over CTAs. split_kv cuts by it, merge_splits merges by it.
#pragma once

// Specialised by split_kv.py.
constexpr int kCut = PA_STEP;  // tokens; splits end at multiples of it

struct Splits {
    int length;  // tokens of a split; the last one may have fewer
    int count;   // splits that hold tokens; an empty row counts one
};

// Cut `num_tokens` into at most `most` splits of at least `least` tokens.
__device__ inline Splits cut(int num_tokens, int most, int least) {
    const int even = (num_tokens + most - 1) / most;
    const int length = max(least, (even + kCut - 1) / kCut * kCut);
    return {length, max(1, (num_tokens + length - 1) / length)};
}

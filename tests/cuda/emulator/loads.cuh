// loads.cuh -- in place of the kernels' own: loads to registers, done at once.
#pragma once

template <bool kOnce> static void load_chunk(unsigned (&to)[4], const uint4* from, bool wanted) {
    if (wanted) memcpy(to, from, 16);
}
static void clear(unsigned& x) { x = 0; }
static int opaque(int x) { return x; }

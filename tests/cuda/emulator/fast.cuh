// fast.cuh -- in place of the kernels' own.
#pragma once

static float exp2_fast(float x) { return std::exp2(x); }
static float inverse_fast(float x) { return 1.0f / x; }

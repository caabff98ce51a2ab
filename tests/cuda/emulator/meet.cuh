// meet.cuh -- in place of the kernels' own: who waits lets others run.
#pragma once

template <int kThreads> static void meet(int id) { numbered[id].wait(kThreads); }
template <int kThreads> static void pass_by(int id) { numbered[id].pass(kThreads); }
static unsigned count_arrival(unsigned* arrived) { return atomicAdd(arrived, 1u); }

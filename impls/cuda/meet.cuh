// meet.cuh -- threads of a CTA that wait for each other, others than all.
#pragma once

// Barrier `id`, 1 to 15, of kThreads threads, of which some wait and the others only say that they came by.
template <int kThreads>
__device__ __forceinline__ void meet(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory"); }
template <int kThreads>
__device__ __forceinline__ void pass_by(int id) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory"); }

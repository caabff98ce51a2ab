// meet.cuh -- threads of a CTA that wait for each other, others than all; and CTAs that count who has been there.
#pragma once

// Barrier `id`, 1 to 15, of kThreads threads, of which some wait and the others only say that they came by.
template <int kThreads>
__device__ __forceinline__ void meet(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory"); }
template <int kThreads>
__device__ __forceinline__ void pass_by(int id) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory"); }

// Count one more, and return how many there had been. What the CTA's threads wrote before they met, whoever counts after it sees,
// and those it meets then.
__device__ __forceinline__ unsigned count_arrival(unsigned* arrived) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    return before;
}

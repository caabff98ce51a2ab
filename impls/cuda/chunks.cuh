// chunks.cuh -- copies of 16 bytes from global to shared memory that go on while their thread computes. sm_80 and newer.
#pragma once

// Copy 16 bytes past the L1 cache, or write zeros, `from` untouched, unless `there`. Both addresses are multiples of 16.
__device__ inline void copy_chunk(uint4* to, const uint4* from, bool there) {
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// End a batch: of the copies that this thread has issued since the last one.
__device__ inline void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most the kLater newest batches of this thread are on their way. It alone sees what has landed.
template <int kLater>
__device__ inline void wait_for_batch() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

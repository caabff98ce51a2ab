// mbarrier.cuh -- copies from global to shared memory and the barriers that say when they have landed. sm_80 and newer; bulk
// copies came with sm_90, and with them a wait that may sleep.
#pragma once

constexpr bool kHasBulkCopies = __CUDA_ARCH__ >= 900;    // who takes them asserts it

using Barrier = unsigned long long;    // in shared memory

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Before a phase can end it needs `arrivals` calls of `arrive`, and all expected bytes.
__device__ __forceinline__ void initialise(Barrier* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Make barriers that this thread initialised known to the engine that carries out bulk copies.
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Wait for the end of the phase of this parity: 0 for the first, then 1, 0, ...
__device__ __forceinline__ void wait(Barrier* barrier, unsigned parity) {
    asm volatile(
        "{ .reg .pred ended;\n"
#if __CUDA_ARCH__ >= 900
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
#else
        "WAIT: mbarrier.test_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
#endif
        "  @!ended bra WAIT; }" ::"r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// Copy `bytes` that are read once, and let the barrier's present phase expect them. Both addresses and the size in multiples
// of 16 bytes. The form for any CTA of a cluster (.shared::cluster) becomes a call with a stack on sm_120.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, unsigned bytes, Barrier* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
    unsigned long long policy;    // what is not read again is the first to leave L2, which else writes back what was left there
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
#endif
}

// Ask L2 for the 128 bytes at `global`, which are wanted soon. It is no access: an address where nothing is does no harm.
__device__ __forceinline__ void ask_ahead(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// Copy 16 bytes, both addresses multiples of 16, without the L1 cache; see `arrive_after_copies`. L2 is asked for whole lines of
// 128 bytes, which the neighbouring lanes want, too: it would fetch them in halves.
__device__ __forceinline__ void copy_chunk(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// The same, or write zeros, `global` untouched, unless `there`.
__device__ __forceinline__ void copy_chunk(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(there ? 16 : 0) : "memory");
}

// Wait for all chunks that this thread copies.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Arrive once all chunks have landed that this thread copies.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

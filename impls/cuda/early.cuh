// early.cuh -- a launch that begins while the one before it in the stream still ends; launch.py asks for it. sm_90 and newer.
#pragma once

// Once all CTAs have said so, those of the next launch take what place there is.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until the launch before has ended, and see what it wrote. All threads do so before they end: a launch that has ended says to
// the next that all before it have.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// threads.hpp -- a CTA on one thread of a CPU: its threads are fibers, each of which runs until it waits for others.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "types.hpp"

#define __CUDA_ARCH__ 900
// What must hold on a GPU; else the launch is given up, and says so.
#define REQUIRE(condition) ((condition) ? (void)0 : give_up(__FILE__ ": not " #condition))
static const char* volatile failure;
static ucontext_t home;
[[noreturn]] static void give_up(const char* why) {
    failure = why;
    setcontext(&home);
    abort();
}

alignas(1024) unsigned char memory[227 * 1024];    // shared
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static std::mt19937 chance;

static int min(int a, int b) { return std::min(a, b); }
static int max(int a, int b) { return std::max(a, b); }
static unsigned min(unsigned a, unsigned b) { return std::min(a, b); }
static unsigned max(unsigned a, unsigned b) { return std::max(a, b); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static unsigned __byte_perm(unsigned x, unsigned y, unsigned selection) {
    unsigned bytes = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned which = selection >> 4 * i & 7;
        bytes |= ((which < 4 ? x : y) >> which % 4 * 8 & 0xff) << 8 * i;
    }
    return bytes;
}
static float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
template <typename T> static T __ldg(const T* from) { return *from; }
template <typename T> static T __ldcg(const T* from) { return *from; }
template <typename T> static T atomicAdd(T* to, T x) { return std::exchange(*to, *to + x); }
static void __threadfence() {}

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 17);
    bool ended = false;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static void (*kernel_body)();
static bool moved;    // something has happened that a waiting fiber may wait for

static void let_others_run() {
    const uint3 me = threadIdx;
    swapcontext(&fibers[me.x].context, &scheduler);
    threadIdx = me;
}
static void fiber_body() {
    kernel_body();
    fibers[threadIdx.x].ended = moved = true;
    let_others_run();
}

// Of threads that wait for each other.
struct Meeting {
    int came = 0;
    long round = 0;
    void pass(int threads) {
        REQUIRE(came < threads);
        moved = true;
        if (++came == threads) came = 0, ++round;
    }
    void wait(int threads) {
        const long now = round;
        pass(threads);
        while (round == now) let_others_run();
    }
};
static Meeting cta, numbered[16];
static std::vector<Meeting> warps;
static void __syncthreads() { cta.wait(blockDim.x); }
static void __syncwarp() { warps[threadIdx.x / 32].wait(32); }

// A warp's registers, one a lane; two sets, since lanes may be one exchange apart.
static std::vector<uint32_t> exchanged;
static std::vector<int> exchanges;
template <typename T> static const T* exchange(T x) {
    static_assert(sizeof(T) == 4, "a register");
    const int thread = threadIdx.x;
    uint32_t* set = exchanged.data() + (thread / 32 * 2 + exchanges[thread]++ % 2) * 32;
    memcpy(set + thread % 32, &x, 4);
    __syncwarp();
    return reinterpret_cast<const T*>(set);
}
template <typename T> static T __shfl_sync(unsigned, T x, int lane) { return exchange(x)[lane]; }
template <typename T> static T __shfl_xor_sync(unsigned, T x, int mask) { return exchange(x)[threadIdx.x % 32 ^ mask]; }
template <typename T> static T __shfl_up_sync(unsigned, T x, int by) {
    const int lane = threadIdx.x % 32;
    return exchange(x)[lane < by ? lane : lane - by];
}
static unsigned __ballot_sync(unsigned, bool x) {
    const int* all = exchange<int>(x);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (unsigned)all[lane] << lane;
    return bits;
}
static bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
static int __reduce_max_sync(unsigned, int x) { const int* all = exchange(x); return *std::max_element(all, all + 32); }
static int __reduce_add_sync(unsigned, int x) {
    const int* all = exchange(x);
    int sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += all[lane];
    return sum;
}

// What goes on beside the threads: copies, and products where a kernel includes them.
struct Engine {
    void (*begin)(int threads);
    bool (*run)();    // some of it, by chance; false where there is nothing to do
};
static std::vector<Engine> engines;
static int laziness;    // how late it is done, 0 to 2

static void run_cta(int threads) {
    fibers.resize(threads), warps.assign(threads / 32, {}), exchanged.assign(threads * 2, 0), exchanges.assign(threads, 0);
    cta = {};
    std::fill(std::begin(numbered), std::end(numbered), Meeting());
    memset(memory, 0xff, sizeof(memory));
    laziness = chance() % 3;
    for (const Engine& engine : engines) engine.begin(threads);
    std::vector<int> order(threads);
    for (int i = 0; i < threads; ++i) {
        order[i] = i, fibers[i].ended = false;
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp = fibers[i].stack.data(), fibers[i].context.uc_stack.ss_size = fibers[i].stack.size();
        makecontext(&fibers[i].context, fiber_body, 0);
    }
    for (int left = threads; left > 0;) {
        moved = false, left = 0;
        if (chance() % 4 == 0) std::shuffle(order.begin(), order.end(), chance);
        for (int i : order) {
            if (fibers[i].ended) continue;
            ++left;
            threadIdx = {(unsigned)i, 0, 0};
            swapcontext(&scheduler, &fibers[i].context);
        }
        bool went_on = false;
        for (const Engine& engine : engines) went_on |= engine.run();
        REQUIRE(left == 0 || moved || went_on);    // else it would wait for ever
    }
}

// A launch: CTAs one after the other, in random order, with parameters as cuLaunchKernel takes them.
static void** parameters;
template <typename... T, size_t... I> static void call(void (*kernel)(T...), std::index_sequence<I...>) {
    kernel(*static_cast<T*>(parameters[I])...);
}
template <typename... T> static void call(void (*kernel)(T...)) { call(kernel, std::index_sequence_for<T...>()); }

// Returns what went wrong, or null.
static const char* launch(int ctas, int threads, void** with, unsigned seed, void (*body)()) {
    parameters = with, kernel_body = body, chance.seed(seed);
    gridDim.x = ctas, blockDim.x = threads;
    failure = nullptr;
    getcontext(&home);
    if (failure) return failure;
    std::vector<unsigned> order(ctas);
    for (int i = 0; i < ctas; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), chance);
    for (unsigned i : order) blockIdx = {i, 0, 0}, run_cta(threads);
    return nullptr;
}

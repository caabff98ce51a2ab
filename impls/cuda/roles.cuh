// roles.cuh -- what the warpgroups of a CTA do, item by item: one copies, the others multiply 64 rows each.
#pragma once

#include "warpgroup.cuh"

constexpr int kCtaThreads = (kWarpgroups + 1) * 128;
constexpr int kRegisters = PA_REGISTERS;     // of a thread that multiplies, out of those that one that copies gives away
constexpr int kCopierRegisters = 56;
constexpr int kCopierBarrier = 1;
static_assert((kWarpgroups * kRegisters + kCopierRegisters) * 128 <= 65536, "PA_REGISTERS must leave kCopierRegisters");

// Copy what items need. A Dealer, made of `how`, finds the item of a number: the first is the CTA's and the others are drawn from
// `counters` [2], items drawn and CTAs done, both 0 after a launch; or, not kDrawn, it knows itself what is the CTA's next.
template <typename Dealer, typename... How>
__device__ __forceinline__ void copy_items(Shared& shared, Copier&& copier, int* counters, int warp, const How&... how) {
    if constexpr (kWarpgroups > 1) give_registers<kCopierRegisters>();
    Dealer dealer{how...};
    int number = blockIdx.x;
    for (int turn = 0;; turn ^= 1) {
        if (warp == 0) dealer.find(number, &shared.items[turn]);
        meet<kCopiers>(kCopierBarrier);
        const Item item = shared.items[turn];
        if (item.first_row < 0) break;
        copier.copy(item);
        if (Dealer::kDrawn && warp == 0) number = gridDim.x + __shfl_sync(kAll, threadIdx.x == 0 ? atomicAdd(counters, 1) : 0, 0);
    }
    wait(&shared.query_empty, copier.query_parity);
    copier.publish();    // no queries: the end
    wait_for_copies();    // the last ones, before their thread ends
    if (Dealer::kDrawn && threadIdx.x == 0 && atomicAdd(counters + 1, 1) == gridDim.x - 1) counters[0] = counters[1] = 0;
}

// Attend to 64 rows of every item; `write` takes what a thread has of rows `row` and `row` + 8.
template <typename Write>
__device__ __forceinline__ void multiply_items(
    Shared& shared, float scale, int warpgroup, int warp, int lane, const Write& write) {
    if constexpr (kWarpgroups > 1) take_registers<kRegisters>();    // one has all that a thread may have, unasked
    Products products(shared, warpgroup);
    const Turns turns(warpgroup);
    const int row = warpgroup * 64 + warp % 4 * 16 + lane / 4;
    Place keys, values;
    for (unsigned turn = 0;; turn ^= 1) {
        wait(&shared.query_full, turn);
        const Item item = shared.items[turn];
        if (item.first_row < 0) break;
        const int num_tiles = (item.num_keys() + kTile - 1) / kTile;
        if (item.first_row + warpgroup * 64 >= item.num_rows()) {
            pass_over(shared, turns, keys, values, num_tiles, lane);
            continue;
        }
        const int bounds[2] = {item.num_keys(item.first_row + row), item.num_keys(item.first_row + row + 8)};
        Rows rows(scale * kLog2e, bounds);
        if (kHoldsQuery && num_tiles > 0) products.hold(warp % 4, lane);
        if (kHoldsQuery || num_tiles == 0) give_back(&shared.query_empty, lane);
        if (num_tiles > 0) attend(rows, shared, products, turns, keys, values, num_tiles, lane);
        write(rows, item, item.first_row + row);
    }
}

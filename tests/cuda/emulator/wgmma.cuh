// wgmma.cuh -- in place of the kernels' own: products are done late, by the bits of a descriptor, and their registers are NaN until
// a wait. Whoever reads registers early, writes weights or shared memory early, or errs in a descriptor, gets a wrong answer.
#pragma once

#include <deque>

#include "matrices.cuh"
#include "mbarrier.cuh"
#include "meet.cuh"
#include "mma.cuh"

struct Product {
    int columns;
    bool across, add;    // rows of B run across the sum; C is added to
    Matrix a, b;
    int came;            // threads of the warpgroup that have begun it
    std::vector<float>* c[128];
    const unsigned* weights[128];    // A, where it is in registers, else null
};
struct Held {    // what C will be
    std::vector<float> values;
    long last;   // product on it
};
struct Begun {    // by a thread
    long products = 0;
    std::vector<long> batches;
    std::map<float*, Held> held;
    bool fenced = false;
};
static std::vector<std::deque<Product>> queues;    // by warpgroup, products in order
static std::vector<long> finished;
static std::vector<Begun> begun;

// Element k of row (or column) `index`, the way the tensor cores find it: 128-byte swizzle, on absolute addresses.
static float element(Matrix matrix, int index, int k, bool across) {
    const unsigned start = (matrix & 0x3fff) << 4, leading = (matrix >> 16 & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4;
    REQUIRE(matrix >> 62 == 1 && (matrix >> 46 & 0xffff) == 0 && (matrix >> 30 & 3) == 0 && (matrix >> 14 & 3) == 0);
    const unsigned at = start + (across ? index / 64 * leading + index % 64 * 2 + k / 8 * stride + k % 8 * 128
                                        : index / 8 * stride + index % 8 * 128 + k * 2);
    REQUIRE(at + 2 <= sizeof(memory));
    uint16_t bits;
    memcpy(&bits, memory + (at ^ (at >> 7 & 7) << 4), 2);
    return to_float_bits(bits);
}

static bool is_ready(int warpgroup) {
    return finished[warpgroup] < (long)queues[warpgroup].size() && queues[warpgroup][finished[warpgroup]].came == 128;
}
static void carry_out(int warpgroup) {
    const Product& product = queues[warpgroup][finished[warpgroup]++];
    static float a[64][16], b[16][256];
    for (int row = 0; row < 64; ++row) {
        for (int k = 0; k < 16; ++k) {
            const unsigned* weights = product.weights[row / 16 * 32 + row % 8 * 4 + k % 8 / 2];
            a[row][k] = weights ? to_float_bits(weights[row % 16 / 8 + k / 8 * 2] >> k % 2 * 16) : element(product.a, row, k, false);
        }
    }
    for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < product.columns; ++column) b[k][column] = element(product.b, column, k, product.across);
    }
    for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < product.columns / 2; ++i) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            float& c = (*product.c[thread])[i];
            float sum = product.add ? c : 0;
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            c = sum;
        }
    }
    moved = true;
}

static void begin_products() { begun[threadIdx.x].fenced = true; }
static void end_products() {
    Begun& mine = begun[threadIdx.x];
    mine.batches.push_back(mine.products), mine.fenced = false;
}
static void begin_product(float* c, int columns, Matrix a, const unsigned* weights, Matrix b, bool across, bool add) {
    const int thread = threadIdx.x;
    Begun& mine = begun[thread];
    auto& queue = queues[thread / 128];
    REQUIRE(mine.fenced && !unseen[thread]);
    const long number = mine.products++;
    if (number == (long)queue.size()) queue.push_back({columns, across, add, a, b});
    Product& product = queue[number];
    REQUIRE(product.a == a && product.b == b && product.add == add && product.across == across && product.columns == columns);
    Held& held = mine.held.try_emplace(c, Held{{c, c + columns / 2}}).first->second;
    held.last = number;
    product.c[thread % 128] = &held.values, product.weights[thread % 128] = weights, ++product.came;
    std::fill_n(c, columns / 2, NAN);
    moved = true;
}
template <int N> static void multiply_rows(float (&c)[N], Matrix a, Matrix b, bool add) {
    begin_product(c, 2 * N, a, nullptr, b, false, add);
}
template <int N> static void multiply_rows(float (&c)[N], const unsigned (&a)[4], Matrix b, bool add) {
    begin_product(c, 2 * N, 0, a, b, false, add);
}
template <int N> static void multiply_columns(float (&c)[N], const unsigned (&a)[4], Matrix b) {
    begin_product(c, 2 * N, 0, a, b, true, true);
}
template <int kLater> static void wait_for_products() {
    const int warpgroup = threadIdx.x / 128;
    Begun& mine = begun[threadIdx.x];
    if ((int)mine.batches.size() <= kLater) return;
    const long upto = mine.batches.end()[-1 - kLater];
    while (finished[warpgroup] < upto) {
        if (is_ready(warpgroup)) carry_out(warpgroup);
        else let_others_run();
    }
    for (auto it = mine.held.begin(); it != mine.held.end();) {
        if (it->second.last >= upto) { ++it; continue; }
        std::copy(it->second.values.begin(), it->second.values.end(), it->first);
        it = mine.held.erase(it);
    }
}
template <int N> static void settle(float (&)[N]) {}
static void finish(float x, unsigned) { REQUIRE(!(x < 0)); }

static void see_copies() { unseen[threadIdx.x] = false; }
template <int> static void give_registers() {}
template <int> static void take_registers() {}

static void begin_all_products(int threads) {
    queues.assign(threads / 128, {}), finished.assign(threads / 128, 0), begun.assign(threads, {});
}
static bool run_products() {
    bool went_on = false;
    for (int warpgroup = 0; warpgroup < (int)queues.size(); ++warpgroup) {
        while (is_ready(warpgroup) && (int)(chance() % 3) > laziness) carry_out(warpgroup), went_on = true;
    }
    return went_on;
}
static const Engine& products = engines.emplace_back(Engine{begin_all_products, run_products});

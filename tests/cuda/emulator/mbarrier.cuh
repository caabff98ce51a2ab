// mbarrier.cuh -- in place of the kernels' own: copies land late and in any order; where they will land is garbage until then.
#pragma once

static unsigned shared_address(const void* pointer) {
    const auto* byte = static_cast<const unsigned char*>(pointer);
    REQUIRE(byte >= memory && byte < memory + sizeof(memory));
    return byte - memory;
}

constexpr bool kHasBulkCopies = true;

using Barrier = unsigned long long;
struct Phase {
    unsigned arrivals, missing, number;
};
static std::map<Barrier*, Phase> phases;
static std::vector<char> unseen;    // threads that waited for copies, and have not told the products yet

static void initialise(Barrier* barrier, unsigned arrivals) { phases[barrier] = {arrivals, arrivals, 0}; }
static void publish_barriers() {}
static void arrive(Barrier* barrier) {
    Phase& phase = phases.at(barrier);
    moved = true;
    if (--phase.missing == 0) phase.missing = phase.arrivals, ++phase.number;
}
static void wait(Barrier* barrier, unsigned parity) {
    while (phases.at(barrier).number % 2 == parity) let_others_run();
    unseen[threadIdx.x] = true;
}

struct Chunk {
    unsigned char* to;
    const void* from;    // null: zeros
};
struct Batch {
    std::vector<Chunk> chunks;
    Barrier* barrier;
};
static std::vector<std::vector<Chunk>> issued;    // by thread
static std::vector<Batch> batches;

static void ask_ahead(const void*) {}
static void copy_chunk(void* shared, const void* global, bool there) {
    REQUIRE(shared_address(shared) % 16 == 0 && reinterpret_cast<uintptr_t>(global) % 16 == 0);
    memset(shared, 0xee, 16);
    issued[threadIdx.x].push_back({static_cast<unsigned char*>(shared), there ? global : nullptr});
}
static void copy_chunk(void* shared, const void* global) { copy_chunk(shared, global, true); }
// The barrier's present phase waits for it, too.
static void copy_bulk(void* shared, const void* global, unsigned bytes, Barrier* barrier) {
    REQUIRE(bytes % 16 == 0 && bytes > 0);
    std::vector<Chunk> chunks;
    for (unsigned at = 0; at < bytes; at += 16) {
        auto* to = static_cast<unsigned char*>(shared) + at;
        REQUIRE(shared_address(to) % 16 == 0 && reinterpret_cast<uintptr_t>(global) % 16 == 0);
        memset(to, 0xee, 16);
        chunks.push_back({to, static_cast<const unsigned char*>(global) + at});
    }
    ++phases.at(barrier).missing;
    batches.push_back({chunks, barrier});
    moved = true;
}
static void arrive_after_copies(Barrier* barrier) {
    batches.push_back({std::exchange(issued[threadIdx.x], {}), barrier});
    moved = true;
}
static void wait_for_copies() {}    // before a thread ends; what it copied lands nevertheless

static void land_one() {
    const size_t i = chance() % batches.size();
    const Batch batch = std::exchange(batches[i], batches.back());
    batches.pop_back();
    for (const Chunk& chunk : batch.chunks) {
        if (chunk.from) memcpy(chunk.to, chunk.from, 16);
        else memset(chunk.to, 0, 16);
    }
    arrive(batch.barrier);
}
static void begin_copies(int threads) {
    phases.clear(), batches.clear();
    issued.assign(threads, {}), unseen.assign(threads, false);
}
static bool run_copies() {
    if (batches.empty()) return false;
    size_t count = laziness == 2 && moved ? chance() % 4 == 0 : chance() % (batches.size() + 1);
    for (count = std::max<size_t>(count, !moved); count > 0; --count) land_one();
    return true;
}
static const Engine& copies = engines.emplace_back(Engine{begin_copies, run_copies});

// Each process alternates between two shared buffers, and publishes the number of barriers that it has reached.
//
// Sum: every process publishes its x, reduces one slice over all buffers into its own, and reads the reduced slices of
// the others, so each process reads each number twice, for any number of processes. Barriers separate these stages.
// None is needed at the end: a process that reuses the buffer two turns later has passed a barrier of the turn between,
// so all others have finished this one.
#include "shm_collectives.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "linear.h"
#include "pool.h"
#include "cpu_pause.h"
#include "vec.h"

namespace {

constexpr int64_t LINE = 64;         // bytes between two counters (a cache line, against false sharing)
constexpr int64_t GRAIN = 1 << 15;   // minimum bytes for another thread
constexpr int EAGER = 1 << 12, PATIENT = 1 << 14;  // polls before yielding, and before sleeping
constexpr auto NAP = std::chrono::microseconds(50);

using Stage = std::atomic<int64_t>;
static_assert(Stage::is_always_lock_free, "processes share it");

Stage& stage_of(const ShmCollectives& group, int64_t rank) {
    return *reinterpret_cast<Stage*>(group.memory + rank * LINE);
}

char* buffer_of(const ShmCollectives& group, int64_t rank) {
    int64_t place = group.turn % 2 * group.size + rank;
    return group.memory + group.size * LINE + place * group.room;
}

// Blocks until all processes have reached this barrier.
void barrier(const ShmCollectives& group) {
    int64_t stage = stage_of(group, group.rank).fetch_add(1, std::memory_order_acq_rel) + 1;
    for (int64_t rank = 0; rank < group.size; rank++)
        for (int look = 0; stage_of(group, rank).load(std::memory_order_acquire) < stage; look++) {
            if (look < EAGER)
                cpu_pause();
            else if (look < PATIENT)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(NAP);
        }
}

void copy(const char* from, int64_t bytes, char* to) {
    pool::run_pieces(bytes, GRAIN,
                     [&](int64_t first, int64_t last) { std::memcpy(to + first, from + first, size_t(last - first)); });
}

// Sums elements [first, last) of all buffers into this process's own.
template <class T>
void add_up(const ShmCollectives& group, int64_t first, int64_t last) {
    pool::run_pieces(last - first, GRAIN / int64_t(sizeof(T)), [&](int64_t from, int64_t to) {
        over(to - from, [&](int64_t i, auto get, auto put) {
            F32 total = {};
            for (int64_t rank = 0; rank < group.size; rank++)
                total += get(reinterpret_cast<const T*>(buffer_of(group, rank)) + first + from + i);
            put(reinterpret_cast<T*>(buffer_of(group, group.rank)) + first + from + i, total);
        });
    });
}

template <class T>
void sum_piece(ShmCollectives& group, T* x, int64_t n) {
    group.turn++;
    auto slice = [&](int64_t rank) { return n * rank / group.size; };
    copy(reinterpret_cast<const char*>(x), n * int64_t(sizeof(T)), buffer_of(group, group.rank));
    barrier(group);
    add_up<T>(group, slice(group.rank), slice(group.rank + 1));
    barrier(group);
    for (int64_t rank = 0; rank < group.size; rank++) {
        int64_t first = slice(rank) * int64_t(sizeof(T)), last = slice(rank + 1) * int64_t(sizeof(T));
        copy(buffer_of(group, rank) + first, last - first, reinterpret_cast<char*>(x) + first);
    }
}

template <class T>
void sum_all(ShmCollectives& group, T* x, int64_t n) {
    int64_t most = group.room / int64_t(sizeof(T));
    for (int64_t first = 0; first < n; first += most) sum_piece(group, x + first, std::min(most, n - first));
}

}  // namespace

int64_t shm_bytes(int64_t size, int64_t room) { return size * (LINE + 2 * room); }

void sum_over_ranks(ShmCollectives& group, void* x, int64_t n, int64_t dtype) {
    if (dtype == FLOAT32)
        sum_all(group, static_cast<float*>(x), n);
    else
        sum_all(group, static_cast<Bf16*>(x), n);
}

void gather_from_ranks(ShmCollectives& group, const char* x, int64_t bytes, char* out) {
    for (int64_t first = 0; first < bytes; first += group.room) {
        int64_t some = std::min(group.room, bytes - first);
        group.turn++;
        copy(x + first, some, buffer_of(group, group.rank));
        barrier(group);
        for (int64_t rank = 0; rank < group.size; rank++)
            copy(buffer_of(group, rank), some, out + rank * bytes + first);
    }
}

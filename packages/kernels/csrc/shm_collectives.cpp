// Each process has two buffers, which it uses by turns, and counts the stages that it has reached where all see it.
//
// To sum, everybody shows its x, adds up one slice of all of them in its own buffer, and reads the slices of the others:
// every process reads each number twice, however many they are. Between these stages all wait for all. Nobody waits at
// the end: who shows something two turns later has seen that everybody reached the turn between, and so left this one.
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

constexpr int64_t LINE = 64;         // bytes between two counters, so that no core waits for another's
constexpr int64_t GRAIN = 1 << 15;   // bytes that are worth another thread
constexpr int EAGER = 1 << 12, PATIENT = 1 << 14;  // looks at a counter before others get the core, and before a nap
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

// Returns when everybody has come as far as this process.
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

// Elements [first, last) of everybody's buffer, added up into our own.
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

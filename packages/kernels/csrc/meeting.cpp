// Each process has two buffers, which it uses by turns, and counts the stages that it has reached where all see it.
//
// To sum, everybody shows its x, adds up one slice of all of them in its own buffer, and reads the slices of the others:
// every process reads each number twice, however many they are. Between these stages all wait for all. Nobody waits at
// the end: who shows something two turns later has seen that everybody reached the turn between, and so left this one.
#include "meeting.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "linear.h"
#include "pool.h"
#include "relax.h"
#include "vec.h"

namespace {

constexpr int64_t LINE = 64;         // bytes between two counters, so that no core waits for another's
constexpr int64_t GRAIN = 1 << 15;   // bytes that are worth another thread
constexpr int EAGER = 1 << 12, PATIENT = 1 << 14;  // looks at a counter before others get the core, and before a nap
constexpr auto NAP = std::chrono::microseconds(50);

using Stage = std::atomic<int64_t>;
static_assert(Stage::is_always_lock_free, "processes share it");

Stage& stage_of(const Meeting& meeting, int64_t rank) {
    return *reinterpret_cast<Stage*>(meeting.memory + rank * LINE);
}

char* buffer_of(const Meeting& meeting, int64_t rank) {
    int64_t place = meeting.turn % 2 * meeting.size + rank;
    return meeting.memory + meeting.size * LINE + place * meeting.room;
}

// Returns when everybody has come as far as this process.
void meet(const Meeting& meeting) {
    int64_t stage = stage_of(meeting, meeting.rank).fetch_add(1, std::memory_order_acq_rel) + 1;
    for (int64_t rank = 0; rank < meeting.size; rank++)
        for (int look = 0; stage_of(meeting, rank).load(std::memory_order_acquire) < stage; look++) {
            if (look < EAGER)
                relax();
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
void add_up(const Meeting& meeting, int64_t first, int64_t last) {
    pool::run_pieces(last - first, GRAIN / int64_t(sizeof(T)), [&](int64_t from, int64_t to) {
        over(to - from, [&](int64_t i, auto get, auto put) {
            F32 total = {};
            for (int64_t rank = 0; rank < meeting.size; rank++)
                total += get(reinterpret_cast<const T*>(buffer_of(meeting, rank)) + first + from + i);
            put(reinterpret_cast<T*>(buffer_of(meeting, meeting.rank)) + first + from + i, total);
        });
    });
}

template <class T>
void sum_piece(Meeting& meeting, T* x, int64_t n) {
    meeting.turn++;
    auto slice = [&](int64_t rank) { return n * rank / meeting.size; };
    copy(reinterpret_cast<const char*>(x), n * int64_t(sizeof(T)), buffer_of(meeting, meeting.rank));
    meet(meeting);
    add_up<T>(meeting, slice(meeting.rank), slice(meeting.rank + 1));
    meet(meeting);
    for (int64_t rank = 0; rank < meeting.size; rank++) {
        int64_t first = slice(rank) * int64_t(sizeof(T)), last = slice(rank + 1) * int64_t(sizeof(T));
        copy(buffer_of(meeting, rank) + first, last - first, reinterpret_cast<char*>(x) + first);
    }
}

template <class T>
void sum_all(Meeting& meeting, T* x, int64_t n) {
    int64_t most = meeting.room / int64_t(sizeof(T));
    for (int64_t first = 0; first < n; first += most) sum_piece(meeting, x + first, std::min(most, n - first));
}

}  // namespace

int64_t meeting_bytes(int64_t size, int64_t room) { return size * (LINE + 2 * room); }

void sum_over_ranks(Meeting& meeting, void* x, int64_t n, int64_t dtype) {
    if (dtype == FLOAT32)
        sum_all(meeting, static_cast<float*>(x), n);
    else
        sum_all(meeting, static_cast<Bf16*>(x), n);
}

void gather_from_ranks(Meeting& meeting, const char* x, int64_t bytes, char* out) {
    for (int64_t first = 0; first < bytes; first += meeting.room) {
        int64_t some = std::min(meeting.room, bytes - first);
        meeting.turn++;
        copy(x + first, some, buffer_of(meeting, meeting.rank));
        meet(meeting);
        for (int64_t rank = 0; rank < meeting.size; rank++)
            copy(buffer_of(meeting, rank), some, out + rank * bytes + first);
    }
}

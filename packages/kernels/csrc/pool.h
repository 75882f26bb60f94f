// The threads of this library: a step is a sequence of parallel loops, and no loop needs a thread that is late.
#pragma once

#include <cstdint>

namespace pool {

// How many threads take part, the caller among them. Not while a loop runs.
void set_threads(int threads);
int threads();

using Body = void (*)(void* context, int64_t task);
void run_tasks(int64_t tasks, Body body, void* context);

// body(task) for each task in [0, tasks), in any order, on any thread; returns when all are done. Whoever is free takes
// the next task. Loops do not nest, and a second caller at the same time works alone. What a task throws, on whichever
// thread, the caller is thrown.
template <class F>
void run(int64_t tasks, const F& body) {
    run_tasks(
        tasks, [](void* context, int64_t task) { (*static_cast<const F*>(context))(task); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

// body(first, last) over pieces of [0, count), each of at least `grain` elements, and up to `each` pieces for a thread.
template <class F>
void run_pieces(int64_t count, int64_t grain, const F& body, int64_t each = 4) {
    int64_t most = each * threads();
    int64_t pieces = count / (grain > 0 ? grain : 1);
    pieces = pieces < 1 ? 1 : pieces > most ? most : pieces;
    run(pieces, [&](int64_t piece) { body(count * piece / pieces, count * (piece + 1) / pieces); });
}

constexpr int64_t GRAIN = 1 << 14;  // elements of simple work that are worth another thread

// body(row) for each of so many rows of so many elements of simple work.
template <class F>
void for_rows(int64_t rows, int64_t elements, const F& body) {
    run_pieces(rows, (GRAIN + elements - 1) / (elements > 0 ? elements : 1), [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++) body(row);
    });
}

}  // namespace pool

// The tokens of a step by sequence, and parallel loops over them. Mirrored in native/abi.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool.h"

// Consecutive tokens [begin, end) of one sequence, and the state that they advance; `snapshot` gets a copy, unless -1.
// Segments of one state follow each other, in the order of their tokens.
struct Segment {
    int64_t begin, end, state, snapshot;
};

// body(first, last, part) for the segments [first, last) of each sequence and each of so many parts of its state. `work`
// are the elements of simple work of a token in a part.
template <class Body>
void for_sequences(const Segment* segments, int64_t count, int64_t parts, int64_t work, const Body& body) {
    std::vector<const Segment*> first;
    int64_t tokens = 0;
    for (int64_t i = 0; i < count; i++) {
        if (i == 0 || segments[i].state != segments[i - 1].state) first.push_back(segments + i);
        tokens += segments[i].end - segments[i].begin;
    }
    int64_t tasks = int64_t(first.size()) * parts;
    first.push_back(segments + count);
    auto task = [&](int64_t i) { body(first[size_t(i / parts)], first[size_t(i / parts + 1)], i % parts); };
    if (tokens * parts * work > 2 * pool::GRAIN)
        pool::run(tasks, task);
    else
        for (int64_t i = 0; i < tasks; i++) task(i);
}

// Sums and gathers over processes of one machine, through shared memory.
#pragma once

#include <cstdint>

// State of one process. `memory` has `shm_bytes` bytes and begins as zeros.
struct ShmCollectives {
    int64_t rank, size;
    int64_t room;  // bytes that a process can publish at once: a multiple of 64
    char* memory;
    int64_t turn;  // number of buffers that it has published
};

int64_t shm_bytes(int64_t size, int64_t room);

// x [n], of a dtype of `Format`, becomes the sum over all processes, added up in the order of ranks in float32: the
// same bits everywhere. All processes call the same functions with equal sizes, and block until the last arrives.
void sum_over_ranks(ShmCollectives& group, void* x, int64_t n, int64_t dtype);

// out [size, bytes] = x [bytes] of all processes, in the order of ranks.
void gather_from_ranks(ShmCollectives& group, const char* x, int64_t bytes, char* out);

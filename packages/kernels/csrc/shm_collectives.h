// Sums and gathers over processes of one machine, through memory that all of them have mapped.
#pragma once

#include <cstdint>

// One process's place in a group. `memory` is `shm_bytes` long and begins as zeros.
struct ShmCollectives {
    int64_t rank, size;
    int64_t room;  // bytes that each of them can show the others at once: a multiple of 64
    char* memory;
    int64_t turn;  // times that it has shown something
};

int64_t shm_bytes(int64_t size, int64_t room);

// x [n], of a dtype of `Format`, becomes the sum over all processes, added up in the order of ranks in float32: the
// same bits everywhere. All call the same functions with arrays of the same sizes, and wait for whoever is late.
void sum_over_ranks(ShmCollectives& group, void* x, int64_t n, int64_t dtype);

// out [size, bytes] = everybody's x [bytes], in the order of ranks.
void gather_from_ranks(ShmCollectives& group, const char* x, int64_t bytes, char* out);

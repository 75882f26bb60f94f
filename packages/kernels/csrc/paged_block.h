// Addresses of a block of keys and values in a paged cache.
#pragma once

#include <algorithm>

#include "attention.h"

constexpr int64_t BLOCK = 64;  // keys at a time

// Offsets of the keys of a block in a cache, in elements; HIDDEN for keys that no query sees.
constexpr int64_t HIDDEN = -1;

struct BlockOffsets {
    int64_t offset[BLOCK];
    int64_t first = 0, last = 0;  // range of keys with an offset

    static BlockOffsets none() {
        BlockOffsets offsets;
        std::fill(offsets.offset, offsets.offset + BLOCK, HIDDEN);
        return offsets;
    }

    // Positions [from, to) of the block at `begin`, of a row with this page table.
    void find(const Cache& cache, const int32_t* pages, int64_t head, int64_t begin, int64_t from, int64_t to) {
        first = from - begin, last = to - begin;
        std::fill(offset, offset + first, HIDDEN);
        std::fill(offset + last, offset + BLOCK, HIDDEN);
        int64_t token = cache.kv_heads * cache.head_dim;
        for (int64_t position = from, next; position < to; position = next) {
            int64_t page = position / cache.page_size;
            next = std::min(to, (page + 1) * cache.page_size);
            int64_t at = (pages[page] * cache.page_size + position % cache.page_size) * token + head * cache.head_dim;
            for (; position < next; position++, at += token) offset[position - begin] = at;
        }
    }

    // Returns the offset of a key, or any readable offset for a hidden one.
    int64_t readable_offset(int64_t key) const { return std::max<int64_t>(offset[key], 0); }

    // Prefetches the cache lines that begin in elements [from, to) of a key: pages are scattered, so hardware
    // prefetchers cannot predict them. Inlined, since GCC 12 drops calls of functions that only prefetch.
    template <class T>
    __attribute__((always_inline)) void prefetch(const T* cache, int64_t key, int64_t from, int64_t to) const {
        constexpr int64_t LINE = 64 / int64_t(sizeof(T));
        for (int64_t d = (from + LINE - 1) / LINE * LINE; d < to; d += LINE)
            __builtin_prefetch(cache + readable_offset(key) + d);
    }
};

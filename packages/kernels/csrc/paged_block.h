// A block of keys and values in a paged cache.
#pragma once

#include <algorithm>

#include "attention.h"

constexpr int64_t BLOCK = 64;  // keys at a time

// Where the keys of a block lie in a cache, as offsets in elements; HIDDEN for those that no query sees.
constexpr int64_t HIDDEN = -1;

struct BlockOffsets {
    int64_t offset[BLOCK];
    int64_t first = 0, last = 0;  // that have one

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

    // Where a key lies; for one that is not seen, any place that can be read.
    int64_t readable_offset(int64_t key) const { return std::max<int64_t>(offset[key], 0); }

    // Calls for what will be read soon of a key, the lines of 64 bytes that begin in its elements [from, to): pages lie
    // anywhere, so the processor cannot guess.
    template <class T>
    void prefetch(const T* cache, int64_t key, int64_t from, int64_t to) const {
        constexpr int64_t LINE = 64 / int64_t(sizeof(T));
        for (int64_t d = (from + LINE - 1) / LINE * LINE; d < to; d += LINE)
            __builtin_prefetch(cache + readable_offset(key) + d);
    }
};

#include "sampling.h"

#include "pool.h"
#include "vec.h"

// The first index of a row's largest element. One pass finds the largest, block by block; the block that had it first
// is then looked through.
int64_t argmax_row(const float* row, int64_t n, float* most) {
    constexpr int64_t BLOCK = 1024;
    float best = -INFINITY;
    int64_t where = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t size = n - start < BLOCK ? n - start : BLOCK;
        F32 high = broadcast(-INFINITY);
        I32 nan = {};
        over(size, [&](int64_t i, auto get, auto) {
            F32 x = get(row + start + i);
            if (i + LANES > size) {  // the zeros past the end are not the row's
                I32 past = lanes() >= int32_t(size - i);
                x = past ? broadcast(-INFINITY) : x;
            }
            high = max(x, high);
            nan |= x != x;
        });
        for (int i = 0; i < LANES; i++)
            if (nan[i]) {
                for (where = start; row[where] == row[where];) where++;
                *most = row[where];
                return where;
            }
        if (float block = max(high); block > best) {
            best = block;
            where = start;
        }
    }
    *most = best;
    while (row[where] != best) where++;
    return where;
}

void argmax(const float* logits, int64_t rows, int64_t vocab, float* most, int64_t* index) {
    pool::run_pieces(rows, 1, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++) index[row] = argmax_row(logits + row * vocab, vocab, most + row);
    });
}

void apply_bitmask(float* logits, int64_t rows, int64_t vocab, const int32_t* mask, int64_t mask_stride) {
    pool::run_pieces(rows, 1, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++)
            for (int64_t token = 0; token < vocab; token++) {
                bool allowed = uint32_t(mask[row * mask_stride + token / 32]) >> (token % 32) & 1;
                float& logit = logits[row * vocab + token];
                logit = allowed ? logit : -INFINITY;
            }
    });
}

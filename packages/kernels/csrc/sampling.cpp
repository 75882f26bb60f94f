#include "sampling.h"

#include <cmath>
#include <limits>

#include "pool.h"
#include "vec.h"

namespace {

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

struct Words {
    uint32_t w0, w1, w2, w3;
};

// Philox4x32-10 (Salmon et al. 2011).
Words philox(Words c, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uint64_t left = uint64_t(c.w0) * 0xD2511F53u, right = uint64_t(c.w2) * 0xCD9E8D57u;
        c = {uint32_t(right >> 32) ^ c.w1 ^ k0, uint32_t(right), uint32_t(left >> 32) ^ c.w3 ^ k1, uint32_t(left)};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

}  // namespace

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

float gumbel(const NoiseKey& key, uint32_t token) {
    uint32_t word = philox({key.choice, key.position, token, 0}, key.seed_low, key.seed_high).w0;
    float uniform = float((double(word) + 0.5) * 0x1p-32);
    uniform = uniform > 1 - 0x1p-24f ? 1 - 0x1p-24f : uniform;
    return float(-std::log(-std::log1p(-double(uniform))));
}

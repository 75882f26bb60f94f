// Philox4x32-10 (Salmon et al. 2011) and Gumbel noise: see ops/philox.py, which defines both to the bit.
#pragma once

#include "vec.h"

// What keys the noise of a row, beside the token.
struct NoiseKey {
    uint32_t seed_low, seed_high, choice, position;
};

// No noise is larger: -log(-log1p(-2^-33)).
constexpr float GUMBEL_MAX = 22.8739f;

namespace noise {

// The words of `count` consecutive tokens, side by side so that the compiler computes them as vectors.
template <int count>
inline void words(const NoiseKey& key, uint32_t first, uint32_t (&out)[count]) {
    uint32_t c0[count], c1[count], c2[count], c3[count], k0 = key.seed_low, k1 = key.seed_high;
    for (int i = 0; i < count; i++) {
        c0[i] = key.choice;
        c1[i] = key.position;
        c2[i] = first + uint32_t(i);
        c3[i] = 0;
    }
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < count; i++) {
            uint64_t left = uint64_t(c0[i]) * 0xD2511F53u, right = uint64_t(c2[i]) * 0xCD9E8D57u;
            c0[i] = uint32_t(right >> 32) ^ c1[i] ^ k0;
            c1[i] = uint32_t(right);
            c2[i] = uint32_t(left >> 32) ^ c3[i] ^ k1;
            c3[i] = uint32_t(left);
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < count; i++) out[i] = c0[i];
}

// Standard Gumbel noise of a token. The larger the word, the smaller the noise.
inline float gumbel(const NoiseKey& key, uint32_t token) {
    uint32_t word[1];
    words(key, token, word);
    float uniform = float((double(word[0]) + 0.5) * 0x1p-32);
    uniform = uniform > 1 - 0x1p-24f ? 1 - 0x1p-24f : uniform;
    return float(-std::log(-std::log1p(-double(uniform))));
}

}  // namespace noise

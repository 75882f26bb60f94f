// Sampling as ops/sampling.py defines it, without sorting the vocabulary and with few evaluations of noise.
//
// Tokens are ordered by value, equal values by id, so each filter keeps what comes before some limit: a value and an
// id. A histogram over the upper bits of the values says in which bucket the limit lies; only that bucket is sorted.
//
// The winner has the largest value + noise. Noise falls as its random word rises, so a token can beat the best sum
// so far only if its word is below a bound that costs one exponential; the logarithms are left to the few that are.
#include "sampling.h"

#include <algorithm>
#include <vector>

#include "buffer.h"
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

namespace {

constexpr int BUCKET_BITS = 12;
constexpr float COLDEST = 1e-30f;
constexpr int64_t AT_ONCE = 4 * LANES;  // tokens that are looked at together

// Values are 0 or less, so the bits of their magnitude order them, likeliest first.
inline uint32_t order_of(float value) { return bit_cast<uint32_t>(value) & 0x7FFFFFFF; }
inline uint32_t bucket_of(float value) { return order_of(value) >> (31 - BUCKET_BITS); }

// A token in the order of tokens.
inline uint64_t key_of(float value, int64_t token) { return uint64_t(order_of(value)) << 32 | uint64_t(token); }
inline double weight_of(uint64_t key) { return std::exp(-double(bit_cast<float>(uint32_t(key >> 32)))); }

class Row {
  public:
    // `values` has room for n floats and AT_ONCE more.
    Row(const float* logits, int64_t n, float temperature, float highest, float* values) : values_(values), n_(n) {
        F32 divisor = broadcast(std::max(temperature, COLDEST)), top = broadcast(highest);
        over(n, [&](int64_t i, auto get, auto put) { put(values + i, (get(logits + i) - top) / divisor); });
        std::fill(values + n, values + n + AT_ONCE, -INFINITY);
    }

    void keep(const Filter& filter) {
        floor_ = filter.floor;
        bool nucleus = filter.top_p < 1;
        if (filter.top_k > 0 && filter.top_k < n_)
            keep_first(filter.top_k, nucleus ? filter.top_p : 1);
        else if (nucleus)
            keep_mass(filter.top_p);
    }

    int64_t draw(const NoiseKey& key) const {
        int64_t winner = 0;
        while (values_[winner] != 0) winner++;  // the likeliest, which every filter keeps
        if (!(floor_ <= 0)) return -1;
        double best = noise::gumbel(key, uint32_t(winner));
        for (int64_t start = 0; start < n_; start += AT_ONCE) {
            if (!any(start, float(best) - GUMBEL_MAX - 0.001f)) continue;
            uint32_t words[AT_ONCE];
            noise::words(key, uint32_t(start), words);
            for (int64_t at = 0; at < AT_ONCE; at += LANES) {
                U32 word;
                std::memcpy(&word, words + at, sizeof word);
                // noise > x needs word * 2^-32 < e^-x; what is rounded on the way is far less than the margin
                F32 reach = exp(load(values_ + start + at) - float(best)) * (0x1p32f * 1.0001f) + 2.0f;
                I32 near = __builtin_convertvector(word, F32) <= reach;
                near &= kept(start + at);
                for (int lane = 0; is_any(near) && lane < LANES; lane++) {
                    if (!near[lane]) continue;
                    int64_t token = start + at + lane;
                    double score = double(values_[token]) + noise::gumbel(key, uint32_t(token));
                    if (score > best || (score == best && token < winner)) best = score, winner = token;
                }
            }
        }
        return winner;
    }

  private:
    static bool is_any(I32 mask) {
        uint64_t parts[sizeof mask / 8], all = 0;
        std::memcpy(parts, &mask, sizeof mask);
        for (uint64_t part : parts) all |= part;
        return all;
    }

    // Which tokens the filters keep, of those from `token` on.
    I32 kept(int64_t token) const {
        F32 value = load(values_ + token), limit = broadcast(limit_);
        I32 ids = lanes() + int32_t(token);
        return ((value > limit) | ((value == limit) & (ids <= I32{} + last_))) & (value >= broadcast(floor_)) &
               (value > broadcast(-INFINITY));
    }

    // Whether any of the AT_ONCE tokens from `start` on is kept and at least `least`.
    bool any(int64_t start, float least) const {
        F32 most = load(values_ + start);
        for (int64_t at = LANES; at < AT_ONCE; at += LANES) most = max(load(values_ + start + at), most);
        return is_any((most >= broadcast(std::max(least, floor_))) & (most >= broadcast(limit_)));
    }

    void limit_to(uint64_t key) {
        limit_ = -bit_cast<float>(uint32_t(key >> 32));
        last_ = int32_t(uint32_t(key));
    }

    // The tokens of buckets [first, last], in no order.
    std::vector<uint64_t>& collect(uint32_t first, uint32_t last) const {
        static thread_local std::vector<uint64_t> keys;
        keys.clear();
        for (int64_t token = 0; token < n_; token++)
            if (uint32_t bucket = bucket_of(values_[token]); bucket >= first && bucket <= last)
                keys.push_back(key_of(values_[token], token));
        return keys;
    }

    // Keeps the first `count` tokens, and of those as many as have the share `mass` of all their probability.
    void keep_first(int64_t count, double mass) {
        std::vector<int32_t> counts(1 << BUCKET_BITS);
        for (int64_t token = 0; token < n_; token++) counts[bucket_of(values_[token])]++;
        uint32_t bucket = 0;
        for (int64_t seen = counts[0]; seen < count; seen += counts[bucket]) bucket++;
        auto& keys = collect(0, bucket);
        std::nth_element(keys.begin(), keys.begin() + (count - 1), keys.end());
        limit_to(keys[size_t(count - 1)]);
        if (mass == 1) return;
        keys.resize(size_t(count));
        std::sort(keys.begin(), keys.end());
        double total = 0, before = 0;
        for (uint64_t key : keys) total += weight_of(key);
        keep_until(keys, mass * total, before);
    }

    // Keeps the fewest tokens that have the share `mass` of all probability.
    void keep_mass(double mass) {
        std::vector<double> weights(1 << BUCKET_BITS);
        double total = 0, before = 0;
        for (int64_t start = 0; start < n_; start += LANES) {  // past the end there is no weight
            F32 weight = exp(load(values_ + start));
            for (int lane = 0; lane < LANES; lane++) weights[bucket_of(values_[start + lane])] += double(weight[lane]);
        }
        for (double weight : weights) total += weight;
        for (uint32_t bucket = 0; bucket < weights.size(); bucket++) {
            if (before + weights[bucket] < mass * total) {
                before += weights[bucket];
                continue;
            }
            auto& keys = collect(bucket, bucket);
            std::sort(keys.begin(), keys.end());
            if (keep_until(keys, mass * total, before)) return;
        }
        limit_to(key_of(-INFINITY, INT32_MAX));  // the sums' last digits hid the end
    }

    // Keeps tokens until those before the next, with `before` of an earlier bucket, weigh at least `enough`.
    bool keep_until(const std::vector<uint64_t>& keys, double enough, double& before) {
        for (uint64_t key : keys) {
            limit_to(key);
            before += weight_of(key);
            if (before >= enough) return true;
        }
        return false;
    }

    const float* values_;
    int64_t n_;
    float limit_ = -INFINITY, floor_ = -INFINITY;  // the last value kept by order, the least by min-p
    int32_t last_ = INT32_MAX;                     // of equal values the last id
};

int64_t sample_row(const float* logits, int64_t n, float temperature, const Filter& filter, const NoiseKey& key) {
    static thread_local Buffer buffer;
    float highest;
    argmax_row(logits, n, &highest);
    if (!(highest > -INFINITY && highest < INFINITY) || temperature != temperature) return -1;
    Row row(logits, n, temperature, highest, buffer.floats(n + AT_ONCE));
    row.keep(filter);
    return row.draw(key);
}

}  // namespace

void sample(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const Filter* filters,
            const NoiseKey* keys, int64_t* tokens) {
    pool::run_pieces(rows, 1, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++)
            tokens[row] = sample_row(logits + row * vocab, vocab, temperature[row], filters[row], keys[row]);
    });
}

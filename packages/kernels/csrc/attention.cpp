// Attention over paged keys and values: online softmax (https://arxiv.org/abs/2205.14135) over blocks of 64 keys.
//
// The query heads that share a key-value head, of one new token or of a few, are the rows of a small matrix, so that
// each key and value is read from the cache once for all of them. For each block of keys:
//
//     gather the keys as floats, transposed     keys   [head_dim][64]
//     scores = queries @ keys                   scores [queries][64]      scale, soft cap, mask
//     p = exp(scores - the largest so far)      what was summed before is scaled to the new largest
//     gather the values as floats               values [64][head_dim]
//     sums += p @ values
//
// Blocks begin at multiples of 64 of a row's own positions and are summed up in spans of 256, which are then merged in
// order. A span can be computed anywhere: so one long row keeps every core busy. And a token's result is the same to
// the bit in every batch, in every chunking of its prompt, and on any number of threads.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "linear.h"
#include "pool.h"
#include "vec.h"

namespace {

constexpr int64_t BLOCK = 64;   // keys at a time
constexpr int64_t SPAN = 256;   // keys that are summed up before they are merged with others
constexpr int64_t QUERIES = 32; // rows of the small matrix, unless one token has more query heads to a kv head
constexpr int64_t WIDE = 4;     // vectors side by side in `multiply_add`
constexpr int TALL = LANES == 16 ? 6 : 3;  // and rows: as many as registers hold
constexpr float NONE = -INFINITY;

// c [rows][n] += a [rows][depth] @ b [depth][n] for ROWS rows and n = VECTORS * LANES columns.
template <int ROWS, int VECTORS>
void multiply_add_block(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
    F32 sums[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < VECTORS; j++) sums[i][j] = load(c + i * ldc + j * LANES);
    for (int64_t d = 0; d < depth; d++)
        for (int j = 0; j < VECTORS; j++) {
            F32 column = load(b + d * ldb + j * LANES);
            for (int i = 0; i < ROWS; i++) sums[i][j] = column * a[i * lda + d] + sums[i][j];
        }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < VECTORS; j++) store(c + i * ldc + j * LANES, sums[i][j]);
}

template <int VECTORS>
void multiply_add_columns(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                          int64_t depth) {
    int64_t i = 0;
    for (; i + TALL <= rows; i += TALL)
        multiply_add_block<TALL, VECTORS>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth);
    for (; i < rows; i++) multiply_add_block<1, VECTORS>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth);
}

void multiply_add(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                  int64_t depth, int64_t n) {
    int64_t j = 0;
    for (; j + WIDE * LANES <= n; j += WIDE * LANES)
        multiply_add_columns<WIDE>(a, lda, b + j, ldb, c + j, ldc, rows, depth);
    for (; j < n; j += LANES) multiply_add_columns<1>(a, lda, b + j, ldb, c + j, ldc, rows, depth);
}

// One row's part of a cache, and which positions of it.
template <class T>
struct Pages {
    const Cache& cache;
    const int32_t* table;
    int64_t head;

    const T* at(const char* base, int64_t position) const {
        int64_t slot = int64_t(table[position / cache.page_size]) * cache.page_size + position % cache.page_size;
        return reinterpret_cast<const T*>(base) + (slot * cache.kv_heads + head) * cache.head_dim;
    }
};

// Keys at positions [first, last) of a block into columns of out [width][64]; other columns become 0.
template <class T>
void gather_transposed(const Pages<T>& pages, int64_t begin, int64_t first, int64_t last, int64_t width, float* out) {
    int64_t head_dim = pages.cache.head_dim;
    for (int64_t column = 0; column < BLOCK; column += LANES) {
        const T* keys[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            int64_t position = begin + column + i;
            keys[i] = position >= first && position < last ? pages.at(pages.cache.k, position) : nullptr;
        }
        for (int64_t d = 0; d < width; d += LANES) {
            int64_t count = std::min<int64_t>(head_dim - d, LANES);
            F32 square[LANES];
            for (int64_t i = 0; i < LANES; i++) square[i] = keys[i] ? load_first(keys[i] + d, count) : F32{};
            transpose(square);
            for (int64_t i = 0; i < LANES; i++) store(out + (d + i) * BLOCK + column, square[i]);
        }
    }
}

// Values at positions [first, last) as rows of out [last - first][width].
template <class T>
void gather(const Pages<T>& pages, int64_t first, int64_t last, int64_t width, float* out) {
    int64_t head_dim = pages.cache.head_dim;
    for (int64_t position = first; position < last; position++, out += width) {
        const T* value = pages.at(pages.cache.v, position);
        for (int64_t d = 0; d < width; d += LANES)
            store(out + d, load_first(value + d, std::min<int64_t>(head_dim - d, LANES)));
    }
}

// Sums over keys for each query: values weighed by exp(score - most), the weights, and the largest score.
struct Sums {
    float* values;   // [queries][width]
    float* weights;  // [queries]
    float* most;     // [queries]

    void clear(int64_t queries, int64_t width) const {
        std::fill(values, values + queries * width, 0.0f);
        std::fill(weights, weights + queries, 0.0f);
        std::fill(most, most + queries, NONE);
    }
};

inline float exp_one(float x) { return exp(broadcast(x))[0]; }

void scale_by(float* x, int64_t width, float factor) {
    for (int64_t d = 0; d < width; d += LANES) store(x + d, load(x + d) * factor);
}

// Adds `part`, of later keys, to `total`.
void merge(const Sums& total, const Sums& part, int64_t queries, int64_t width) {
    for (int64_t i = 0; i < queries; i++) {
        if (part.most[i] == NONE && part.weights[i] == 0) continue;  // it saw nothing
        float most = std::max(total.most[i], part.most[i]);
        float before = exp_one(total.most[i] - most), now = exp_one(part.most[i] - most);
        float *sum = total.values + i * width, *more = part.values + i * width;
        for (int64_t d = 0; d < width; d += LANES) store(sum + d, load(sum + d) * before + load(more + d) * now);
        total.weights[i] = total.weights[i] * before + part.weights[i] * now;
        total.most[i] = most;
    }
}

// A few consecutive new tokens of a row against one kv head, as far as the spans [first_span, last_span).
struct Item {
    int32_t row, first_token, tokens, head, first_span, last_span;
    int64_t kept;  // number of its sums among those to be merged later, or -1
};

class Attention {
  public:
    Attention(const float* q, int64_t q_stride, const Cache& cache, const Rows& rows, const Scoring& scoring,
              int64_t heads, float* out, int64_t out_stride)
        : q_(q), q_stride_(q_stride), cache_(cache), rows_(rows), scoring_(scoring), out_(out), out_stride_(out_stride),
          group_(heads / cache.kv_heads), width_((cache.head_dim + LANES - 1) / LANES * LANES),
          block_tokens_(std::max<int64_t>(1, QUERIES / group_)), queries_(block_tokens_ * group_) {}

    void run() {
        plan();
        static thread_local std::vector<float> partial;  // the caller's
        partial.resize(size_t(kept_ * kept_size()));
        float* kept = partial.data();
        pool::run(int64_t(items_.size()), [&](int64_t i) {
            cache_.format == FLOAT32 ? compute<float>(items_[size_t(i)], kept) : compute<Bf16>(items_[size_t(i)], kept);
        });
        pool::run_pieces(int64_t(merges_.size()), 4, [&](int64_t from, int64_t to) {
            for (int64_t i = from; i < to; i++) merge_spans(merges_[size_t(i)], kept);
        });
    }

  private:
    // Cuts the step into items: long ones first, so that the last to finish is a short one.
    void plan() {
        int64_t few = 8 * pool::threads();
        for (int64_t row = 0; row < rows_.rows; row++) {
            int32_t start = rows_.query_start[row], count = rows_.query_start[row + 1] - start;
            for (int32_t token = 0; token < count; token += int32_t(block_tokens_)) {
                int32_t tokens = std::min(count - token, int32_t(block_tokens_));
                int64_t last = rows_.kv_lens[row] - count + token + tokens;
                int64_t first = std::max<int64_t>(0, scoring_.window ? last - tokens - scoring_.window + 1 : 0);
                int32_t from = int32_t(first / SPAN), to = int32_t((last + SPAN - 1) / SPAN);
                bool split = count <= block_tokens_ && rows_.rows * cache_.kv_heads < few && to - from > 1;
                for (int32_t head = 0; head < cache_.kv_heads; head++) {
                    Item item = {int32_t(row), start + token, tokens, head, from, to, -1};
                    if (!split) {
                        items_.push_back(item);
                        continue;
                    }
                    item.kept = kept_;
                    merges_.push_back(item);
                    for (int32_t span = from; span < to; span++)
                        items_.push_back({item.row, item.first_token, tokens, head, span, span + 1, kept_++});
                }
            }
        }
        auto longer = [](const Item& a, const Item& b) { return a.last_span - a.first_span > b.last_span - b.first_span; };
        std::stable_sort(items_.begin(), items_.end(), longer);
    }

    int64_t sums_size() const { return queries_ * (width_ + 2); }
    int64_t kept_size() const { return sums_size(); }

    Sums sums_at(float* memory) const {
        return {memory, memory + queries_ * width_, memory + queries_ * (width_ + 1)};
    }

    template <class T>
    void compute(const Item& item, float* kept) const {
        static thread_local std::vector<float> scratch;
        scratch.resize(size_t(queries_ * width_ + 2 * BLOCK * width_ + queries_ * BLOCK + 2 * sums_size()));
        float* queries = scratch.data();
        float* work = queries + queries_ * width_;
        float* memory = work + 2 * BLOCK * width_ + queries_ * BLOCK;
        Sums total = sums_at(memory), part = item.kept < 0 ? sums_at(memory + sums_size()) : sums_at(kept + item.kept * kept_size());
        int64_t count = item.tokens * group_;
        read_queries(item, queries);
        total.clear(count, width_);
        for (int64_t span = item.first_span; span < item.last_span; span++) {
            part.clear(count, width_);
            for (int64_t begin = span * SPAN; begin < (span + 1) * SPAN; begin += BLOCK)
                add_block<T>(item, queries, begin, part, work);
            if (item.kept < 0) merge(total, part, count, width_);
        }
        if (item.kept < 0) write(item, total);
    }

    // Adds the block of keys at `begin` to `sums`.
    template <class T>
    void add_block(const Item& item, const float* queries, int64_t begin, const Sums& sums, float* work) const {
        float *keys = work, *values = keys + BLOCK * width_, *scores = values + BLOCK * width_;
        int64_t position = position_of(item);
        int64_t first = std::max(begin, scoring_.window ? position - scoring_.window + 1 : 0);
        int64_t last = std::min(begin + BLOCK, position + item.tokens);
        if (first >= last) return;
        Pages<T> pages = {cache_, rows_.page_table + item.row * rows_.page_stride, item.head};
        int64_t count = item.tokens * group_;
        gather_transposed(pages, begin, first, last, width_, keys);
        std::fill(scores, scores + count * BLOCK, 0.0f);
        multiply_add(queries, width_, keys, BLOCK, scores, BLOCK, count, cache_.head_dim, BLOCK);
        for (int64_t i = 0; i < count; i++) weigh(scores + i * BLOCK, i, begin, position + i / group_, sums);
        gather(pages, first, last, width_, values);
        multiply_add(scores + (first - begin), BLOCK, values, width_, sums.values, width_, count, last - first, width_);
    }

    // Turns the scores of query i, at `position`, into weights, and scales its sums to the new largest score.
    void weigh(float* scores, int64_t i, int64_t begin, int64_t position, const Sums& sums) const {
        int64_t last = position + 1 - begin, first = scoring_.window ? last - scoring_.window : 0;
        F32 most = broadcast(sums.most[i]), total = {};
        for (int64_t at = 0; at < BLOCK; at += LANES) {
            F32 score = load(scores + at);
            if (scoring_.softcap != 0) score = tanh(score / scoring_.softcap) * scoring_.softcap;
            I32 lane = lanes() + int32_t(at);
            I32 seen = (lane < I32{} + int32_t(std::min(last, BLOCK))) & (lane >= I32{} + int32_t(std::max(first, -BLOCK)));
            score = seen ? score : broadcast(NONE);
            store(scores + at, score);
            most = max(score, most);
        }
        float largest = max(most), base = largest == NONE ? 0.0f : largest;
        for (int64_t at = 0; at < BLOCK; at += LANES) {
            F32 weight = exp(load(scores + at) - base);
            store(scores + at, weight);
            total = total + weight;
        }
        float factor = exp_one(sums.most[i] - base);
        if (factor != 1) scale_by(sums.values + i * width_, width_, factor);
        sums.weights[i] = sums.weights[i] * factor + sum(total);
        sums.most[i] = largest;
    }

    // The position of an item's first token in its row.
    int64_t position_of(const Item& item) const {
        return rows_.kv_lens[item.row] - (rows_.query_start[item.row + 1] - item.first_token);
    }

    void read_queries(const Item& item, float* queries) const {
        for (int64_t i = 0; i < item.tokens * group_; i++) {
            const float* from = q_ + (item.first_token + i / group_) * q_stride_ +
                                (item.head * group_ + i % group_) * cache_.head_dim;
            for (int64_t d = 0; d < cache_.head_dim; d++) queries[i * width_ + d] = from[d] * scoring_.scale;
        }
    }

    void merge_spans(const Item& item, float* kept) const {
        static thread_local std::vector<float> scratch;
        scratch.resize(size_t(sums_size()));
        Sums total = sums_at(scratch.data());
        int64_t count = item.tokens * group_;
        total.clear(count, width_);
        for (int64_t span = 0; span < item.last_span - item.first_span; span++)
            merge(total, sums_at(kept + (item.kept + span) * kept_size()), count, width_);
        write(item, total);
    }

    void write(const Item& item, const Sums& sums) const {
        for (int64_t i = 0; i < item.tokens * group_; i++) {
            int64_t head = item.head * group_ + i % group_;
            float* out = out_ + (item.first_token + i / group_) * out_stride_ + head * cache_.head_dim;
            float factor = 1, weight = sums.weights[i];
            if (scoring_.sinks) {
                float most = std::max(sums.most[i], scoring_.sinks[head]);
                factor = exp_one(sums.most[i] - most);
                weight = weight * factor + exp_one(scoring_.sinks[head] - most);
            }
            const float* value = sums.values + i * width_;
            over(cache_.head_dim, [&](int64_t d, auto, auto put) { put(out + d, load(value + d) * factor / weight); });
        }
    }

    const float* q_;
    int64_t q_stride_;
    const Cache& cache_;
    const Rows& rows_;
    const Scoring& scoring_;
    float* out_;
    int64_t out_stride_;
    int64_t group_, width_, block_tokens_, queries_;
    int64_t kept_ = 0;
    std::vector<Item> items_, merges_;
};

}  // namespace

void attend(const float* q, int64_t q_stride, const Cache& cache, const Rows& rows, const Scoring& scoring,
            int64_t heads, float* out, int64_t out_stride) {
    Attention(q, q_stride, cache, rows, scoring, heads, out, out_stride).run();
}

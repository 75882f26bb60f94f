// Attention over paged keys and values: online softmax (https://arxiv.org/abs/2205.14135) over blocks of 64 keys.
//
// The query heads that share a key-value head, of one new token or of a few, are the rows of a small matrix, so that
// each key and value is read from the cache once for all of them. For each block of keys:
//
//     lay the keys out as panels                the layout of weights, see format.h: 4 panels of 16 keys
//     scores = queries @ keys                   [queries][64], then scale, soft cap, mask
//     p = exp(scores - the largest so far)      what was summed before is scaled to the new largest
//     lay the values out as panels              16 elements of head_dim each, 64 keys deep
//     sums += p @ values
//
// Blocks begin at multiples of 64 of a row's own positions and are summed up in spans of 256, which are then merged in
// order. A span can be computed anywhere: so one long row keeps every core busy. And in float32 a token's result is the
// same to the bit in every batch, in every chunking of its prompt, and on any number of threads.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "buffer.h"
#include "linear.h"
#include "pool.h"
#include "product.h"

namespace {

constexpr int64_t BLOCK = 64;    // keys at a time
constexpr int64_t SPAN = 256;    // keys that are summed up before they are merged with others
constexpr int64_t QUERIES = 32;  // rows of the small matrix, unless one token has more query heads to a kv head
constexpr float NONE = -INFINITY;

// Where the keys of a block lie in a cache, as offsets in elements; NOWHERE for those that no query sees.
constexpr int64_t NOWHERE = -1;

struct Places {
    int64_t offset[BLOCK];

    // Positions [first, last) of the block at `begin`, of a row with this page table.
    void find(const Cache& cache, const int32_t* pages, int64_t head, int64_t begin, int64_t first, int64_t last) {
        std::fill(offset, offset + BLOCK, NOWHERE);
        int64_t token = cache.kv_heads * cache.head_dim;
        for (int64_t position = first, next; position < last; position = next) {
            int64_t page = position / cache.page_size;
            next = std::min(last, (page + 1) * cache.page_size);
            int64_t at = (pages[page] * cache.page_size + position % cache.page_size) * token + head * cache.head_dim;
            for (; position < next; position++, at += token) offset[position - begin] = at;
        }
    }

    // Calls for what will be read soon: pages lie anywhere, so the processor cannot guess.
    template <class T>
    void prefetch(const T* cache, int64_t head_dim) const {
        for (int64_t at : offset)
            for (int64_t d = 0; at != NOWHERE && d < head_dim; d += 64 / int64_t(sizeof(T)))
                __builtin_prefetch(cache + at + d);
    }
};

// LANES words of 4 bytes of an array of n elements, from element i on; zero past the end.
template <class T>
inline F32 load_words(const T* p, int64_t i, int64_t n) {
    F32 words = {};
    int64_t bytes = std::min<int64_t>((n - i) * int64_t(sizeof(T)), sizeof words);
    if (bytes == sizeof words)
        std::memcpy(&words, p + i, sizeof words);
    else if (bytes > 0)
        std::memcpy(&words, p + i, size_t(bytes));
    return words;
}

// The keys of a block as panels with a key in each column.
template <class Format, class T = typename Format::Element>
void lay_out_keys(const T* cache, const Places& places, int64_t n, char* out) {
    int64_t rows = panel_rows<Format>(n);
    for (int64_t column = 0; column < BLOCK; column += LANES) {
        char* panel = out + column / PANEL * rows * ROW_BYTES + column % PANEL * 4;
        for (int64_t row = 0; row < rows; row += LANES) {
            F32 square[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                int64_t offset = places.offset[column + i];
                square[i] = offset == NOWHERE ? F32{} : load_words(cache + offset, row * Format::GROUP, n);
            }
            transpose(square);
            for (int64_t i = 0; i < LANES; i++) std::memcpy(panel + (row + i) * ROW_BYTES, &square[i], sizeof(F32));
        }
    }
}

inline F32 value_words(const float* const* values, int64_t d, int64_t n) {
    return values[0] ? load_words(values[0], d, n) : F32{};
}

inline F32 value_words(const Bf16* const* values, int64_t d, int64_t n) {  // of two keys, side by side
    U32 words = {};
    for (int i = 0; i < 2; i++) {
        U16 half = {};
        if (values[i] && n - d >= LANES)
            std::memcpy(&half, values[i] + d, sizeof half);
        else if (values[i] && n > d)
            std::memcpy(&half, values[i] + d, size_t(n - d) * 2);
        words |= __builtin_convertvector(half, U32) << (16 * i);
    }
    return bit_cast<F32>(words);
}

// The values of a block as panels with an element of head_dim in each column.
template <class Format, class T = typename Format::Element>
void lay_out_values(const T* cache, const Places& places, int64_t n, char* out) {
    int64_t rows = BLOCK / Format::GROUP;
    for (int64_t row = 0; row < rows; row++) {
        const T* values[Format::GROUP];
        for (int64_t i = 0; i < Format::GROUP; i++) {
            int64_t offset = places.offset[row * Format::GROUP + i];
            values[i] = offset == NOWHERE ? nullptr : cache + offset;
        }
        for (int64_t d = 0; d < round_up(n, PANEL); d += LANES) {
            F32 words = value_words(values, d, n);
            std::memcpy(out + (d / PANEL * rows + row) * ROW_BYTES + d % PANEL * 4, &words, sizeof words);
        }
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
        : q_(q),
          q_stride_(q_stride),
          cache_(cache),
          rows_(rows),
          scoring_(scoring),
          out_(out),
          out_stride_(out_stride),
          group_(heads / cache.kv_heads),
          width_(round_up(cache.head_dim, PANEL)),
          block_tokens_(std::max<int64_t>(1, QUERIES / group_)),
          queries_(block_tokens_ * group_) {}

    void run() {
        plan();
        static thread_local Buffer buffer;  // the caller's
        float* kept = buffer.floats(kept_ * sums_size());
        pool::run(int64_t(items_.size()), [&](int64_t i) {
            cache_.format == FLOAT32 ? compute<Floats>(items_[size_t(i)], kept)
                                     : compute<Bfloats>(items_[size_t(i)], kept);
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
        auto longer = [](const Item& a, const Item& b) {
            return a.last_span - a.first_span > b.last_span - b.first_span;
        };
        std::stable_sort(items_.begin(), items_.end(), longer);
    }

    int64_t sums_size() const { return round_up(queries_ * (width_ + 2), PANEL); }

    Sums sums_at(float* memory) const { return {memory, memory + queries_ * width_, memory + queries_ * (width_ + 1)}; }

    // Where an item is computed: a thread's own memory.
    template <class Format>
    struct Workplace {
        typename Format::Input* queries;  // [queries][stride]
        char *keys, *values;              // panels
        float* scores;                    // [queries][64]
        typename Format::Input* weights;  // [queries][64]
        float* product;                   // [queries][width]
        Sums total, part;
        amx::Tiles tiles;
    };

    template <class Format>
    void compute(const Item& item, float* kept) const {
        using Input = typename Format::Input;
        static thread_local Buffer buffer;
        int64_t key_bytes = panel_rows<Format>(cache_.head_dim) * ROW_BYTES;
        int64_t value_bytes = BLOCK * width_ * int64_t(sizeof(typename Format::Element));
        int64_t stride = input_bytes<Format>(cache_.head_dim), size = input_bytes<Format>(BLOCK);
        char* memory = buffer.bytes(queries_ * (stride + size + 4 * BLOCK + 4 * width_) + 8 * sums_size() +
                                    4 * key_bytes + value_bytes);
        auto take = [&](int64_t bytes) { return (memory += bytes) - bytes; };
        Workplace<Format> place;
        place.keys = take(4 * key_bytes);
        place.values = take(value_bytes);
        place.queries = reinterpret_cast<Input*>(take(queries_ * stride));
        place.scores = reinterpret_cast<float*>(take(queries_ * 4 * BLOCK));
        place.weights = reinterpret_cast<Input*>(take(queries_ * size));
        place.product = reinterpret_cast<float*>(take(queries_ * 4 * width_));
        place.total = sums_at(reinterpret_cast<float*>(take(4 * sums_size())));
        place.part = sums_at(item.kept < 0 ? reinterpret_cast<float*>(memory) : kept + item.kept * sums_size());
        int64_t count = item.tokens * group_;
        read_queries(item, place.queries, stride / int64_t(sizeof(Input)));
        place.total.clear(count, width_);
        for (int64_t span = item.first_span; span < item.last_span; span++) {
            place.part.clear(count, width_);
            for (int64_t begin = span * SPAN; begin < (span + 1) * SPAN; begin += BLOCK)
                add_block<Format>(item, begin, place);
            if (item.kept < 0) merge(place.total, place.part, count, width_);
        }
        if (item.kept < 0) write(item, place.total);
    }

    // Adds the block of keys at `begin` to `place.part`.
    template <class Format>
    void add_block(const Item& item, int64_t begin, Workplace<Format>& place) const {
        int64_t position = position_of(item), count = item.tokens * group_;
        int64_t first = std::max(begin, scoring_.window ? position - scoring_.window + 1 : 0);
        int64_t last = std::min(begin + BLOCK, position + item.tokens);
        if (first >= last) return;
        using Element = typename Format::Element;
        const int32_t* pages = rows_.page_table + item.row * rows_.page_stride;
        const auto *k = reinterpret_cast<const Element*>(cache_.k), *v = reinterpret_cast<const Element*>(cache_.v);
        Places places, next;
        places.find(cache_, pages, item.head, begin, first, last);
        if (int64_t end = std::min(last + BLOCK, position + item.tokens); end > last) {
            next.find(cache_, pages, item.head, last, last, end);
            next.prefetch(k, cache_.head_dim);
            next.prefetch(v, cache_.head_dim);
        }
        int64_t key_bytes = panel_rows<Format>(cache_.head_dim) * ROW_BYTES;
        lay_out_keys<Format>(k, places, cache_.head_dim, place.keys);
        multiply<Format>(place, reinterpret_cast<char*>(place.queries), input_bytes<Format>(cache_.head_dim), count,
                         place.keys, key_bytes, BLOCK, place.scores);
        for (int64_t i = 0; i < count; i++)
            weigh(place.scores + i * BLOCK, i, begin, position + i / group_, place.part, place.weights + i * BLOCK);
        lay_out_values<Format>(v, places, cache_.head_dim, place.values);
        multiply<Format>(place, reinterpret_cast<char*>(place.weights), input_bytes<Format>(BLOCK), count, place.values,
                         BLOCK / Format::GROUP * ROW_BYTES, width_, place.product);
        for (int64_t i = 0; i < count * width_; i += LANES)
            store(place.part.values + i, load(place.part.values + i) + load(place.product + i));
    }

    // out [rows][columns] = x [rows] @ panels.
    template <class Format>
    void multiply(Workplace<Format>& place, const char* x, int64_t stride, int64_t rows, const char* panels,
                  int64_t panel_bytes, int64_t columns, float* out) const {
        for (int64_t row = 0; row < rows; row += QUERIES)
            for (int64_t column = 0; column < columns; column += 4 * PANEL) {
                int width = int(std::min<int64_t>((columns - column) / PANEL, 4));
                auto* sums = reinterpret_cast<F32*>(out + row * columns + column);
                product::multiply<Format>(place.tiles, true, x + row * stride, stride,
                                          int(std::min(rows - row, QUERIES)), panels + column / PANEL * panel_bytes,
                                          panel_bytes, width, sums, columns / LANES);
            }
    }

    // Turns the scores of query i, at `position`, into weights, and scales its sums to the new largest score.
    template <class T>
    void weigh(float* scores, int64_t i, int64_t begin, int64_t position, const Sums& sums, T* weights) const {
        int64_t last = position + 1 - begin, first = scoring_.window ? last - scoring_.window : 0;
        F32 most = broadcast(sums.most[i]), total = {};
        for (int64_t at = 0; at < BLOCK; at += LANES) {
            F32 score = load(scores + at);
            if (scoring_.softcap != 0) score = tanh(score / scoring_.softcap) * scoring_.softcap;
            I32 lane = lanes() + int32_t(at);
            I32 seen =
                (lane < I32{} + int32_t(std::min(last, BLOCK))) & (lane >= I32{} + int32_t(std::max(first, -BLOCK)));
            score = seen ? score : broadcast(NONE);
            store(scores + at, score);
            most = max(score, most);
        }
        float largest = max(most), base = largest == NONE ? 0.0f : largest;
        for (int64_t at = 0; at < BLOCK; at += LANES) {
            F32 weight = exp(load(scores + at) - base);
            store(weights + at, weight);
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

    // Queries, scaled, in rows of `stride` elements that are zero past head_dim.
    template <class T>
    void read_queries(const Item& item, T* queries, int64_t stride) const {
        for (int64_t i = 0; i < item.tokens * group_; i++) {
            const float* from =
                q_ + (item.first_token + i / group_) * q_stride_ + (item.head * group_ + i % group_) * cache_.head_dim;
            T* row = queries + i * stride;
            over(cache_.head_dim, [&](int64_t d, auto get, auto put) { put(row + d, get(from + d) * scoring_.scale); });
            std::memset(static_cast<void*>(row + cache_.head_dim), 0, size_t(stride - cache_.head_dim) * sizeof(T));
        }
    }

    void merge_spans(const Item& item, float* kept) const {
        static thread_local Buffer buffer;
        Sums total = sums_at(buffer.floats(sums_size()));
        int64_t count = item.tokens * group_;
        total.clear(count, width_);
        for (int64_t span = 0; span < item.last_span - item.first_span; span++)
            merge(total, sums_at(kept + (item.kept + span) * sums_size()), count, width_);
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

// Attention over paged keys and values: online softmax (https://arxiv.org/abs/2205.14135) over blocks of 64 keys.
//
// The query heads that share a key-value head, of one new token or of a few, are the rows of a small matrix, so that
// each key and value is read from the cache once for all of them. For each block of keys:
//
//     repack the keys as panels                 the layout of weights, see format.h: 4 panels of 16 keys
//     scores = queries @ keys                   [queries][64], then scale, soft cap, mask
//     p = exp(scores - running maximum)         earlier sums are rescaled to the new maximum
//     repack the values as panels               16 elements of head_dim each, 64 keys deep
//     sums += p @ values
//
// Repacking values pays off if many queries share them. For few, as in a decode, values are read in place, in the same
// order of additions. tile_attention.h computes bfloat16 on AMX tiles and with AVX-512 BF16.
//
// Blocks begin at multiples of 64 of a row's own positions and are summed up in spans of 256, which are then merged in
// order. Spans are independent, so one long row can use every core. A token's result is bitwise equal in every batch,
// for every chunking of its prompt and any number of threads, as long as all values are finite: tokens that are computed
// together multiply each other's values, some by zero, which turns an infinity into NaN.
#include "attention.h"

#include "attention_items.h"
#include "buffer.h"
#include "in_place.h"
#include "repack.h"
#include "linear.h"
#include "product.h"
#include "tile_attention.h"

namespace {

constexpr int64_t QUERIES = 64;  // rows of the small matrix, unless one token has more query heads to a kv head
constexpr int64_t ROWS = 32;     // of them that are multiplied at a time
constexpr float NONE = -INFINITY;

// Sums over keys for each query: values weighed by exp(score - most), the weights, and the largest score.
struct Sums {
    float* values;   // [queries][width]
    float* weights;  // [queries]
    float* most;     // [queries]

    Sums from(int64_t query, int64_t width) const { return {values + query * width, weights + query, most + query}; }

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
        if (part.most[i] == NONE && part.weights[i] == 0) continue;  // it saw no key
        float most = std::max(total.most[i], part.most[i]);
        float before = exp_one(total.most[i] - most), now = exp_one(part.most[i] - most);
        float *sum = total.values + i * width, *more = part.values + i * width;
        for (int64_t d = 0; d < width; d += LANES) store(sum + d, load(sum + d) * before + load(more + d) * now);
        total.weights[i] = total.weights[i] * before + part.weights[i] * now;
        total.most[i] = most;
    }
}

class PanelAttention : AttentionItems {
  public:
    explicit PanelAttention(const AttentionOperands& operands)
        : AttentionItems(operands, QUERIES, sums_size),
          queries_(std::max(block_tokens_ * group_, FEW * cache_.kv_heads)) {}

    void run() const {
        auto compute_item = [&](size_t index, float* kept) {
            cache_.format == FLOAT32 ? compute<Floats>(index, kept) : compute<Bfloats>(index, kept);
        };
        run_items(compute_item, [&](const Item& item, float* kept) { merge_spans(item, kept); });
    }

  private:
    // Size of the sums of so many queries of each of some kv heads, in floats.
    static int64_t sums_size(int64_t queries, int64_t heads, int64_t width) {
        return round_up(queries * heads * (width + 2), PANEL);
    }

    Sums sums_at(float* memory, int64_t queries) const {
        return {memory, memory + queries * width_, memory + queries * (width_ + 1)};
    }

    // Scratch memory of a thread for one item.
    template <class Format>
    struct Workplace {
        typename Format::Input* queries;  // [queries][stride]
        char *keys, *values;              // panels
        float* scores;                    // [queries][64]
        typename Format::Input* weights;  // [queries][64]
        float* product;                   // [queries][width]
        Sums total, part;
        amx::Tiles* tiles;
    };

    template <class Format>
    void compute(size_t index, float* kept) const {
        using Input = typename Format::Input;
        const Item& item = items_[index];
        static thread_local Buffer buffer;
        int64_t key_bytes = panel_rows<Format>(cache_.head_dim) * ROW_BYTES;
        int64_t value_bytes = BLOCK * width_ * int64_t(sizeof(typename Format::Element));
        int64_t stride = input_bytes<Format>(cache_.head_dim), size = input_bytes<Format>(BLOCK);
        int64_t count = count_of(item), all = queries_of(item);
        char* memory = buffer.bytes(queries_ * (stride + size + 4 * BLOCK + 4 * width_) + 4 * key_bytes + value_bytes +
                                    8 * sums_size(queries_, 1, width_));
        auto take = [&](int64_t bytes) { return (memory += bytes) - bytes; };
        Workplace<Format> place;
        place.keys = take(4 * key_bytes);
        place.values = take(value_bytes);
        place.queries = reinterpret_cast<Input*>(take(queries_ * stride));
        place.scores = reinterpret_cast<float*>(take(queries_ * 4 * BLOCK));
        place.weights = reinterpret_cast<Input*>(take(queries_ * size));
        place.product = reinterpret_cast<float*>(take(queries_ * 4 * width_));
        place.total = sums_at(reinterpret_cast<float*>(take(4 * sums_size(all, 1, width_))), all);
        place.part = sums_at(item.kept < 0 ? reinterpret_cast<float*>(memory) : kept + item.kept, all);
        amx::Tiles tiles;
        place.tiles = &tiles;
        auto of_head = [&](int64_t head) {
            Workplace<Format> mine = place;
            mine.queries += head * count * (stride / int64_t(sizeof(Input)));
            mine.total = place.total.from(head * count, width_);
            mine.part = place.part.from(head * count, width_);
            return mine;
        };
        for (int32_t head = 0; head < item.heads; head++)
            read_queries(item.of(head), of_head(head).queries, stride / int64_t(sizeof(Input)));
        place.total.clear(all, width_);
        BlockOffsets here = offsets_of(item, 0, item.first_span * SPAN), soon;
        for (int64_t span = item.first_span; span < item.last_span; span++) {
            place.part.clear(all, width_);
            int64_t end = std::min((span + 1) * SPAN, end_of(item));
            for (int64_t begin = span * SPAN; begin < end; begin += BLOCK)
                for (int32_t head = 0; head < item.heads; head++, here = soon) {
                    Workplace<Format> mine = of_head(head);
                    soon = offsets_after(index, head, begin);
                    if (here.first < here.last) add_block<Format>(item.of(head), begin, here, soon, mine);
                }
            if (item.kept < 0) merge(place.total, place.part, all, width_);
        }
        for (int32_t head = 0; item.kept < 0 && head < item.heads; head++)
            write(item.of(head), of_head(head).total);
    }

    // The block that a thread probably reads next, for prefetching: of the next kv head, of the next block, or of the
    // item that follows if all threads advance equally.
    BlockOffsets offsets_after(size_t index, int32_t head, int64_t begin) const {
        const Item& item = items_[index];
        if (head + 1 < item.heads) return offsets_of(item, head + 1, begin);
        begin += BLOCK;
        if (begin < std::min(item.last_span * SPAN, end_of(item))) return offsets_of(item, 0, begin);
        const Item* next = next_of(index);
        return next ? offsets_of(*next, 0, next->first_span * SPAN) : BlockOffsets::none();
    }

    // Adds the block of keys at `begin` to `place.part`.
    template <class Format>
    void add_block(const Item& item, int64_t begin, const BlockOffsets& offsets, const BlockOffsets& soon,
                   Workplace<Format>& place) const {
        int64_t count = count_of(item);
        using Element = typename Format::Element;
        const auto *k = reinterpret_cast<const Element*>(cache_.k), *v = reinterpret_cast<const Element*>(cache_.v);
        int64_t n = cache_.head_dim, value = cache_.value_dim, key_bytes = panel_rows<Format>(n) * ROW_BYTES;
        bool in_place = READS_IN_PLACE<Format> && count <= FEW;
        for (int64_t key = 0; !in_place && key < soon.last; key++) {
            soon.prefetch(k, key, 0, n);
            if (v != k) soon.prefetch(v, key, 0, value);
        }
        repack_keys<Format>(k, offsets, n, place.keys, [](int64_t) {});
        multiply<Format>(place, reinterpret_cast<char*>(place.queries), input_bytes<Format>(n), count, place.keys,
                         key_bytes, round_up(offsets.last, PANEL), place.scores, BLOCK);
        for (int64_t i = 0; i < count; i++)
            weigh(item, place.scores + i * BLOCK, i, begin, place.part, place.weights + i * BLOCK);
        if constexpr (READS_IN_PLACE<Format>)
            if (in_place)
                return in_groups(value % elements_at_once(1) == 0, count, [&](auto size, auto whole, int64_t i) {
                    weigh_in_place<Format, size, whole>(place.weights + i * BLOCK, k, v, offsets, soon, value,
                                                        place.part.values + i * width_, width_);
                });
        repack_values<Format>(v, offsets, value, place.values);
        multiply<Format>(place, reinterpret_cast<char*>(place.weights), input_bytes<Format>(BLOCK), count, place.values,
                         BLOCK / Format::GROUP * ROW_BYTES, width_, place.product, width_);
        for (int64_t i = 0; i < count * width_; i += LANES)
            store(place.part.values + i, load(place.part.values + i) + load(place.product + i));
    }

    // out [rows][columns] = x [rows] @ panels; rows of out are `out_width` floats apart.
    template <class Format>
    void multiply(Workplace<Format>& place, const char* x, int64_t stride, int64_t rows, const char* panels,
                  int64_t panel_bytes, int64_t columns, float* out, int64_t out_width) const {
        for (int64_t row = 0; row < rows; row += ROWS)
            for (int64_t column = 0; column < columns; column += 4 * PANEL) {
                int width = int(std::min<int64_t>((columns - column) / PANEL, 4));
                auto* sums = reinterpret_cast<F32*>(out + row * out_width + column);
                product::multiply<Format>(*place.tiles, true, x + row * stride, stride,
                                          int(std::min(rows - row, ROWS)), panels + column / PANEL * panel_bytes,
                                          panel_bytes, width, sums, out_width / LANES);
            }
    }

    // Turns the scores of query i of an item into weights, and scales its sums to the new largest score.
    template <class T>
    void weigh(const Item& item, const float* scores, int64_t i, int64_t begin, const Sums& sums, T* weights) const {
        int64_t token = i / group_, last = seen_by(item.row, item.first_token + token) - begin;
        int64_t first = scoring_.window ? position_of(item) + token + 1 - begin - scoring_.window : 0;
        bool all_seen = first <= 0 && last >= BLOCK;
        F32 score[BLOCK / LANES], most = broadcast(sums.most[i]), total = {};
        UNROLLED for (int64_t part = 0; part < BLOCK / LANES; part++) {
            F32 x = load(scores + part * LANES);
            if (scoring_.softcap != 0) x = tanh(x / scoring_.softcap) * scoring_.softcap;
            if (!all_seen) {
                I32 lane = lanes() + int32_t(part * LANES);
                I32 seen = (lane < I32{} + int32_t(std::min(last, BLOCK))) &
                           (lane >= I32{} + int32_t(std::max(first, -BLOCK)));
                x = seen ? x : broadcast(NONE);
            }
            score[part] = x;
            most = max(x, most);
        }
        float largest = max(most), base = largest == NONE ? 0.0f : largest;
        UNROLLED for (int64_t part = 0; part < BLOCK / LANES; part++) {
            F32 weight = exp(score[part] - base);
            store(weights + part * LANES, weight);
            total = total + weight;
        }
        float factor = sums.most[i] == base ? 1.0f : exp_one(sums.most[i] - base);
        if (factor != 1) scale_by(sums.values + i * width_, width_, factor);
        sums.weights[i] = sums.weights[i] * factor + sum(total);
        sums.most[i] = largest;
    }

    // Queries, scaled, in rows of `stride` elements that are zero past head_dim.
    template <class T>
    void read_queries(const Item& item, T* queries, int64_t stride) const {
        for (int64_t i = 0; i < count_of(item); i++) {
            const float* from = query_of(item, i);
            T* row = queries + i * stride;
            over(cache_.head_dim, [&](int64_t d, auto get, auto put) { put(row + d, get(from + d) * scoring_.scale); });
            std::memset(static_cast<void*>(row + cache_.head_dim), 0, size_t(stride - cache_.head_dim) * sizeof(T));
        }
    }

    void merge_spans(const Item& item, float* kept) const {
        static thread_local Buffer buffer;
        int64_t count = count_of(item), all = queries_of(item), size = sums_size(all, 1, width_);
        Sums total = sums_at(buffer.floats(size), all);
        total.clear(all, width_);
        for (int64_t span = 0; span < item.last_span - item.first_span; span++)
            merge(total, sums_at(kept + item.kept + span * size, all), all, width_);
        for (int32_t head = 0; head < item.heads; head++) write(item.of(head), total.from(head * count, width_));
    }

    void write(const Item& item, const Sums& sums) const {
        for (int64_t i = 0; i < count_of(item); i++) {
            float *out = out_of(item, i), factor = 1, weight = sums.weights[i];
            if (scoring_.sinks) {
                float sink = scoring_.sinks[head_of(item, i)], most = std::max(sums.most[i], sink);
                factor = exp_one(sums.most[i] - most);
                weight = weight * factor + exp_one(sink - most);
            }
            const float* value = sums.values + i * width_;
            over(cache_.value_dim, [&](int64_t d, auto, auto put) { put(out + d, load(value + d) * factor / weight); });
        }
    }

    int64_t queries_;  // maximum of an item
};

}  // namespace

void attend(const AttentionOperands& operands) {
#if defined(__AVX512BF16__)
    if (operands.cache.format == BFLOAT16 && operands.cache.k != operands.cache.v)
        return tile_attention::TileAttention(operands).run();
#endif
    PanelAttention(operands).run();
}

// Attention over bfloat16 keys and values, on AMX tiles or with AVX-512's dot products (algorithm: attention.cpp).
//
// Scores are computed transposed, keys by queries: softmax works on 16 queries at a time, and its weights are at once
// the second operand of
//
//     sums [head_dim][16 queries] = values^T [head_dim][256 keys] @ weights [256 keys][16 queries]
//
// Keys and values of a span are laid out as tiles once for all queries of an item. For few queries, as in a decode,
// both are read in place, values in the order of additions of a tile product: results are bitwise equal.
#pragma once

#include "attention_items.h"
#include "buffer.h"
#include "in_place.h"
#include "product.h"
#include "repack.h"
#include "tile_softmax.h"

#if defined(__AVX512BF16__)

namespace tile_attention {

using namespace tile_softmax;

constexpr int64_t QUERIES = 256;  // of an item, unless one token has more to a kv head
constexpr int64_t TILE = TILE_ROWS * ROW_BYTES;
constexpr int64_t BLOCKS = SPAN / BLOCK;
constexpr int64_t STEPS = SPAN / STEP;
// Queries whose values are summed up at once, and those with two words of a value at once; as registers have room.
constexpr int AT_ONCE = amx::HERE ? 4 : 8, AT_ONCE_WIDE = amx::HERE ? 3 : 7;

// Makes the processor treat subnormal numbers as zero, as products of bfloat16 do.
class SubnormalsAreZero {
  public:
    SubnormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~SubnormalsAreZero() { _mm_setcsr(before_); }

  private:
    unsigned before_;
};

// Tiles of a product's first operand: one for each step of k, `step` bytes apart.
struct TileRow {
    const char* at;
    int64_t stride, step;
};

#if defined(__AMX_BF16__)

// out [ROWS][COLUMNS] tiles = a [ROWS] @ b [COLUMNS], over `steps` tiles.
template <int ROWS, int COLUMNS>
inline void multiply(const TileRow (&a)[ROWS], const char* const (&b)[COLUMNS], int64_t steps,
                     float* const (&out)[ROWS][COLUMNS]) {
    const TileRow &upper = a[0], &lower = a[ROWS - 1];
    amx::compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++) {
        _tile_loadd(4, upper.at + step * upper.step, upper.stride);
        _tile_loadd(6, b[0] + step * TILE, ROW_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (COLUMNS == 2) {
            _tile_loadd(7, b[COLUMNS - 1] + step * TILE, ROW_BYTES);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (ROWS == 2) {
            _tile_loadd(5, lower.at + step * lower.step, lower.stride);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (COLUMNS == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out[0][0], ROW_BYTES);
    if constexpr (COLUMNS == 2) _tile_stored(1, out[0][COLUMNS - 1], ROW_BYTES);
    if constexpr (ROWS == 2) _tile_stored(2, out[ROWS - 1][0], ROW_BYTES);
    if constexpr (ROWS == 2 && COLUMNS == 2) _tile_stored(3, out[ROWS - 1][COLUMNS - 1], ROW_BYTES);
}

#else

// The same without tiles, for as many rows at a time as registers have room for.
template <int ROWS, int COLUMNS>
inline void multiply(const TileRow (&a)[ROWS], const char* const (&b)[COLUMNS], int64_t steps,
                     float* const (&out)[ROWS][COLUMNS]) {
    constexpr int TOGETHER = COLUMNS == 2 ? 8 : 16;
    for (int row = 0; row < ROWS; row++)
        for (int first = 0; first < TILE_ROWS; first += TOGETHER) {
            F32 sums[TOGETHER][COLUMNS] = {};
            for (int64_t step = 0; step < steps; step++) {
                const char* x = a[row].at + step * a[row].step + first * a[row].stride;
                for (int pair = 0; pair < STEP / 2; pair++) {
                    __m512i columns[COLUMNS];
                    UNROLLED for (int i = 0; i < COLUMNS; i++)
                        columns[i] = Bfloats::read(b[i] + step * TILE + pair * ROW_BYTES, 0);
                    UNROLLED for (int i = 0; i < TOGETHER; i++) {
                        const auto* inputs = reinterpret_cast<const Bf16*>(x + i * a[row].stride) + 2 * pair;
                        UNROLLED for (int j = 0; j < COLUMNS; j++)
                            sums[i][j] = Bfloats::dot(sums[i][j], inputs, columns[j], 0);
                    }
                }
            }
            for (int i = 0; i < TOGETHER; i++)
                for (int j = 0; j < COLUMNS; j++) store(out[row][j] + (first + i) * PANEL, sums[i][j]);
        }
}

#endif

// A span of the cache as an item sees it.
struct SpanOffsets {
    BlockOffsets blocks[BLOCKS];
    int64_t first = SPAN, last = 0;  // whole steps with keys that are seen

    void add(int64_t block, const BlockOffsets& offsets) {
        blocks[block] = offsets;
        if (offsets.first == offsets.last) return;
        first = std::min(first, (block * BLOCK + offsets.first) / STEP * STEP);
        last = round_up(block * BLOCK + offsets.last, STEP);
    }

    int64_t operator[](int64_t key) const { return blocks[key / BLOCK].offset[key % BLOCK]; }

    int64_t first_block() const { return std::min(first, SPAN - BLOCK) / BLOCK * BLOCK; }

    // Prefetches keys [from, to): their elements [begin, end). Inlined, since GCC 12 drops calls of functions that only
    // prefetch.
    __attribute__((always_inline)) void prefetch(const Bf16* cache, int64_t from, int64_t to, int64_t begin,
                                                 int64_t end) const {
        for (int64_t key = from; key < to; key++)
            if ((*this)[key] != HIDDEN) blocks[key / BLOCK].prefetch(cache, key % BLOCK, begin, end);
    }
};

// The keys or values that are probably read after a block: those of a span, `shift` positions later.
struct Soon {
    const SpanOffsets& span;
    const Bf16* cache;
    int64_t shift;  // of the keys

    __attribute__((always_inline)) void prefetch(int64_t key, int64_t begin, int64_t end) const {
        span.prefetch(cache, key + shift, key + shift + 1, begin, end);
    }
};

// Keys [from, to) of a span as tiles: [key / 16][n / 32][16 keys][32].
inline void lay_out_keys(const Bf16* k, const SpanOffsets& span, int64_t from, int64_t to, int64_t n, int64_t steps,
                         char* out) {
    for (int64_t key = from; key < to; key++) {
        if (span[key] == HIDDEN) continue;
        const Bf16* row = k + span[key];
        char* to = out + key / TILE_ROWS * steps * TILE + key % TILE_ROWS * ROW_BYTES;
        for (int64_t step = 0; step < steps; step++)
            store(reinterpret_cast<float*>(to + step * TILE), load_words(row, step * STEP, n));
    }
}

// 32 elements from d on of the values of 16 pairs of keys, transposed, into two columns of tiles.
template <bool WHOLE>
inline void turn_values(const Bf16* v, const SpanOffsets& span, int64_t key, int64_t d, int64_t n, int64_t width,
                        char* out) {
    F32 even[PANEL], odd[PANEL];
    UNROLLED for (int pair = 0; pair < PANEL; pair++) {
        int64_t offsets[] = {span[key + 2 * pair], span[key + 2 * pair + 1]};
        U32 words[2];
        UNROLLED for (int i = 0; i < 2; i++)
            words[i] = bit_cast<U32>(WHOLE || offsets[i] != HIDDEN ? load_words<WHOLE>(v + offsets[i], d, n) : F32{});
        even[pair] = bit_cast<F32>((words[0] & 0xFFFFu) | words[1] << 16);
        odd[pair] = bit_cast<F32>(words[0] >> 16 | (words[1] & 0xFFFF0000u));
    }
    auto put = [&](F32(&square)[PANEL], int64_t parity) {
        transpose(square);
        UNROLLED for (int i = 0; i < PANEL; i++)
            if (int64_t at = d + 2 * i + parity; WHOLE || at < width)
                std::memcpy(out + at / PANEL * STEPS * TILE + at % PANEL * ROW_BYTES, &square[i], sizeof square[i]);
    };
    put(even, 0);
    put(odd, 1);
}

// The values of a span as tiles of their transpose: [width / 16][keys / 32][16][32 keys].
inline void lay_out_values(const Bf16* v, const SpanOffsets& span, int64_t n, int64_t width, char* out) {
    for (int64_t key = span.first; key < span.last; key += STEP) {
        const BlockOffsets& block = span.blocks[key / BLOCK];
        bool whole = n % STEP == 0 && block.first <= key % BLOCK && block.last >= key % BLOCK + STEP;
        char* to = out + key / STEP * TILE;
        for (int64_t d = 0; d < width; d += STEP)
            (whole ? turn_values<true> : turn_values<false>)(v, span, key, d, n, width, to);
    }
}

// Words of a key's value, from element d on; zero where it is hidden.
template <bool WHOLE>
inline U32 words_of(const Bf16* v, int64_t offset, int64_t d, int64_t n) {
    return bit_cast<U32>(offset == HIDDEN ? F32{} : load_words<WHOLE>(v + offset, d, n));
}

#if defined(__AMX_BF16__)

// Adds a step of keys to sums of the even and the odd elements of words, in the order of a tile product: even and odd
// keys apart. `weights` are [COUNT][256].
template <int COUNT, int WORDS, bool WHOLE>
inline void add_step(const float* weights, const Bf16* v, const SpanOffsets& span, const Soon& soon, int64_t step,
                     int64_t d, int64_t n, F32 (&total)[COUNT][WORDS][2]) {
    F32 pairs[2][COUNT][WORDS][2] = {};  // of the even and of the odd keys
    for (int64_t key = step; key < step + STEP; key += 2)
        UNROLLED for (int i = 0; i < 2; i++) {
            soon.prefetch(key + i, d, std::min(d + WORDS * 2 * LANES, n));
            if (span[key + i] == HIDDEN) continue;
            UNROLLED for (int word = 0; word < WORDS; word++) {
                U32 values = words_of<WHOLE>(v, span[key + i], d + word * 2 * LANES, n);
                F32 even = bit_cast<F32>(values << 16), odd = bit_cast<F32>(values & 0xFFFF0000u);
                UNROLLED for (int query = 0; query < COUNT; query++) {
                    float weight = weights[query * SPAN + key + i];
                    F32(&sum)[2] = pairs[i][query][word];
                    sum[0] = even * weight + sum[0];
                    sum[1] = odd * weight + sum[1];
                }
            }
        }
    for (int query = 0; query < COUNT; query++)
        for (int word = 0; word < WORDS; word++)
            for (int half = 0; half < 2; half++) {
                F32 both = pairs[0][query][word][half] + pairs[1][query][word][half];
                total[query][word][half] = total[query][word][half] + both;
            }
}

#else

// Adds a step of keys to sums of the even and the odd elements of words, pair by pair of keys.
template <int COUNT, int WORDS, bool WHOLE>
inline void add_step(const float* weights, const Bf16* v, const SpanOffsets& span, const Soon& soon, int64_t step,
                     int64_t d, int64_t n, F32 (&total)[COUNT][WORDS][2]) {
    Bf16 rows[COUNT][STEP];
    for (int query = 0; query < COUNT; query++)
        for (int64_t key = 0; key < STEP; key += LANES)
            store(rows[query] + key, load(weights + query * SPAN + step + key));
    for (int64_t key = 0; key < STEP; key += 2) {
        for (int64_t i = step + key; i < step + key + 2; i++) soon.prefetch(i, d, std::min(d + WORDS * 2 * LANES, n));
        UNROLLED for (int word = 0; word < WORDS; word++) {
            U32 one = words_of<WHOLE>(v, span[step + key], d + word * 2 * LANES, n);
            U32 next = words_of<WHOLE>(v, span[step + key + 1], d + word * 2 * LANES, n);
            __m512i even = (__m512i)((one & 0xFFFFu) | next << 16), odd = (__m512i)(one >> 16 | (next & 0xFFFF0000u));
            UNROLLED for (int query = 0; query < COUNT; query++) {
                F32(&sum)[2] = total[query][word];
                sum[0] = Bfloats::dot(sum[0], rows[query] + key, even, 0);
                sum[1] = Bfloats::dot(sum[1], rows[query] + key, odd, 0);
            }
        }
    }
}

#endif

// Adds the values of keys [from, to) of a span to sums [COUNT][width], weighed by weights [COUNT][256], which are
// bfloat16 numbers in float32. Values are read in place; what is read next is prefetched meanwhile.
template <int COUNT, bool WHOLE>
void weigh_values(const float* weights, const Bf16* v, const SpanOffsets& span, int64_t from, int64_t to,
                  const Soon& soon, int64_t n, float* sums, int64_t width) {
    constexpr int WORDS = COUNT > AT_ONCE_WIDE ? 1 : 2;
    for (int64_t d = 0; d < n; d += WORDS * 2 * LANES) {
        F32 total[COUNT][WORDS][2];
        auto for_vectors = [&](auto body) {
            for (int query = 0; query < COUNT; query++)
                for (int word = 0; word < WORDS; word++)
                    for (int64_t half = 0; half < 2; half++)
                        if (int64_t at = d + (word * 2 + half) * LANES; at < width)
                            body(total[query][word][half], sums + query * width + at);
                        else
                            total[query][word][half] = F32{};
        };
        for_vectors([](F32& vector, const float* sum) { vector = load(sum); });
        for (auto& query : total)
            for (auto& word : query) separate(word);
        for (int64_t step = from; step < to; step += STEP)
            add_step<COUNT, WORDS, WHOLE>(weights, v, span, soon, step, d, n, total);
        for (auto& query : total)
            for (auto& word : query) rejoin(word);
        for_vectors([](F32 vector, float* sum) { store(sum, vector); });
    }
}

// Columns [first, first + 4) of 16 keys' scores [16][16] as rows of `stride` floats.
inline void gather_columns(const float* scores, int64_t first, float* out, int64_t stride) {
    __m512 rows[4];  // of keys i, 4 + i, 8 + i and 12 + i
    UNROLLED for (int i = 0; i < 4; i++) {
        const float* key = scores + i * PANEL + first;
        rows[i] = _mm512_castps128_ps512(_mm_loadu_ps(key));
        rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps(key + 4 * PANEL), 1);
        rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps(key + 8 * PANEL), 2);
        rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps(key + 12 * PANEL), 3);
    }
    __m512 a = _mm512_unpacklo_ps(rows[0], rows[1]), b = _mm512_unpacklo_ps(rows[2], rows[3]);
    __m512 c = _mm512_unpackhi_ps(rows[0], rows[1]), d = _mm512_unpackhi_ps(rows[2], rows[3]);
    store(out, (F32)_mm512_shuffle_ps(a, b, 0x44));
    store(out + stride, (F32)_mm512_shuffle_ps(a, b, 0xEE));
    store(out + 2 * stride, (F32)_mm512_shuffle_ps(c, d, 0x44));
    store(out + 3 * stride, (F32)_mm512_shuffle_ps(c, d, 0xEE));
}

class TileAttention : AttentionItems {
  public:
    explicit TileAttention(const AttentionOperands& operands)
        : AttentionItems(operands, QUERIES, sums_size),
          k_(reinterpret_cast<const Bf16*>(cache_.k)),
          v_(reinterpret_cast<const Bf16*>(cache_.v)),
          steps_(round_up(cache_.head_dim, STEP) / STEP),
          keys_in_place_(cache_.page_size % TILE_ROWS == 0 && cache_.head_dim % STEP == 0) {}

    void run() const {
        run_items([&](size_t index, float* kept) { compute(index, kept); },
                  [&](const Item& item, float* kept) { merge_spans(item, kept); });
    }

  private:
    static int64_t panels_of(int64_t queries) { return (queries + PANEL - 1) / PANEL; }

    // Size of the sums of so many queries of each of some kv heads, in floats.
    static int64_t sums_size(int64_t queries, int64_t heads, int64_t width) {
        return heads * panels_of(queries) * Sums::size(width);
    }

    bool is_few(const Item& item) const { return count_of(item) <= FEW; }

    // Scratch memory of a thread for one item.
    struct Workplace {
        char* queries;        // panels
        char *keys, *values;  // tiles
        float* scores;        // [2][256][16]
        char* weights;        // two panels, or [heads][few][256] floats
        float *total, *part;  // sums
    };

    Workplace workplace(const Item& item) const {
        static thread_local Buffer buffer;
        int64_t panels = item.heads * panels_of(count_of(item)), size = 4 * panels * Sums::size(width_);
        int64_t query_bytes = panels * steps_ * TILE, key_bytes = SPAN / TILE_ROWS * steps_ * TILE;
        int64_t value_bytes = width_ / PANEL * STEPS * TILE, score_bytes = 2 * SPAN * ROW_BYTES;
        int64_t weight_bytes = is_few(item) ? round_up(count_of(item), 4) * item.heads * SPAN * 4 : score_bytes / 2;
        char* memory = buffer.bytes(query_bytes + key_bytes + value_bytes + score_bytes + weight_bytes + 2 * size);
        auto take = [&](int64_t bytes) { return (memory += bytes) - bytes; };
        Workplace place;
        place.queries = take(query_bytes);
        place.keys = take(key_bytes);
        place.values = take(value_bytes);
        place.scores = reinterpret_cast<float*>(take(score_bytes));
        place.weights = take(weight_bytes);
        place.total = reinterpret_cast<float*>(take(size));
        place.part = reinterpret_cast<float*>(take(size));
        return place;
    }

    Sums sums_of(float* memory, int64_t index) const { return Sums::at(memory + index * Sums::size(width_), width_); }

    void compute(size_t index, float* kept) const {
        const Item& item = items_[index];
        SubnormalsAreZero as_tiles_do;
        amx::Tiles tiles;
        tiles.configure(2 * TILE_ROWS);
        Workplace place = workplace(item);
        if (item.kept >= 0) place.part = kept + item.kept;
        int64_t panels = panels_of(count_of(item));
        for (int64_t i = 0; i < item.heads * panels; i++) {
            read_queries(item.of(int32_t(i / panels)), i % panels, place.queries + i * steps_ * TILE);
            sums_of(place.total, i).clear(width_);
        }
        for (int64_t span = item.first_span; span < item.last_span; span++)
            is_few(item) ? add_few(index, span * SPAN, place) : add_span(index, span * SPAN, place);
        if (item.kept < 0) write(item, place.total);
    }

    // The span of keys at `begin`, as the first kv head of an item sees it.
    SpanOffsets span_of(const Item& item, int64_t begin) const {
        SpanOffsets span;
        for (int64_t block = 0; block < BLOCKS; block++)
            span.add(block, offsets_of(item, 0, begin + block * BLOCK));
        return span;
    }

    // The span that this thread probably reads after the one at `begin`: the next keys, or the next item's first.
    SpanOffsets span_after(size_t index, int64_t begin) const {
        const Item& item = items_[index];
        if (begin + SPAN < item.last_span * SPAN) return span_of(item, begin + SPAN);
        if (const Item* next = next_of(index)) return span_of(*next, next->first_span * SPAN);
        SpanOffsets none;
        for (BlockOffsets& block : none.blocks) block = BlockOffsets::none();
        return none;
    }

    // Adds the span of keys at `begin` to the sums of an item's only kv head, or leaves it in `place.part`.
    void add_span(size_t index, int64_t begin, const Workplace& place) const {
        const Item& item = items_[index];
        const SpanOffsets span = span_of(item, begin), soon = span_after(index, begin);
        lay_out_keys(k_, span, span.first, span.last, cache_.head_dim, steps_, place.keys);
        lay_out_values(v_, span, cache_.value_dim, width_, place.values);
        int64_t panels = panels_of(count_of(item));
        for (int64_t panel = 0; panel < panels; panel += 2) {
            int64_t from = SPAN * panel / panels, to = SPAN * std::min(panel + 2, panels) / panels;
            soon.prefetch(k_, from, to, 0, cache_.head_dim);
            soon.prefetch(v_, from, to, 0, cache_.value_dim);
            panel + 1 < panels ? add_panels<2>(item, panel, begin, place) : add_panels<1>(item, panel, begin, place);
        }
    }

    // Adds a span to one or two panels of queries.
    template <int COUNT>
    void add_panels(const Item& item, int64_t panel, int64_t begin, const Workplace& place) const {
        I32 positions[COUNT], lasts[COUNT];
        const char *queries[COUNT], *weights[COUNT];
        float* scores[COUNT];
        for (int i = 0; i < COUNT; i++) {
            positions[i] = positions_of(item, panel + i, begin);
            lasts[i] = lasts_of(item, panel + i, begin);
            queries[i] = place.queries + (panel + i) * steps_ * TILE;
            scores[i] = place.scores + i * SPAN * PANEL;
            weights[i] = place.weights + i * SPAN / 2 * ROW_BYTES;
        }
        int64_t from = scoring_.window ? std::max<int64_t>(0, positions[0][0] - scoring_.window + 1) / STEP * STEP : 0;
        int64_t to = std::clamp<int64_t>(round_up(lasts[COUNT - 1][PANEL - 1] + 1, STEP), 0, SPAN);
        from = std::min(from, to);
        for (int64_t key = from; key < to; key += STEP) {
            const char* keys = place.keys + key / TILE_ROWS * steps_ * TILE;
            TileRow rows[2] = {{keys, ROW_BYTES, TILE}, {keys + steps_ * TILE, ROW_BYTES, TILE}};
            float* out[2][COUNT];
            for (int i = 0; i < COUNT; i++) out[0][i] = scores[i] + key * PANEL, out[1][i] = out[0][i] + PANEL * PANEL;
            multiply(rows, queries, steps_, out);
        }
        Sums parts[COUNT];
        for (int i = 0; i < COUNT; i++) {
            parts[i] = sums_of(place.part, panel + i);
            auto mask = [&](int64_t key) { return mask_of(positions[i], lasts[i], key); };
            weigh_columns(scores[i], from, to, mask, parts[i], place.weights + i * SPAN / 2 * ROW_BYTES);
        }
        for (int64_t d = 0; d < width_; d += 2 * PANEL)
            d + PANEL < width_ ? add_values<2>(place, d, from, to, weights, parts)
                               : add_values<1>(place, d, from, to, weights, parts);
        for (int i = 0; item.kept < 0 && i < COUNT; i++)
            merge_columns(sums_of(place.total, panel + i), parts[i], width_);
    }

    template <int ROWS, int COUNT>
    void add_values(const Workplace& place, int64_t d, int64_t from, int64_t to, const char* const (&weights)[COUNT],
                    const Sums (&parts)[COUNT]) const {
        TileRow rows[ROWS];
        const char* panels[COUNT];
        float* out[ROWS][COUNT];
        for (int row = 0; row < ROWS; row++) {
            const char* values = place.values + (d / PANEL + row) * STEPS * TILE;
            rows[row] = {values + from / STEP * TILE, ROW_BYTES, TILE};
            for (int i = 0; i < COUNT; i++) out[row][i] = parts[i].values + (d + row * PANEL) * PANEL;
        }
        for (int i = 0; i < COUNT; i++) panels[i] = weights[i] + from / STEP * TILE;
        multiply(rows, panels, (to - from) / STEP, out);
    }

    // The positions of 16 queries, less `begin`; past the last query that of the last.
    I32 positions_of(const Item& item, int64_t panel, int64_t begin) const {
        I32 positions;
        for (int64_t i = 0; i < PANEL; i++) {
            int64_t query = std::min(panel * PANEL + i, count_of(item) - 1);
            positions[i] = int32_t(position_of(item) - begin + query / group_);
        }
        return positions;
    }

    // The last positions that 16 queries see, less `begin`; see `positions_of`.
    I32 lasts_of(const Item& item, int64_t panel, int64_t begin) const {
        I32 lasts;
        for (int64_t i = 0; i < PANEL; i++) {
            int64_t query = std::min(panel * PANEL + i, count_of(item) - 1);
            lasts[i] = int32_t(seen_by(item.row, item.first_token + query / group_) - 1 - begin);
        }
        return lasts;
    }

    // The mask of 16 keys from `key` on, for queries at these positions that see as far as `lasts`; both ascend.
    Mask mask_of(I32 positions, I32 lasts, int64_t key) const {
        Mask mask = {scoring_.softcap, I32{}, lasts, key + PANEL - 1 > lasts[0]};
        if (!scoring_.window) return mask;
        mask.first = positions - int32_t(scoring_.window) + 1;
        mask.hides = mask.hides || key < mask.first[PANEL - 1];
        return mask;
    }

    // Adds a span to the sums of few queries of all kv heads. These take turns at each block of keys and of values, so
    // that tokens are read from end to end.
    void add_few(size_t index, int64_t begin, const Workplace& place) const {
        const Item& item = items_[index];
        const SpanOffsets span = span_of(item, begin), next = span_after(index, begin);
        const int64_t count = count_of(item), stride = round_up(count, 4) * SPAN;
        auto weights_of = [&](int32_t head) { return reinterpret_cast<float*>(place.weights) + head * stride; };
        // body(from, head, offset, soon) for each block of `cache`, whose following block or `after` comes soon.
        auto for_blocks = [&](const Bf16* cache, const Soon& after, auto body) {
            for (int64_t from = span.first_block(); from < span.last; from += BLOCK)
                for (int32_t head = 0; head < item.heads; head++) {
                    int64_t offset = head * cache_.head_dim;
                    if (head + 1 < item.heads)
                        body(from, head, offset, Soon{span, cache + offset + cache_.head_dim, 0});
                    else if (from + BLOCK < span.last)
                        body(from, head, offset, Soon{span, cache, BLOCK});
                    else
                        body(from, head, offset, Soon{after.span, after.cache, after.span.first_block() - from});
                }
        };
        for_blocks(k_, {span, v_, 0}, [&](int64_t from, int32_t head, int64_t, const Soon& soon) {
            score_few(count, head, span, from, soon, place, weights_of(head));
        });
        for (int32_t head = 0; head < item.heads; head++)
            weigh_few(item, begin, span, weights_of(head), sums_of(place.part, head));
        for_blocks(v_, {next, k_, 0}, [&](int64_t from, int32_t head, int64_t offset, const Soon& soon) {
            int64_t first = std::max(from, span.first), last = std::min(from + BLOCK, span.last);
            float* sums = sums_of(place.part, head).values;
            in_groups<AT_ONCE>(cache_.value_dim % (4 * LANES) == 0, count, [&](auto size, auto whole, int64_t i) {
                weigh_values<size, whole>(weights_of(head) + i * SPAN, v_ + offset, span, first, last, soon,
                                          cache_.value_dim, sums + i * width_, width_);
            });
        });
        for (int32_t head = 0; item.kept < 0 && head < item.heads; head++)
            merge_rows(sums_of(place.total, head), sums_of(place.part, head), count, width_);
    }

    // Turns the scores [count][256] of a span into weights, and clears the sums of its values.
    void weigh_few(const Item& item, int64_t begin, const SpanOffsets& span, float* scores, const Sums& part) const {
        const int64_t count = count_of(item);
        store(part.weights, F32{});
        store(part.most, broadcast(NONE));
        std::fill(part.values, part.values + count * width_, 0.0f);
        for (int64_t i = 0; i < count; i++) {
            int64_t token = i / group_, seen = seen_by(item.row, item.first_token + token);
            I32 position = I32{} + int32_t(position_of(item) - begin + token), last = I32{} + int32_t(seen - 1 - begin);
            auto mask = [&](int64_t key) { return mask_of(position, last, key); };
            weigh_row(scores + i * SPAN, span.first, span.last, mask, part, i);
        }
    }

#if defined(__AMX_BF16__)

    // Scores of few queries and the keys of a block, which are read in place where that is possible, into [count][256] of
    // the span. Keys of `soon` are prefetched.
    void score_few(int64_t count, int32_t head, const SpanOffsets& span, int64_t from, const Soon& soon,
                   const Workplace& place, float* out) const {
        const Bf16* k = k_ + head * cache_.head_dim;
        const int64_t first = std::max(from, span.first), last = std::min(from + BLOCK, span.last);
        if (!keys_in_place_) lay_out_keys(k, span, first, last, cache_.head_dim, steps_, place.keys);
        const char* queries[1] = {place.queries + head * steps_ * TILE};
        for (int64_t key = first; key < last; key += STEP) {
            for (int64_t i = key; i < key + STEP; i++) soon.prefetch(i, 0, cache_.head_dim);
            TileRow upper = keys_at(k, span, key, place), lower = keys_at(k, span, key + TILE_ROWS, place);
            TileRow rows[2] = {upper.at ? upper : lower, lower.at ? lower : upper};
            float* scores[2][1] = {{place.scores + key * PANEL}, {place.scores + (key + TILE_ROWS) * PANEL}};
            multiply(rows, queries, steps_, scores);
        }
        for (int64_t query = 0; query < count; query += 4)
            for (int64_t key = first; key < last; key += PANEL)
                gather_columns(place.scores + key * PANEL, query, out + query * SPAN + key, SPAN);
    }

    // 16 keys as tiles: in place where all are equally far apart, or as they were laid out. Null where none is seen.
    TileRow keys_at(const Bf16* k, const SpanOffsets& span, int64_t key, const Workplace& place) const {
        if (!keys_in_place_) return {place.keys + key / TILE_ROWS * steps_ * TILE, ROW_BYTES, TILE};
        int64_t token = cache_.kv_heads * cache_.head_dim;
        for (int64_t i = 0; i < TILE_ROWS; i++)
            if (span[key + i] != HIDDEN)
                return {reinterpret_cast<const char*>(k + span[key + i] - i * token), 2 * token, ROW_BYTES};
        return {nullptr, 0, 0};
    }

#else

    // Scores of few queries and the keys of a block as panels, into [count][256] of the span. Keys of `soon` are
    // prefetched.
    void score_few(int64_t count, int32_t head, const SpanOffsets& span, int64_t from, const Soon& soon,
                   const Workplace& place, float* out) const {
        const BlockOffsets& offsets = span.blocks[from / BLOCK];
        const int64_t bytes = steps_ * TILE;
        amx::Tiles none;
        auto prefetch = [&](int64_t column) __attribute__((always_inline)) {
            for (int64_t key = column; key < column + LANES; key++) soon.prefetch(from + key, 0, cache_.head_dim);
        };
        repack_keys<Bfloats>(k_ + head * cache_.head_dim, offsets, cache_.head_dim, place.keys, prefetch);
        product::multiply<Bfloats>(none, false, place.queries + head * bytes, steps_ * ROW_BYTES, int(count), place.keys,
                                   bytes, int(round_up(offsets.last, PANEL) / PANEL),
                                   reinterpret_cast<F32*>(out + from), SPAN / LANES);
    }

#endif

    // 16 queries of one kv head, scaled, as a panel; few without tiles as rows.
    void read_queries(const Item& item, int64_t panel, char* out) const {
        static thread_local Buffer buffer;
        const bool as_rows = !amx::HERE && is_few(item);
        const int64_t stride = as_rows ? steps_ * STEP : cache_.head_dim;
        Bf16* rows = reinterpret_cast<Bf16*>(as_rows ? out : buffer.bytes(2 * PANEL * stride));
        const Bf16* queries[PANEL] = {};
        for (int64_t i = 0; i < PANEL && panel * PANEL + i < count_of(item); i++) {
            const float* from = query_of(item, panel * PANEL + i);
            Bf16* row = rows + i * stride;
            over(cache_.head_dim, [&](int64_t d, auto get, auto put) { put(row + d, get(from + d) * scoring_.scale); });
            std::memset(static_cast<void*>(row + cache_.head_dim), 0, size_t(stride - cache_.head_dim) * sizeof(Bf16));
            queries[i] = row;
        }
        if (!as_rows) turn<Bfloats, false>(queries, cache_.head_dim, out);
    }

    void merge_spans(const Item& item, float* kept) const {
        static thread_local Buffer buffer;
        SubnormalsAreZero as_tiles_do;
        int64_t count = item.heads * panels_of(count_of(item)), size = count * Sums::size(width_);
        float* total = buffer.floats(size);
        for (int64_t i = 0; i < count; i++) {
            sums_of(total, i).clear(width_);
            for (int64_t span = 0; span < item.last_span - item.first_span; span++) {
                Sums part = sums_of(kept + item.kept + span * size, i);
                is_few(item) ? merge_rows(sums_of(total, i), part, count_of(item), width_)
                             : merge_columns(sums_of(total, i), part, width_);
            }
        }
        write(item, total);
    }

    void write(const Item& item, float* total) const {
        int64_t panels = panels_of(count_of(item));
        for (int64_t i = 0; i < item.heads * panels; i++) {
            Item one = item.of(int32_t(i / panels));
            is_few(item) ? write_rows(one, sums_of(total, i)) : write_columns(one, i % panels, sums_of(total, i));
        }
    }

    // Factors of 16 queries' sums of values, and the sums of weights that divide them.
    struct Scale {
        F32 factor, weight;
    };

    Scale scale_of(const Item& item, int64_t panel, const Sums& sums) const {
        Scale scale = {broadcast(1.0f), load(sums.weights)};
        if (!scoring_.sinks) return scale;
        F32 sinks, most = load(sums.most);
        for (int64_t i = 0; i < PANEL; i++)
            sinks[i] = scoring_.sinks[head_of(item, panel * PANEL + i)];
        F32 larger = max(most, sinks);
        scale.factor = rescaling(most, larger);
        scale.weight = scaled_sum(scale.weight, scale.factor, rescaling(sinks, larger), broadcast(1.0f));
        return scale;
    }

    void write_rows(const Item& item, const Sums& sums) const {
        Scale scale = scale_of(item, 0, sums);
        for (int64_t i = 0; i < count_of(item); i++) {
            float *out = out_of(item, i), *value = sums.values + i * width_;
            float factor = scale.factor[i], weight = scale.weight[i];
            over(cache_.value_dim, [&](int64_t d, auto, auto put) { put(out + d, load(value + d) * factor / weight); });
        }
    }

    void write_columns(const Item& item, int64_t panel, const Sums& sums) const {
        Scale scale = scale_of(item, panel, sums);
        int64_t queries = std::min<int64_t>(PANEL, count_of(item) - panel * PANEL);
        for (int64_t d = 0; d < cache_.value_dim; d += PANEL) {
            F32 square[PANEL];
            for (int64_t i = 0; i < PANEL; i++)
                square[i] = load(sums.values + (d + i) * PANEL) * scale.factor / scale.weight;
            transpose(square);
            for (int64_t i = 0; i < queries; i++)
                store_first(out_of(item, panel * PANEL + i) + d, square[i],
                            std::min<int64_t>(PANEL, cache_.value_dim - d));
        }
    }

    const Bf16 *k_, *v_;
    int64_t steps_;       // tiles of a key
    bool keys_in_place_;  // keys of a tile are equally far apart
};

}  // namespace tile_attention

#endif

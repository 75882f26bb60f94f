// The attention of a step, cut into items that threads compute independently.
#pragma once

#include <algorithm>
#include <vector>

#include "buffer.h"
#include "format.h"
#include "paged_block.h"
#include "pool.h"

constexpr int64_t SPAN = 256;  // keys that are summed before merging
constexpr int64_t FEW = 8;     // maximum queries for which values are read in place; measured

// A few consecutive new tokens of a row against one kv head or more, as far as the spans [first_span, last_span).
struct Item {
    int32_t row, first_token, tokens, head, heads, first_span, last_span;
    int64_t kept;  // where its sums are among those to be merged later, or -1

    Item of(int32_t index) const {
        Item one = *this;
        one.head += index;
        one.heads = 1;
        return one;
    }
};

class AttentionItems {
  public:
    // `queries` is the maximum of an item, unless one token has more query heads to a kv head. The sums of
    // queries, `queries` for each of `heads` kv heads, take sums_size(queries, heads, width) floats.
    AttentionItems(const AttentionOperands& operands, int64_t queries,
                   int64_t (*sums_size)(int64_t queries, int64_t heads, int64_t width))
        : operands_(operands),
          cache_(operands.cache),
          rows_(operands.rows),
          scoring_(operands.scoring),
          group_(operands.heads / cache_.kv_heads),
          width_(round_up(cache_.value_dim, PANEL)),
          block_tokens_(std::max<int64_t>(1, queries / group_)),
          sums_size_(sums_size) {
        plan();
    }

  protected:
    // Calls compute(index, kept) for each item, then merge(item, kept) for those that were split into spans. `kept` is
    // memory for the sums of spans.
    template <class Compute, class Merge>
    void run_items(const Compute& compute, const Merge& merge) const {
        static thread_local Buffer buffer;  // the caller's
        float* kept = buffer.floats(kept_);
        pool::run(int64_t(items_.size()), [&](int64_t i) { compute(size_t(i), kept); });
        pool::run_pieces(int64_t(merges_.size()), 4, [&](int64_t from, int64_t to) {
            for (int64_t i = from; i < to; i++) merge(merges_[size_t(i)], kept);
        });
    }

    int32_t tokens_of(int64_t row) const { return rows_.query_start[row + 1] - rows_.query_start[row]; }

    int64_t count_of(const Item& item) const { return item.tokens * group_; }  // queries of one kv head

    int64_t queries_of(const Item& item) const { return count_of(item) * item.heads; }

    // The head of query i of an item's first kv head.
    int64_t head_of(const Item& item, int64_t i) const { return item.head * group_ + i % group_; }

    const float* query_of(const Item& item, int64_t i) const {
        return operands_.q + (item.first_token + i / group_) * operands_.q_stride + head_of(item, i) * cache_.head_dim;
    }

    float* out_of(const Item& item, int64_t i) const {
        return operands_.out + (item.first_token + i / group_) * operands_.out_stride +
               head_of(item, i) * cache_.value_dim;
    }

    // The position of an item's first token in its row.
    int64_t position_of(const Item& item) const {
        return rows_.kv_lens[item.row] - (rows_.query_start[item.row + 1] - item.first_token);
    }

    // How many tokens of its row a new token sees: itself, all before it, and perhaps some after it.
    int64_t seen_by(int64_t row, int64_t token) const {
        return rows_.seen ? rows_.seen[token] : rows_.kv_lens[row] - (rows_.query_start[row + 1] - token) + 1;
    }

    // How many tokens an item's last token sees; the others see no more.
    int64_t end_of(const Item& item) const { return seen_by(item.row, item.first_token + item.tokens - 1); }

    // The keys that an item sees in the block at `begin`, of one of its kv heads.
    BlockOffsets offsets_of(const Item& item, int32_t head, int64_t begin) const {
        int64_t first = scoring_.window ? position_of(item) - scoring_.window + 1 : 0;
        first = std::clamp(first, begin, begin + BLOCK);
        int64_t last = std::clamp(end_of(item), first, begin + BLOCK);
        BlockOffsets offsets;
        offsets.find(cache_, rows_.page_table + item.row * rows_.page_stride, item.head + head, begin, first, last);
        return offsets;
    }

    // The item that this thread computes after item `index` if all threads advance equally, or null if its first keys
    // are the same, which are still cached.
    const Item* next_of(size_t index) const {
        const Item &item = items_[index], &next = items_[std::min(index + size_t(pool::threads()), items_.size() - 1)];
        return next.row == item.row && next.first_span == item.first_span ? nullptr : &next;
    }

    const AttentionOperands& operands_;
    const Cache& cache_;
    const Rows& rows_;
    const Scoring& scoring_;
    int64_t group_, width_, block_tokens_;
    int64_t kept_ = 0;  // floats
    std::vector<Item> items_, merges_;

  private:
    // Long items come first, so that the last to finish is a short one.
    void plan() {
        int64_t all = 0;  // spans that are to be summed up, for each token
        for (int64_t row = 0; row < rows_.rows; row++) {
            auto [from, to] = spans(row, 0, tokens_of(row));
            all += int64_t(to - from) * tokens_of(row);
        }
        for (int64_t row = 0; row < rows_.rows; row++)
            for (int32_t token = 0; token < tokens_of(row); token += int32_t(block_tokens_)) add_items(row, token, all);
        auto longer = [](const Item& a, const Item& b) {
            return a.last_span - a.first_span > b.last_span - b.first_span;
        };
        std::stable_sort(items_.begin(), items_.end(), longer);
    }

    // The items of tokens from `token` on, as many as one item has.
    void add_items(int64_t row, int32_t token, int64_t all) {
        int32_t start = rows_.query_start[row], count = tokens_of(row);
        int32_t tokens = std::min(count - token, int32_t(block_tokens_));
        auto [from, to] = spans(row, token, tokens);
        // An item that would outlast the other threads.
        bool long_one = int64_t(to - from) * tokens * 4 * pool::threads() > all;
        bool split = count <= block_tokens_ && to - from > 1 && long_one;
        int64_t pieces = rows_.rows * (split ? to - from : 1);
        bool whole = count * group_ <= FEW && pieces >= 2 * pool::threads();
        int32_t heads = whole ? int32_t(cache_.kv_heads) : 1;  // tokens are read from end to end
        for (int32_t head = 0; head < cache_.kv_heads; head += heads) {
            Item item = {int32_t(row), start + token, tokens, head, heads, from, to, -1};
            if (!split) {
                items_.push_back(item);
                continue;
            }
            item.kept = kept_;
            merges_.push_back(item);
            for (int32_t span = from; span < to; span++, kept_ += sums_size_(tokens * group_, heads, width_))
                items_.push_back({item.row, item.first_token, tokens, head, heads, span, span + 1, kept_});
        }
    }

    struct Spans {
        int32_t from, to;
    };

    // Spans that new tokens [token, token + tokens) of a row see.
    Spans spans(int64_t row, int32_t token, int32_t tokens) const {
        int64_t position = rows_.kv_lens[row] - tokens_of(row) + token;
        int64_t last = seen_by(row, rows_.query_start[row] + token + tokens - 1);
        int64_t first = std::max<int64_t>(0, scoring_.window ? position - scoring_.window + 1 : 0);
        return {int32_t(first / SPAN), int32_t((last + SPAN - 1) / SPAN)};
    }

    int64_t (*sums_size_)(int64_t queries, int64_t heads, int64_t width);
};

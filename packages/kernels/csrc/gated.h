// Activations between the two halves of an MLP: outputs of gate_up, inputs of down.
#pragma once

#include <algorithm>
#include <vector>

#include "buffer.h"
#include "format.h"
#include "linear.h"
#include "pool.h"

// Gated rows go straight into the format that `down` reads; only quantized formats need all of a row before they know its
// scale, and adapters of `down` read floats.
class GatedRows {
  public:
    // Room for rows of up to `most` elements, kept as floats, too, if that is asked for.
    void begin(int64_t format, int64_t most, int64_t rows, bool as_floats = false) {
        format_ = format, sizes_.resize(size_t(rows));
        through_floats_ = as_floats || is_quantized(format);
        if (through_floats_) floats_ = {float_memory_.floats(rows * most), most};
        int64_t stride = operand_stride(format, most);
        operand_ = {memory_.bytes(stride * rows), stride, scales_.floats(rows)};
    }

    // Where the products go that become rows [first, first + count), of `size` elements.
    Output output(int64_t first, int64_t count, int64_t size, int64_t gate) {
        std::fill_n(sizes_.begin() + first, count, size);
        if (through_floats_) return {Output::GATE, floats_.rows + first * floats_.stride, floats_.stride, gate};
        Operand part = operand_.from(first);
        int64_t bytes = size * (format_ == FLOAT32 ? 4 : int64_t(sizeof(Bfloats::Input)));
        for (int64_t row = 0; bytes < part.stride && row < count; row++)
            std::memset(part.rows + row * part.stride + bytes, 0, size_t(part.stride - bytes));
        if (format_ == FLOAT32)
            return {Output::GATE, reinterpret_cast<float*>(part.rows), part.stride / 4, gate};
        return {Output::GATE, nullptr, part.stride, gate, part.rows};
    }

    // All rows, when their products are there.
    Operand finish() {
        if (through_floats_)
            pool::for_rows(int64_t(sizes_.size()), floats_.stride, [&](int64_t row) {
                fill_operand(format_, floats_.rows + row * floats_.stride, sizes_[size_t(row)], operand_, row);
            });
        return operand_;
    }

    // Rows as they were asked for of `begin`, `most` elements from one to the next, once they are finished.
    const float* floats() const { return floats_.rows; }

  private:
    int64_t format_ = FLOAT32;
    bool through_floats_ = false;
    std::vector<int64_t> sizes_;
    struct {
        float* rows;
        int64_t stride;
    } floats_ = {};
    Operand operand_ = {};
    Buffer float_memory_, memory_, scales_;
};

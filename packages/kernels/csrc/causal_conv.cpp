#include "causal_conv.h"

#include <algorithm>
#include <vector>

#include "linear.h"
#include "vec.h"

namespace {

constexpr int64_t CHANNELS = 256;  // of a task

inline F32 rounded(F32 x, float) { return x; }
inline F32 rounded(F32 x, Bf16) { return bit_cast<F32>(bf16_bits(x) << 16); }

// The last inputs of some channels, one row for each token; the rows form a ring.
class Window {
  public:
    Window(int64_t rows, int64_t channels) : rows_(rows), channels_(channels), memory_(size_t(rows * channels)) {}

    template <class S>
    void read(const S* state) {
        for (int64_t row = 0; row < rows_; row++)
            for (int64_t i = 0; i < channels_; i++) at(row)[i] = to_float(state[i * rows_ + row]);
    }

    template <class S>
    void write(S* state) const {
        for (int64_t row = 0; row < rows_; row++)
            for (int64_t i = 0; i < channels_; i++) set(state[i * rows_ + row], at(row)[i]);
    }

    // Row 0 is the oldest.
    float* at(int64_t row) { return memory_.data() + place(row) * channels_; }
    const float* at(int64_t row) const { return memory_.data() + place(row) * channels_; }

    // Makes the row that was the oldest the newest.
    void turn() { oldest_ = place(1); }

  private:
    int64_t place(int64_t row) const { return oldest_ + row < rows_ ? oldest_ + row : oldest_ + row - rows_; }

    int64_t rows_, channels_, oldest_ = 0;
    std::vector<float> memory_;
};

// Convolves `count` channels of a sequence. Inputs are rounded as the states keep them, so that the bits do not depend on
// how tokens are divided among steps.
template <class T, class S>
void convolve(const Convolution& conv, const Segment* first, const Segment* last, int64_t channel, int64_t count) {
    int64_t kept = conv.taps - 1;
    auto state = [&](int64_t number) {
        return static_cast<S*>(conv.states) + (number * conv.channels + channel) * kept;
    };
    Window window(kept, count);
    window.read(state(first->state));
    const float *weight = conv.weight + channel, *bias = conv.bias ? conv.bias + channel : nullptr;
    for (const Segment* segment = first; segment < last; segment++) {
        for (int64_t token = segment->begin; token < segment->end; token++) {
            const T* x = static_cast<const T*>(conv.x) + token * conv.stride + channel;
            T* out = static_cast<T*>(conv.out) + token * conv.channels + channel;
            float* oldest = window.at(0);
            over(count, [&](int64_t i, auto get, auto put) {
                F32 newest = rounded(get(x + i), S());
                F32 total = bias ? get(bias + i) : F32{};
                for (int64_t row = 0; row < kept; row++)
                    total = get(window.at(row) + i) * get(weight + row * conv.channels + i) + total;
                total = newest * get(weight + kept * conv.channels + i) + total;
                put(oldest + i, newest);
                put(out + i, conv.silu ? silu(total) : total);
            });
            window.turn();
        }
        if (segment->snapshot >= 0) window.write(state(segment->snapshot));
    }
    window.write(state(first->state));
}

template <class T>
void convolve_all(const Convolution& conv, const Segment* segments, int64_t count) {
    int64_t blocks = (conv.channels + CHANNELS - 1) / CHANNELS;
    auto some = [&](const Segment* first, const Segment* last, int64_t block) {
        int64_t channel = block * CHANNELS, width = std::min(CHANNELS, conv.channels - channel);
        if (conv.state_format == FLOAT32)
            convolve<T, float>(conv, first, last, channel, width);
        else
            convolve<T, Bf16>(conv, first, last, channel, width);
    };
    for_sequences(segments, count, blocks, std::min(CHANNELS, conv.channels) * conv.taps, some);
}

}  // namespace

void causal_conv(const Convolution& conv, const Segment* segments, int64_t count) {
    if (conv.format == FLOAT32)
        convolve_all<float>(conv, segments, count);
    else
        convolve_all<Bf16>(conv, segments, count);
}

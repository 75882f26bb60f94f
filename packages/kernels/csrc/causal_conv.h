// The causal convolution of recurrent layers: see ops/recurrent.py, which defines it. Mirrored in native/abi.py.
#pragma once

#include <cstdint>

#include "segments.h"

struct Convolution {
    int64_t channels, taps;
    int64_t format, stride;  // of x [tokens, channels]: its tokens are so many elements apart
    int64_t state_format;    // of states [states, channels, taps - 1]: the last inputs
    int64_t silu;            // whether silu follows
    const float *weight, *bias;  // [taps, channels]; [channels] or null
    const void* x;
    void *states, *out;  // out [tokens, channels], of the format of x
};

void causal_conv(const Convolution& conv, const Segment* segments, int64_t count);

// Spin-wait hint to the processor.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

inline void cpu_pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#include "cpu.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

struct Registers {
    uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
    return r;
}

bool bit(uint32_t word, int index) { return word >> index & 1; }

// Which register states the operating system saves: bits 1-2 AVX, 5-7 AVX-512, 17-18 tiles.
uint64_t saved_states() {
    if (!bit(cpuid(1, 0).c, 27)) return 0;
    uint32_t low, high;
    asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

bool tiles_allowed() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

}  // namespace

int64_t levels() {
    Registers basic = cpuid(1, 0), seven = cpuid(7, 0), one = cpuid(7, 1);
    uint64_t saved = saved_states();
    bool avx2 = bit(basic.c, 12) && bit(basic.c, 29) && bit(seven.b, 5) && (saved & 0x6) == 0x6;  // FMA, F16C, AVX2
    int64_t found = 1 << PORTABLE;
    auto add = [&](Level level, bool runs) {
        if (runs) found |= 1 << level;
        return runs;
    };
    if (!add(AVX2, avx2)) return found;
    add(AVX_VNNI, bit(one.a, 4));
    bool avx512 = bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31)  // F, DQ, BW, VL
                  && bit(seven.c, 11) && (saved & 0xE6) == 0xE6;                                // VNNI
    if (!add(AVX512, avx512) || !add(AVX512_BF16, bit(one.a, 5))) return found;
    bool amx = bit(seven.d, 22) && bit(seven.d, 24) && bit(seven.d, 25) && (saved & 0x60000) == 0x60000;
    add(AMX, amx && tiles_allowed());
    return found;
}

#else

int64_t levels() { return 1 << PORTABLE; }

#endif

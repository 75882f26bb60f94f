// Selection of the build of this library for this processor.
#pragma once

#include <cstdint>

enum Level { PORTABLE = 0, AVX2 = 1, AVX_VNNI = 2, AVX512 = 3, AVX512_BF16 = 4, AMX = 5 };

// Returns the levels that the processor and the operating system support: bit i is that of level i. Better ones are
// later. A processor with AVX-512 may lack AVX-VNNI.
int64_t levels();

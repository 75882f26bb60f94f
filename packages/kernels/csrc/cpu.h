// Selection of the build of this library for this processor.
#pragma once

enum Level { PORTABLE = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3, AMX = 4 };

// Returns the best level that the processor and the operating system support.
Level best_level();

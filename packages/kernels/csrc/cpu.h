// Which of the builds of this library runs on this processor.
#pragma once

enum Level { PORTABLE = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3, AMX = 4 };

// The best that the processor and the operating system allow.
Level best_level();

// Division of rows into groups whose size is known to the compiler.
#pragma once

#include <type_traits>

// Calls take(height, first) for groups of `rows` rows from `first` on, where height is a constant: TALL, or one less for
// the last groups. Groups of few rows have few sums, which would wait for one another.
template <int TALL, class Take>
inline void for_row_groups(int rows, const Take& take) {
    int count = (rows + TALL - 1) / TALL, tall = rows - count * (TALL - 1), first = 0;
    if constexpr (TALL > 1)
        if (tall <= 0) return for_row_groups<TALL - 1>(rows, take);
    for (; first < tall * TALL; first += TALL) take(std::integral_constant<int, TALL>{}, first);
    if constexpr (TALL > 1)
        for (; first < rows; first += TALL - 1) take(std::integral_constant<int, TALL - 1>{}, first);
}

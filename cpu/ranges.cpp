// cpu/ranges.cpp: the tables of ranges.h on the CPU, and the ranges of a mask.
#include "ranges.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <ATen/Parallel.h>

namespace minimal_attn {
namespace {

// The first number from `at` on that isn't x, else n. It compares 64 bytes at a time, in vectors.
template <class T>
int first_other(const T *row, int at, int n, T x) {
    constexpr int numbers = 64 / sizeof(T);
    for (; at + numbers <= n; at += numbers) {
        T other = 0;
        for (int i = 0; i < numbers; ++i) other |= row[at + i] ^ x;
        if (other) break;
    }
    while (at < n && row[at] == x) ++at;
    return at;
}

}  // namespace

template <class T>
bool find_ranges_cpu(const T *mask, T hidden, T visible, int64_t batch_stride, int64_t row_stride, int64_t B, int64_t N,
                     int n, int *ranges) {
    constexpr int64_t numbers_of_thread = 1 << 20;  // at least
    std::atomic<bool> are_ranges{true};
    at::parallel_for(0, B * N, std::max<int64_t>(1, numbers_of_thread / n), [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end && are_ranges.load(std::memory_order_relaxed); ++i) {
            const T *const row = mask + i / N * batch_stride + i % N * row_stride;
            ranges[2 * i] = first_other(row, 0, n, hidden);
            ranges[2 * i + 1] = first_other(row, ranges[2 * i], n, visible);
            if (first_other(row, ranges[2 * i + 1], n, hidden) < n) are_ranges = false;
        }
    });
    return are_ranges;
}
template bool find_ranges_cpu(const uint8_t *, uint8_t, uint8_t, int64_t, int64_t, int64_t, int64_t, int, int *);
template bool find_ranges_cpu(const uint16_t *, uint16_t, uint16_t, int64_t, int64_t, int64_t, int64_t, int, int *);
template bool find_ranges_cpu(const uint32_t *, uint32_t, uint32_t, int64_t, int64_t, int64_t, int64_t, int, int *);

void make_ranges_cpu(const Attention &a) {
    at::parallel_for(0, a.B * range_tiles(a), 64, [&](int64_t first, int64_t end) {
        for (int64_t n = first; n < end; ++n) {
            const int64_t b = n / range_tiles(a), i0 = n % range_tiles(a) * kRangeTile;
            const Band band = band_of(a, b);
            TileKeys tile = {{0, 0}, kAllKeys, true};
            for (int i = (int)i0; i < i0 + kRangeTile; ++i) {
                const Keys row = range_of_row(a, band, b, i);
                a.ranges.rows[b * range_rows(a) + i] = row;
                if (a.terms.positions) a.terms.positions[b * range_rows(a) + i] = position_of_query(a, b, i);
                if (i < a.Nq) add_row(tile, row);
            }
            a.ranges.tiles[n] = tile;
        }
    });
}

}  // namespace minimal_attn

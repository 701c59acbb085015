// cpu/ranges.cpp: the tables of ranges.h on the CPU, and the ranges of a mask.
#include "ranges.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include <ATen/Parallel.h>

namespace minimal_attn {
namespace {

// The first byte from `at` on that isn't 0, else n.
int first_seen(const char *row, int at, int n) {
    for (uint64_t eight; at + 8 <= n; at += 8) {
        std::memcpy(&eight, row + at, 8);
        if (eight) break;
    }
    while (at < n && !row[at]) ++at;
    return at;
}

}  // namespace

bool find_ranges_cpu(const bool *seen, int64_t batch_stride, int64_t row_stride, int64_t B, int64_t N, int n,
                     int *ranges) {
    constexpr int64_t bytes_of_thread = 1 << 16;  // at least
    std::atomic<bool> are_ranges{true};
    at::parallel_for(0, B * N, std::max<int64_t>(1, bytes_of_thread / n), [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end && are_ranges.load(std::memory_order_relaxed); ++i) {
            const char *const row = (const char *)seen + i / N * batch_stride + i % N * row_stride;
            const int begin = first_seen(row, 0, n);
            const void *const hidden = std::memchr(row + begin, 0, n - begin);
            const int behind = hidden ? (int)((const char *)hidden - row) : n;
            if (first_seen(row, behind, n) < n) are_ranges = false;
            ranges[2 * i] = begin, ranges[2 * i + 1] = behind;
        }
    });
    return are_ranges;
}

void make_ranges_cpu(const Attention &a) {
    at::parallel_for(0, a.B * range_tiles(a), 64, [&](int64_t first, int64_t end) {
        for (int64_t n = first; n < end; ++n) {
            const int64_t b = n / range_tiles(a), i0 = n % range_tiles(a) * kRangeTile;
            const Band band = band_of(a, b);
            TileKeys tile = {{0, 0}, kAllKeys, true};
            for (int i = (int)i0; i < i0 + kRangeTile; ++i) {
                const Keys row = range_of_row(a, band, b, i);
                a.ranges.rows[b * range_rows(a) + i] = row;
                if (i < a.Nq) add_row(tile, row);
            }
            a.ranges.tiles[n] = tile;
        }
    });
}

}  // namespace minimal_attn

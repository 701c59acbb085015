// cpu/ranges.cpp: the tables of ranges.h on the CPU.
#include "ranges.h"

#include <algorithm>

#include <ATen/Parallel.h>

namespace minimal_attn {

void make_ranges_cpu(const Attention &a, bool with_queries) {
    at::parallel_for(0, a.B * range_tiles(a), 64, [&](int64_t first, int64_t end) {
        for (int64_t n = first; n < end; ++n) {
            const int64_t b = n / range_tiles(a), tile = n % range_tiles(a);
            const Band band = band_of(a, b);
            TileKeys keys = {{0, 0}, kAllKeys};
            for (int i = (int)tile * kRangeTile; i < (int)(tile + 1) * kRangeTile; ++i) {
                const Keys row = a.ranges.rows[b * range_rows(a) + i] = range_of_row(a, band, b, i);
                keys.any = hull(keys.any, row);
                if (i < a.Nq) keys.all = common(keys.all, row);
            }
            a.ranges.tiles[n] = keys;
        }
    });
    if (!with_queries) return;
    std::fill(a.ranges.queries, a.ranges.queries + a.B * range_key_tiles(a), Interval{0, 0});
    at::parallel_for(0, a.B, 1, [&](int64_t first, int64_t end) {
        for (int64_t b = first; b < end; ++b)
            for (int i = 0; i < a.Nq; i += kMeetTile) {
                const Keys keys = keys_that_meet(ranges_of(a, b), i);
                for (int tile = keys.begin / kRangeTile; tile * kRangeTile < keys.end; ++tile) {
                    Interval &queries = a.ranges.queries[b * range_key_tiles(a) + tile];
                    queries = hull(queries, {i, i + kMeetTile});
                }
            }
    });
}

}  // namespace minimal_attn

// cpu/ranges.cpp: the tables of ranges.h on the CPU.
#include "ranges.h"

#include <ATen/Parallel.h>

namespace minimal_attn {

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

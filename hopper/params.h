// params.h: what the host hands to a Hopper kernel.
#pragma once
#include "flash.h"
#include "hopper/tma.h"

namespace minimal_attn::hopper {

// Division of 0 <= x < 2^31 by a number that the host knows, as a multiplication (CUTLASS: FastDivmod). Up to six
// divisions, of 20 to 30 instructions each, would delay the first load of a work tile, with nothing to hide them.
struct Divisor {
    int divisor, shift;
    uint32_t inverse;  // 2^shift / divisor, rounded down, + 1: so little too large that quotients are exact

    Divisor() = default;
    Divisor(int x) : divisor(x), shift(31) {
        while (int64_t(1) << (shift - 31) < x) ++shift;
        inverse = uint32_t((uint64_t(1) << shift) / x + 1);
    }
    __host__ __device__ operator int() const { return divisor; }
};
__device__ inline int operator/(int x, const Divisor &y) { return int((uint64_t)(uint32_t)x * y.inverse >> y.shift); }
__device__ inline int operator%(int x, const Divisor &y) { return x - x / y * y.divisor; }

struct Parameters {
    Attention a;
    TensorMap Q, K, V, O;
    Divisor Hq, Hkv, group;  // a's heads; group: query heads of a key head
    Divisor Tr;              // work tiles of a head
    Divisor grid;            // blocks
    int work_tiles;          // of all heads
    // The scheduler takes the tiles of the first heads head after head, and those of the rest interleaved.
    int sequential_heads;
    Divisor interleaved_heads;
    bool same_band;  // all batches have one mask, `band`, which the host has computed
    BandOf<int> band;
    // How many work tiles blocks have taken, without each block's first one; null: the order is fixed. The first ones
    // count, too, in backward_fused.cu, and in float32/forward.cu with a workspace, where this is its tiles_taken.
    int *tile_counter;
    bool tma_stores_O;    // TMA stores O wherever stages_O allows it
    bool aligned;         // rows of O begin and end at multiples of 16 bytes
    bool stores_O_alone;  // aligned, and there is no l, m, lse or earlier state
    int *order;           // with ranges, of the interleaved heads: sort_tiles_cuda's, or null
    int zeros_from;       // from this key on TMA sets rows of K and V to 0
    // With a block_table TMA loads so many rows at a time, each within a page, and tiles of keys begin at multiples of
    // them; else 0. K and V are maps of the pages then.
    int rows_of_piece, last_page;
    Divisor page_size;
};

}  // namespace minimal_attn::hopper

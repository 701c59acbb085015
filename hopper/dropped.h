// dropped.h: dropout (dropout.h) of a thread's numbers in a wgmma accumulator, in general kernels of half types. A
// thread has rows `lane / 4` and 8 further of its warp's 16, and columns 8 n + 2 (lane % 4) and the next one. Tiles
// begin at multiples of 16.
//
// P is multiplied by 0 or 1 alone: float16 ends at 65504. O and dV get the factor 1 / (1 - p) where they are stored,
// dP where D is subtracted.
#pragma once
#include "dropout.h"
#include "hopper/half.h"

namespace minimal_attn::hopper {

// use(x, is_kept) for the x-th number. The thread's first row is `row`, the tile's first column column0; the rows are
// queries, or the columns are.
template <bool columns_are_queries, int Count, class Use>
__device__ void for_each_weight(const DropoutOfHead &head, int row, int column0, const Use &use) {
    const int column = column0 + threadIdx.x % 4 * 2;
    static_assert(Count % 8 == 0);
#pragma unroll
    for (int x = 0; x < Count; x += 8) {  // 16 columns
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int at = column + 2 * x + c;
            const Words words = columns_are_queries ? head.group(at, row) : head.group(row, at);
            // Of the upper bits without a shift. If all are dropped (p = 1), so is the factor of kept ones 0.
            const auto is_kept = [&](uint32_t word, bool is_later_key) {
                return is_later_key ? word >= head.dropped << 16 : (word & 0xffff) >= head.dropped;
            };
            use(x + c, is_kept(words.x, false));
            use(x + 2 + c, columns_are_queries ? is_kept(words.x, true) : is_kept(words.y, false));
            use(x + 4 + c, columns_are_queries ? is_kept(words.y, false) : is_kept(words.x, true));
            use(x + 6 + c, is_kept(words.y, true));
        }
        if (x % 16 == 8) __syncwarp();  // else ptxas keeps the words of all
    }
}

// A bit for each weight of a thread. Backward kernels draw them beside a product, and use them behind it.
template <int Count>
struct KeptWeights {
    uint32_t bits[(Count + 31) / 32] = {};

    template <bool columns_are_queries>
    __device__ void draw(const DropoutOfHead &head, int row, int column0) {
        for_each_weight<columns_are_queries, Count>(
            head, row, column0, [&](int x, bool is_kept) { bits[x / 32] |= (uint32_t)is_kept << x % 32; });
    }
    __device__ bool has(int x) const { return bits[x / 32] >> x % 32 & 1; }
    __device__ void drop(float (&P)[Count]) const {
#pragma unroll
        for (int x = 0; x < Count; ++x) P[x] = has(x) ? P[x] : 0.f;
    }
};

// pack_operand of P, less what is dropped.
template <class T, int Count>
__device__ void pack_kept(uint32_t (&A)[Count / 2], const float (&P)[Count], const KeptWeights<Count> &kept,
                          bool drops) {
    if (!drops) return pack_operand<T>(A, P);
#pragma unroll
    for (int x = 0; x < Count; x += 2) A[x / 2] = pack<T>(kept.has(x) ? P[x] : 0.f, kept.has(x + 1) ? P[x + 1] : 0.f);
}

}  // namespace minimal_attn::hopper

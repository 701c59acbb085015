// dropout.h: which weights dropout sets to 0, and what it multiplies the others by. All backends ask this file, in both
// passes. The paper's Algorithms 2 and 4 call the matrix Zij:
//
//     Zij = 1 / (1 - p) with probability 1 - p, else 0
//     O = (P o Z) V                        l, m and lse are those without dropout
//     dV = (P o Z)^T dO,   dP = (dO V^T) o Z,   dS = P o (dP - D)        D = rowsum(dO o O) as without
//
// Zij depends on the seed, the batch, the query head, i and j alone. So it is the same in every kernel, tile and pass,
// and nothing of Nq x Nk is stored. docs/dropout.md has more.
#pragma once

#include "flash.h"

namespace minimal_attn {

constexpr int kDropoutSteps = 1 << 16;  // p counts in steps of 2^-16

MINIMAL_ATTN_HOST_DEVICE inline bool has_dropout(const Attention &a) { return a.dropout.dropped != 0; }

// Of kept weights, where kernels drop by 0 and 1 alone.
MINIMAL_ATTN_HOST_DEVICE inline float factor_of_kept(const Attention &a) {
    return has_dropout(a) ? a.dropout.kept : 1.f;
}

// Philox2x32 (Salmon, Moraes, Dror, Shaw 2011): a block cipher of two words. Seven rounds pass BigCrush.
struct Words {
    uint32_t x, y;
};
constexpr uint32_t kPhiloxFactor = 0xd256d193, kPhiloxStep = 0x9e3779b9;  // the step is between keys of two rounds
MINIMAL_ATTN_HOST_DEVICE inline Words philox_round(Words counter, uint32_t key) {
#ifdef __CUDA_ARCH__
    uint32_t low, high;  // in C++ nvcc adds 0 to `high`
    asm("{.reg .u64 product; mul.wide.u32 product, %2, %3; mov.b64 {%0, %1}, product;}"
        : "=r"(low), "=r"(high)
        : "r"(counter.x), "n"(kPhiloxFactor));
#else
    const uint64_t product = (uint64_t)kPhiloxFactor * counter.x;
    const uint32_t low = (uint32_t)product, high = (uint32_t)(product >> 32);
#endif
    return {high ^ key ^ counter.y, low};
}
constexpr int kDropoutRounds = 7;

// Of one query head. One call of philox gives the numbers of a group: queries i and i + 8, keys j and j + 8, where i
// and j lack the bit 8. In the fragments of tensor cores one thread has all of a group, whether rows are queries or
// keys.
struct DropoutOfHead {
    uint32_t key, dropped;
    Words origin;
    float kept;

    MINIMAL_ATTN_HOST_DEVICE DropoutOfHead(const Attention &a, int64_t b, int64_t h)
        : dropped(a.dropout.dropped), kept(a.dropout.kept) {
        const uint64_t seed = has_dropout(a) ? (uint64_t)*a.dropout.seed : 0;
        // Of 2^24 heads no two have words that are both within 2^18 of each other: no group is drawn twice.
        const uint64_t of_head = seed + (uint64_t)(b * a.Hq + h) * 0x9e3779b97f4a7c15u;
        key = (uint32_t)seed ^ (uint32_t)(seed >> 32) * 0x85ebca6bu;
        origin = {(uint32_t)(of_head >> 32), (uint32_t)of_head};
    }
    // 16 bits for each: those of query i in x, of i + 8 in y; of key j the lower ones.
    MINIMAL_ATTN_HOST_DEVICE Words group(int i, int j) const {
        Words words = {(uint32_t)i ^ origin.x, (uint32_t)j ^ origin.y};
#ifdef __CUDA_ARCH__  // the compiler of host code warns of it
#pragma unroll
#endif
        for (int round = 0; round < kDropoutRounds; ++round) words = philox_round(words, key + round * kPhiloxStep);
        return words;
    }
    MINIMAL_ATTN_HOST_DEVICE float Z_of(uint32_t number) const { return number >= dropped ? kept : 0.f; }
    MINIMAL_ATTN_HOST_DEVICE float Zij(int i, int j) const {
        const Words words = group(i & ~8, j & ~8);
        const uint32_t word = i & 8 ? words.y : words.x;
        return Z_of(j & 8 ? word >> 16 : word & 0xffff);
    }
};

#ifdef __CUDACC__
// use(m, n, e, Zij) for a thread's numbers in the accumulators of mma.sync (mma.cuh). It has rows row0 + 8 r and
// columns column0 + 8 n + 0, 1; the rows are queries, or the columns are. Tiles that begin at multiples of 16 are fast.
template <bool columns_are_queries, int M, int N, class Use>
__device__ void for_each_Z(const DropoutOfHead &head, int row0, int column0, const Use &use) {
    if ((row0 | column0 | (column0 + 1)) & 8) {
#pragma unroll
        for (int x = 0; x < M * N * 4; ++x) {
            const int m = x / 4 / N, n = x / 4 % N, e = x % 4, row = row0 + 16 * m + e / 2 * 8;
            const int column = column0 + 8 * n + e % 2;
            use(m, n, e, columns_are_queries ? head.Zij(column, row) : head.Zij(row, column));
        }
        return;
    }
    static_assert(N % 2 == 0);
#pragma unroll
    for (int x = 0; x < M * N; ++x) {
        const int m = x / N, n = x % N / 2 * 2, c = x % 2, row = row0 + 16 * m, column = column0 + 8 * n + c;
        const Words words = columns_are_queries ? head.group(column, row) : head.group(row, column);
#pragma unroll
        for (int below = 0; below < 2; ++below)
#pragma unroll
            for (int right = 0; right < 2; ++right) {
                const bool is_later_query = columns_are_queries ? right : below;
                const bool is_later_key = columns_are_queries ? below : right;
                const uint32_t word = is_later_query ? words.y : words.x;
                use(m, n + right, 2 * below + c, head.Z_of(is_later_key ? word >> 16 : word & 0xffff));
            }
    }
}
#endif

}  // namespace minimal_attn

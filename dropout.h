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

// Philox2x32 (Salmon, Moraes, Dror, Shaw 2011): a block cipher of two words. Seven rounds pass BigCrush.
struct Words {
    uint32_t x, y;
};
constexpr uint32_t kPhiloxFactor = 0xd256d193, kPhiloxStep = 0x9e3779b9;  // the step is between keys of two rounds
MINIMAL_ATTN_HOST_DEVICE inline Words philox_round(Words counter, uint32_t key) {
    const uint64_t product = (uint64_t)kPhiloxFactor * counter.x;
    return {(uint32_t)(product >> 32) ^ key ^ counter.y, (uint32_t)product};
}
template <int rounds>
MINIMAL_ATTN_HOST_DEVICE inline Words philox(Words counter, uint32_t key) {
    for (int round = 0; round < rounds; ++round) counter = philox_round(counter, key + round * kPhiloxStep);
    return counter;
}
constexpr int kDropoutRounds = 7;

// Of one query head. One call of philox gives the numbers of a group: queries i and i + 8, keys j and j + 8, where i and
// j lack the bit 8. In the fragments of tensor cores one thread has all of a group, whether rows are queries or keys.
struct DropoutOfHead {
    uint32_t key, dropped;
    Words origin;
    float kept;

    MINIMAL_ATTN_HOST_DEVICE DropoutOfHead(const Attention &a, int64_t b, int64_t h)
        : dropped(a.dropout.dropped), kept(a.dropout.kept) {
        const uint64_t seed = (uint64_t)*a.dropout.seed;
        key = (uint32_t)seed;
        origin = philox<10>({(uint32_t)(b * a.Hq + h), (uint32_t)(seed >> 32)}, key);
    }
    // 16 bits for each: those of query i in x, of i + 8 in y; of key j the lower ones.
    MINIMAL_ATTN_HOST_DEVICE Words group(int i, int j) const {
        return philox<kDropoutRounds>({(uint32_t)i ^ origin.x, (uint32_t)j ^ origin.y}, key);
    }
    MINIMAL_ATTN_HOST_DEVICE float Z_of(uint32_t number) const { return number >= dropped ? kept : 0.f; }
    MINIMAL_ATTN_HOST_DEVICE float Zij(int i, int j) const {
        const Words words = group(i & ~8, j & ~8);
        const uint32_t word = i & 8 ? words.y : words.x;
        return Z_of(j & 8 ? word >> 16 : word & 0xffff);
    }
};

}  // namespace minimal_attn

// hi_lo.h: a float32 as two float16s. x * scale = hi + lo, 22 bits together; the scale is a power of 2 of the whole
// tile. Then x y = hi hi + hi lo + lo hi, three products of the tensor cores. docs/numerics.md says what is lost.
#pragma once
#include "hopper/pipeline.h"
#include "hopper/softmax.h"

namespace minimal_attn::hopper {

// The scale brings a tile's largest number to 2^kMaxExponent or above. For K and V it is first guessed from four rows,
// with room for numbers four times as large, so that a tile is read only once.
constexpr int kGuessExponent = 13, kMaxExponent = 14;

// V: in each column of Vj the largest number, scaled, must be at least kMinColumn, or 0. lo of smaller numbers is
// subnormal and loses 2^-25. In a tile of fewer than 16 rows it may be smaller: 1 column in 100 is, by chance.
constexpr float kMinColumn = 1.f, kMinColumnOfFew = 1.f / 256;
constexpr uint32_t kTwoMinColumns = 0x3c003c00;  // kMinColumn as two float16s

// The unit of a score is the product of the inverse scales of Qi and Kj (forward.cu: unit_of_m). If that times d
// softmax_scale is below kMaxScoreUnit, subnormal lo change a score by less than 2^-17, in the mean by 2^-22.
constexpr float kMaxScoreUnit = 0x1p-9f;

// The inverse scale of a tile of zeros is 0. Any scale represents zeros exactly, so here such a tile gets the one of a
// tile whose largest number is 2^-10: not 0, and so small that the unit of scores stays small.
__device__ inline float nonzero_inverse_scale(float inverse_scale) {
    return inverse_scale > 0.f ? inverse_scale : 0x1p-24f;
}

// The power of 2 that brings `largest` to 2^exponent or above; between 2^-100 and 2^100, so that its inverse is normal.
// For 0 it is 2^127, of which inverse_of_power makes 0.
__device__ inline float power_for(float largest, int exponent) {
    const int of_largest = __float_as_int(largest) >> 23;
    return largest == 0.f ? 0x1p127f : __int_as_float(clamp(127 + exponent + 127 - of_largest, 27, 227) << 23);
}

// max(|x|, |y|), or NaN if one of them is NaN
__device__ inline float max_abs(float x, float y) {
    float max;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(fabsf(x)), "f"(fabsf(y)));
    return max;
}
__device__ inline float max_abs(const float4 &x) { return max_abs(max_abs(x.x, x.y), max_abs(x.z, x.w)); }
__device__ inline float max_abs(const float4 (&x)[2]) { return max_abs(max_abs(x[0]), max_abs(x[1])); }

// The same of two pairs of float16s. The signs of the result are arbitrary.
__device__ inline uint32_t max_abs_of_halves(uint32_t x, uint32_t y) {
    uint32_t max;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(max) : "r"(x), "r"(y));
    return max;
}

// Whether neither of two non-negative float16s is inf or NaN
__device__ inline bool are_finite(uint32_t two) { return !((two + 0x04000400) & 0x80008000); }

// Two numbers, already scaled
__device__ inline void split(float2 x, uint32_t &hi, uint32_t &lo) {
    const __half2 high = __float22half2_rn(x),
                  low = __float22half2_rn({x.x - __half2float(high.x), x.y - __half2float(high.y)});
    hi = *(const uint32_t *)&high, lo = *(const uint32_t *)&low;
}

__device__ inline float element(const float4 &x, int n) { return n == 0 ? x.x : n == 1 ? x.y : n == 2 ? x.z : x.w; }

// Eight numbers to 16 bytes of hi and 16 of lo. note(c, hi) is called with each pair of hi.
template <class Note>
__device__ void split(const float4 (&x)[2], float scale, unsigned char *to_hi, unsigned char *to_lo, const Note &note) {
    uint32_t hi[4], lo[4];
    for (int c = 0; c < 4; ++c) {
        const float4 &four = x[c / 2];
        const float2 two = c % 2 == 0 ? float2{four.x, four.y} : float2{four.z, four.w};
        split({two.x * scale, two.y * scale}, hi[c], lo[c]);
        note(c, hi[c]);
    }
    *(uint4 *)to_hi = {hi[0], hi[1], hi[2], hi[3]};
    *(uint4 *)to_lo = {lo[0], lo[1], lo[2], lo[3]};
}

// Pij's scale. With a current maximum Pij <= 1, and 2^15 leaves room for rounding. With a stale one Pij may reach
// 15.99, and 2^12 times that is where float16 ends.
template <class Tile>
constexpr float kPScale = Tile::IsSingle ? 0x1p15f : 0x1p12f;

// Dither, below 2^-25: a thread adds it to one Pij of each pair and subtracts it from the other. Small Pij lose up to
// 2^-25, and equal ones lose the same. The dither varies by lane and tile, so that such losses average out.
__device__ inline float dither_at(int j0) {
    const uint32_t turn = j0 * 0x9e3779b9 + (opaque(threadIdx.x) << 30);
    return __uint_as_float(0x33000000 | turn >> 9) - 0x1p-25f;
}

// A thread's x-th pair of Pij. The dither's signs follow the Thue-Morse sequence, so that losses of every second or
// fourth key don't add up either.
template <class Tile>
__device__ void split_P(float P0, float P1, float dither, int x, uint32_t &hi, uint32_t &lo) {
    const float d = 0x96 >> x / 2 & 1 ? -dither : dither;
    split({fmaf(P0, kPScale<Tile>, d), fmaf(P1, kPScale<Tile>, -d)}, hi, lo);
}

}  // namespace minimal_attn::hopper

// gradient_rows.h: what the backward kernels of portable and hopper read of each row of queries beside Q and dO.
#pragma once

#include "device.h"
#include "flash.h"

namespace minimal_attn {

// The rows of a head are padded to a multiple of this, so that no kernel checks where a head ends.
constexpr int kGradientRows = 128;
inline int64_t padded_rows(const Attention &a) {
    return (a.Nq + kGradientRows - 1) / kGradientRows * (int64_t)kGradientRows;
}

// Of a large row of float32, where scores are float64 (Score in tf32.cuh): P = exp2(c (S - m) - log2_l), with c =
// softmax_scale log2(e).
struct LargeRow {
    double m;
    float log2_l, D, D_low;  // D in two parts
};
// log2_l of large rows in float32. No other row has it, and c S - kLarge is c S.
constexpr float kLarge = 0x1p-100f;

// What the kernels read of a row, at (b * Hq + h) * head_stride + i. In half types P is exp2(c (S - m) - log2_l), in
// float32 exp2(c S - log2_l). A usual row has m = 0, and its log2_l is lse in base 2. A row that sees no key, and one
// of the padding, have log2_l = +inf, so that P = 0, and D = 0.
struct GradientRows {
    float *m;           // of large rows a score before the scaling; null for float32
    float *log2_l, *D;  // log2_l_of, D_of_dS; in large rows of float32 kLarge and, behind large_rows.cu, 0
    LargeRow *large;    // float32: filled for large rows alone
    int64_t head_stride;
    int *tile_counter;  // hopper/backward_dq.cu takes work tiles from it; 0 before
    int *any_large;     // whether there is a large row; 0 before launch_large_rows. launch_fused has another one
};

// Beside 131072 keys P is 7.6e-6, where float16 has 7 bits. So in float16 P is computed times 2^15, and dP - D times
// 2^-15: then dS = P o (dP - D) is what it is, and dV is divided by 2^15 in the end.
template <class T>
constexpr bool kScalesP = std::is_same_v<T, __half>;
template <class T>
constexpr float kLog2OfP = kScalesP<T> ? 15.f : 0.f;
template <class T>
constexpr float kPScale = kScalesP<T> ? 0x1p15f : 1.f;

// Whether a row is large. In half types the rounding of P is a larger error than that of an lse below 512. The
// kernels divide by softmax_scale where any_large is set.
template <class T>
__device__ bool is_large_for(const Attention &a, float lse) {
    const float scale = fabsf(a.softmax_scale);
    return is_large(a, lse, std::is_same_v<T, float> ? 16.f : 512.f) && 1e-30f < scale && scale < 1e30f;
}

// In P = exp2(c S - log2_l): lse in base 2, less the logarithm of P's scale.
template <class T>
__device__ float log2_l_of(const Attention &a, float lse) {
    return std::is_same_v<T, float> && is_large_for<T>(a, lse) ? kLarge : fmaf(lse, kLog2e, -kLog2OfP<T>);
}

// S - m, for half types, bounded so that P is at most 1: if not g.is_complete, lse is a rounded float32 even here. The
// bound is exact enough since log2_l is small: in large rows 0 or the logarithm of a sum over keys.
template <class T>
__device__ float less_m(float S, float m, float log2_l, float c) {
    const float x = S - m, limit = __fdividef(log2_l + kLog2OfP<T>, c);
    return (c > 0.f ? x > limit : x < limit) ? limit : x;
}

// In dS = P (dP - D).
template <class T>
__device__ float D_of_dS(float D) {
    return D * (1.f / kPScale<T>);
}
template <class T>
__device__ float subtract_D(float dP, float D) {
    return kScalesP<T> ? fmaf(dP, 1.f / kPScale<T>, -D) : dP - D;
}

int64_t gradient_rows_bytes(const Gradient &g);  // of the workspace, a multiple of 256
GradientRows gradient_rows_in(const Gradient &g, void *workspace);

// Fills m, log2_l and D, and sets *tile_counter and *any_large to 0.
const char *launch_gradient_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream);
// Sets *any_large and stores m and log2_l, or `large`, of large rows, and if g.is_complete D. It follows
// launch_gradient_rows, or precedes the kernel that fills the other rows (backward_fused.cu).
const char *launch_large_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream);

}  // namespace minimal_attn

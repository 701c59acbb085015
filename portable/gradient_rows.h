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

// Of a large row of float32, where scores are float64 (Score in tf32.cuh): P = exp2(c (S - m) - log2_l).
struct LargeRow {
    double m;
    float log2_l, D, D_low;  // D in two parts
};
constexpr float kLarge = 0x1p-100f;  // no other row has this log2_l

// Of all rows, those of head h of batch b from (b * Hq + h) * head_stride on. P = exp2(c (S - m) - log2_l), with c =
// softmax_scale log2(e). In usual rows m is 0, and log2_l is lse in base 2. In large rows m is a score before the scaling:
// S - m is exact for scores near m, so P is as exact as where scores are small. In float32 log2_l of large rows is
// kLarge. D is what D_of_dS returns. Rows that see no key and padding rows have log2_l = +inf, so that P = 0, and D = 0.
struct GradientRows {
    float *m;  // null for float32
    float *log2_l, *D;
    LargeRow *large;  // float32: filled for large rows alone
    int64_t head_stride;
    int *tile_counter;  // hopper/backward_dq.cu takes work tiles from it; 0 before
    int *any_large;     // whether there is a large row; 0 before launch_large_rows
};

// min(x, bound), and NaN where x is.
__device__ inline float at_most(float bound, float x) {
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(bound));
    return x;
#else
    return x > bound ? bound : x;
#endif
}

// Beside 131072 keys P is 7.6e-6, where float16 has 7 bits. So in float16 P is computed times 2^15, and dP - D times
// 2^-15: then dS = P o (dP - D) is what it is, and dV is divided by 2^15 in the end.
template <class T>
constexpr bool kScalesP = std::is_same_v<T, __half>;
template <class T>
constexpr float kLog2OfP = kScalesP<T> ? 15.f : 0.f;
template <class T>
constexpr float kPScale = kScalesP<T> ? 0x1p15f : 1.f;

// Whether a row is large. In half types the rounding of P is a larger error than that of an lse below 512. float32
// divides by softmax_scale.
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

// S less m, for half types: P = exp2(c (S - m) - log2_l). Where lse is that of other keys, too (is_complete), it may be
// rounded too much: so S - m is bounded, and P is at most 1.
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
// Fills m and log2_l, or `large`, and *any_large and, if g.is_complete, D of large rows. It follows
// launch_gradient_rows, or precedes the kernel that fills other rows (backward_fused.cu).
const char *launch_large_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream);

}  // namespace minimal_attn

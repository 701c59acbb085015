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

// What replaces a large lse: P = exp2(c (S - m) - log2_l), with c = softmax_scale log2(e), and at most 1. m is a score
// before the scaling. S - m is exact for scores near m, so P is as exact as where scores are small.
struct LargeRow {
    float m, log2_l;
    double exact_m;  // for float32: scores of large rows are float64 (Score in tf32.cuh)
    float D, D_low;  // for float32: D in two parts
};

// float32, head h of batch b at (b * Hq + h) * head_stride. lse is what lse_of_P returns, D what D_of_dS returns. Rows
// that see no key and padding rows have lse = +inf, so that P = 0, and D = 0. In a large row lse is kLarge.
struct GradientRows {
    float *lse, *D;
    LargeRow *large;  // one a row, filled for large rows alone
    int64_t head_stride;
    int *tile_counter;  // hopper/backward_dq.cu takes work tiles from it; 0 before
    int *any_large;     // whether there is a large row; 0 before launch_large_rows
};

constexpr float kLarge = 0x1p-100f;  // no other row has this lse; exp2(x - kLarge) is exp2(x)

// Beside 131072 keys P is 7.6e-6, where float16 has 7 bits. So in float16 P is computed times 2^15, and dP - D times
// 2^-15: then dS = P o (dP - D) is what it is, and dV is divided by 2^15 in the end.
template <class T>
constexpr bool kScalesP = std::is_same_v<T, __half>;
template <class T>
constexpr float kLog2OfP = kScalesP<T> ? 15.f : 0.f;
template <class T>
constexpr float kPScale = kScalesP<T> ? 0x1p15f : 1.f;

// Whether a row is large. In half types the rounding of P is a larger error than that of an lse below 512. ScoreShift
// multiplies by softmax_scale and divides by it.
template <class T>
__device__ bool is_large_for(const Attention &a, float lse) {
    const float scale = fabsf(a.softmax_scale);
    return is_large(a, lse, std::is_same_v<T, float> ? 16.f : 512.f) && 1e-30f < scale && scale < 1e30f;
}

// In P = exp2(c S - lse): in base 2, less the logarithm of P's scale.
template <class T>
__device__ float lse_of_P(const Attention &a, float lse) {
    return is_large_for<T>(a, lse) ? kLarge : fmaf(lse, kLog2e, -kLog2OfP<T>);
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

// Whether one of Count rows is large. All lanes of a warp ask.
template <int Count>
__device__ bool any_is_large(const float *lse) {
    bool any = false;
    for (int row = threadIdx.x % 32; row < Count; row += 32) any |= lse[row] == kLarge;
    return __any_sync(~0u, any);
}

__device__ inline float reciprocal(float x) { return __fdividef(1.f, x); }

// A NaN stays one.
__device__ inline float at_most_0(float x) { return x > 0.f ? 0.f : x; }

// Changes the scores S of a large row so that exp2(c S - kLarge) is the row's P. Scores of other rows stay.
template <class T>
struct ScoreShift {
    float m, log2_l, c, inverse_c;
    bool is_large;

    __device__ ScoreShift(float lse, const LargeRow *row, float c)
        : c(c), inverse_c(reciprocal(c)), is_large(lse == kLarge) {
        // Past L1, which may have these rows of an earlier launch.
        const float2 two = is_large ? __ldcg((const float2 *)row) : float2{};
        m = two.x, log2_l = two.y;
    }
    __device__ void operator()(float &S) const {
        const float x = at_most_0(fmaf(S - m, c, -log2_l)) + kLog2OfP<T>;
        if (is_large) S = x * inverse_c;
    }
};

int64_t gradient_rows_bytes(const Gradient &g);  // of the workspace, a multiple of 256
GradientRows gradient_rows_in(const Gradient &g, void *workspace);

// Fills lse and D, and sets *tile_counter and *any_large to 0.
const char *launch_gradient_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream);
// Fills `large` and *any_large and, if g.is_complete, D of large rows. It follows launch_gradient_rows, or precedes the
// kernel that fills lse and D (backward_fused.cu).
const char *launch_large_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream);

}  // namespace minimal_attn

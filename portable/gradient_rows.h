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

// How P is computed in a row with a large lse: P = exp2(c (S - m) - log2_l), with c = softmax_scale log2(e), and at most
// 1. Neighbours have an exact difference, so P is as good as where scores are small.
struct LargeRow {
    float m, log2_l;
};

// float32, head h of batch b at (b * Hq + h) * head_stride. lse is that of lse_of_P, D that of D_of_dS. Rows that see no
// key and padding rows have lse = +inf, so that P = 0, and D = 0. `large` is set where is_large(lse).
struct GradientRows {
    float *lse, *D;
    LargeRow *large;
    int64_t head_stride;
    int *tile_counter;  // hopper/backward_dq.cu takes work tiles from it; 0 before
};

// Beside 131072 keys P is 7.6e-6, where float16 has 7 bits. So in float16 P is computed times 2^15, and dP - D times
// 2^-15: then dS = P o (dP - D) is what it is, and dV is divided by 2^15 in the end.
template <class T>
constexpr bool kScalesP = std::is_same_v<T, __half>;
template <class T>
constexpr float kLog2OfP = kScalesP<T> ? 15.f : 0.f;
template <class T>
constexpr float kPScale = kScalesP<T> ? 0x1p15f : 1.f;

// In P = exp2(c S - lse): in base 2, less the logarithm of P's scale.
template <class T>
__device__ float lse_of_P(float lse) {
    return fmaf(lse, kLog2e, -kLog2OfP<T>);
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

// Whether a row's lse, as lse_of_P returns it, is so large that a float32 is too coarse for it, beside T's own rounding.
template <class T>
__device__ bool is_large_of_P(float lse) {
    return is_large(lse, std::is_same_v<T, float> ? 24.f : 768.f);
}

// Whether one of Count rows is. All lanes of a warp ask.
template <class T, int Count>
__device__ bool any_is_large(const float *lse) {
    bool any = false;
#pragma unroll
    for (int row = threadIdx.x % 32; row < Count; row += 32) any |= is_large_of_P<T>(lse[row]);
    return __any_sync(~0u, any);
}

// P of a score. `large` is null where no row is large.
template <class T>
__device__ float exp_of(float S, float c, float lse, const LargeRow *large) {
    if (!large || !is_large_of_P<T>(lse)) return exp2_fast(fmaf(S, c, -lse));
    // Past L1, which may have these rows of an earlier launch.
    const float2 row = __ldcg((const float2 *)large);
    return exp2_fast(fminf(fmaf(S - row.x, c, -row.y), 0.f) + kLog2OfP<T>);
}

int64_t gradient_rows_bytes(const Gradient &g);  // of the workspace, a multiple of 256
GradientRows gradient_rows_in(const Gradient &g, void *workspace);

// Fills lse and D, and sets the counter to 0.
const char *launch_gradient_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream);
// Fills `large`, by large_rows.cu.
const char *launch_large_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream);

}  // namespace minimal_attn

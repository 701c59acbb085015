// scores.h: what becomes of a product Qi Kj^T before the mask. All backends ask this file, in both passes.
//
//     s = softmax_scale * Qi Kj^T
//     s = softcap * tanh(s / softcap)        if there is a softcap
//     s = s - slope |p_i - j|                if there are alibi_slopes; p_i is the key that query i is at
//     s = s + bias(b, h, i, j)               if there is one
//     s = -inf                               where attn_mask(b, h, i, j) is False
//
// If a call has a softcap, what follows the change sees t = tanh(s / softcap), and Attention::softmax_scale is softcap.
// If it has a term of the pair (i, j), what follows sees the whole s, and softmax_scale is 1. The backward pass
// multiplies dS by slope_of(t), and by scores.scale, the caller's softmax_scale, in the end.
//
// On a GPU a kernel is plain or general. A plain one has no code for this, nor for dropout (dropout.h). General is the
// mask type of the others (ranges.h): their mask is always in tables, so each kernel has one general form.
// docs/scores.md has more.
#pragma once

#include <cmath>
#include <type_traits>

#include "dropout.h"
#include "ranges.h"
#ifdef __CUDACC__
#include "device.h"
#endif
#ifdef MINIMAL_ATTN_SCORE
#include MINIMAL_ATTN_SCORE
#endif

namespace minimal_attn {

MINIMAL_ATTN_HOST_DEVICE inline bool has_softcap(const Attention &a) { return a.scores.softcap != 0.f; }
MINIMAL_ATTN_HOST_DEVICE inline bool has_terms(const Attention &a) {
    return a.terms.alibi_slopes || a.terms.mask || a.terms.bias;
}
MINIMAL_ATTN_HOST_DEVICE inline bool changes_scores(const Attention &a) { return has_softcap(a) || has_terms(a); }
MINIMAL_ATTN_HOST_DEVICE inline bool needs_general(const Attention &a) { return changes_scores(a) || has_dropout(a); }

// t, from a product. Real is float or double. cpu/vector.h has both functions for vectors: each instruction set
// compiles its own.
template <class Real>
MINIMAL_ATTN_HOST_DEVICE Real changed(const Scores &scores, Real QK) {
    if constexpr (std::is_same_v<Real, double>)
        return std::tanh(QK * ((double)scores.scale / scores.softcap));
    else
        return std::tanh(QK * scores.ratio);
}

// The derivative of a changed score in its scaled product.
template <class Real>
MINIMAL_ATTN_HOST_DEVICE Real slope_of(Real t) {
    return 1.f - t * t;
}

// For any call: the product or t, and its slope.
template <class Real>
MINIMAL_ATTN_HOST_DEVICE Real capped(const Attention &a, Real QK) {
    return has_softcap(a) ? changed(a.scores, QK) : QK;
}
template <class Real>
MINIMAL_ATTN_HOST_DEVICE Real slope_in(const Attention &a, Real t) {
    return has_softcap(a) ? slope_of(t) : Real(1);
}

// The whole score, from the product or t. Where the term is -inf, either may be anything.
template <class Real>
MINIMAL_ATTN_HOST_DEVICE Real whole(const Attention &a, Real t, float term) {
    return term == -INFINITY ? -INFINITY : a.terms.unit * t + term;
}

// What alibi_slopes add to a score, at the distance p_i - j: ALiBi, or what the header that MINIMAL_ATTN_SCORE names at
// the build (setup.py) has in its place.
#ifdef MINIMAL_ATTN_SCORE
constexpr const char *kScore = MINIMAL_ATTN_SCORE;
#else
constexpr const char *kScore = "";
MINIMAL_ATTN_HOST_DEVICE inline float term_of_distance(float slope, float distance) { return -slope * fabsf(distance); }
#endif

// What is added to the scores of query i of head h. Tiles may reach beyond the last query and the last key.
struct TermsOfRow {
    const Terms &terms;
    const int last_key;
    float slope = 0.f;
    int position = 0;
    const unsigned char *mask = nullptr;
    int64_t bias = 0;  // where the row begins

    MINIMAL_ATTN_HOST_DEVICE TermsOfRow(const Attention &a, int64_t b, int64_t h, int i)
        : terms(a.terms), last_key(a.Nk - 1) {
        const auto begin = [&](const PairStrides &stride) {
            return b * stride.batch + h * stride.head + clamp(i, 0, a.Nq - 1) * stride.row;
        };
        if (terms.mask) mask = terms.mask + begin(terms.mask_stride);
        if (terms.bias) bias = begin(terms.bias_stride);
        if (!terms.alibi_slopes) return;
        slope = terms.alibi_slopes[b * terms.slopes_stride + h * terms.slope_stride];
        position = terms.positions ? terms.positions[b * range_rows(a) + i] : position_of_query(a, b, i);
    }
    MINIMAL_ATTN_HOST_DEVICE float of_position(int j) const { return term_of_distance(slope, (float)(position - j)); }
#ifdef __CUDACC__
    // That of key j; T is q's type. cpu/terms.h computes those of many keys.
    template <class T>
    __device__ float of_key(int j) const {
        j = min(j, last_key);
        float term = of_position(j);
        const int64_t at = bias + j * terms.bias_stride.key;
        if (terms.bias)
            term += terms.bias_is_float32 ? ((const float *)terms.bias)[at] : (float)((const T *)terms.bias)[at];
        return mask && !mask[j * terms.mask_stride.key] ? -INFINITY : term;
    }
#endif
};

// Whether a row sees a key, if `sees` says so by the mask in tables. Where all of its scores are -inf by terms, no key
// counts, and the row is as a hidden one.
MINIMAL_ATTN_HOST_DEVICE inline bool sees_by_terms(const Attention &a, bool sees, float l) {
    return sees && !(l == 0.f && has_terms(a));
}

// In bfloat16, GPUs approximate tanh up to this softcap. hopper's kernels have no other tanh for it: above, portable's
// compute.
constexpr float kMostApproximated = 128.f;
inline bool is_approximated(const Attention &a) { return a.scores.softcap <= kMostApproximated; }

#ifdef __CUDACC__
// bfloat16: one instruction, with a relative error of 2^-11, as FlashAttention takes it. P in bfloat16 has 2^-9.
template <class T>
constexpr bool kApproximates = std::is_same_v<T, __nv_bfloat16>;
__device__ inline float changed_approximately(const Scores &scores, float QK) {
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(QK * scores.ratio));
    return t;
}

// float16: near 0, |x| <= 1, where most scores are, tanh(x) is x times a polynomial in x^2, with a relative error of 7e-7.
// `last` is kLast in a register, since an FMA reads one constant from memory.
constexpr float kLast = -0.00306705968f;
__device__ inline bool is_near_0(const Scores &scores, float QK) { return fabsf(QK * scores.ratio) <= 1.f; }
__device__ inline float changed_near_0(const Scores &scores, float QK, float last = kLast) {
    const float x = QK * scores.ratio, z = x * x;
    float p = fmaf(z, last, 0.0167431141f);
    p = fmaf(p, z, -0.0516056754f), p = fmaf(p, z, 0.132814333f), p = fmaf(p, z, -0.333290428f);
    return x * fmaf(p, z, 0.999999404f);
}

// t as the kernels of T have it. Real is double or float.
template <class T, class Real>
__device__ Real changed_in(const Scores &scores, Real QK) {
    if constexpr (std::is_same_v<T, float>) return changed(scores, QK);
    if (kApproximates<T> && scores.softcap <= kMostApproximated) return changed_approximately(scores, QK);
    const float far = fmaf(-2.f, __fdividef(1.f, 1.f + exp2_fast(2.f * kLog2e * (QK * scores.ratio))), 1.f);
    return is_near_0(scores, QK) ? changed_near_0(scores, QK) : far;
}

// For any call: what softmax_scale multiplies.
template <class T, class Real>
__device__ Real unscaled(const Attention &a, Real QK, int64_t b, int64_t h, int i, int j) {
    const Real t = capped(a, QK);
    return has_terms(a) ? whole(a, t, TermsOfRow(a, b, h, i).of_key<T>(j)) : t;
}

// A thread's scores in the accumulators of mma.sync (mma.cuh), products or t, become whole ones. It has rows
// row0 + 8 r and columns column0 + 8 n + 0, 1; the rows are queries, or the columns are.
template <class T, bool columns_are_queries, int M, int N>
__device__ void add_terms(const Attention &a, int64_t b, int64_t h, int row0, int column0, float (&S)[M][N][4]) {
    if (!has_terms(a)) return;
    constexpr int rows = 2 * M, columns = 2 * N;
#pragma unroll
    for (int x = 0; x < (columns_are_queries ? columns : rows); ++x) {
        const TermsOfRow terms(a, b, h, columns_are_queries ? column0 + x / 2 * 8 + x % 2 : row0 + 8 * x);
#pragma unroll
        for (int y = 0; y < (columns_are_queries ? rows : columns); ++y) {
            const int r = columns_are_queries ? y : x, c = columns_are_queries ? x : y;
            float &s = S[r / 2][c / 2][r % 2 * 2 + c % 2];
            s = whole(a, s, terms.of_key<T>(columns_are_queries ? row0 + 8 * y : column0 + y / 2 * 8 + y % 2));
        }
    }
}

// Changes a thread's scores. All lanes of a warp call it.
template <class T, bool is_hopper = false, int Count>
__device__ void change(const Scores &scores, float (&S)[Count]) {
    if constexpr (is_hopper && kApproximates<T>) {
#pragma unroll
        for (int x = 0; x < Count; ++x) S[x] = changed_approximately(scores, S[x]);
        return;
    }
    float largest[4] = {};  // chains that don't wait for each other
    if constexpr (!std::is_same_v<T, float> && !kApproximates<T>) {
#pragma unroll
        for (int x = 0; x < Count; ++x) largest[x % 4] = fmaxf(largest[x % 4], fabsf(S[x]));
        const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
        if (__all_sync(~0u, is_near_0(scores, all))) {
            const float last = opaque(kLast);
#pragma unroll
            for (int x = 0; x < Count; ++x) S[x] = changed_near_0(scores, S[x], last);
            return;
        }
    }
#pragma unroll
    for (int x = 0; x < Count; ++x) S[x] = changed_in<T>(scores, S[x]);
}
#endif

}  // namespace minimal_attn

// terms.h: what the general kernels of half types add to a thread's scores in a wgmma accumulator (scores.h: Terms). A
// thread has rows `lane / 4` and 8 further of its warp's 16, and columns 8 n + 2 (lane % 4) and the next one.
//
//     add_terms               rows are queries, columns keys: half.cu, backward_dq.cu
//     add_terms_transposed    rows are keys, columns queries: the other gradients
//
// A bias or ALiBi gives the bits of `whole`, which large_rows.cu calls.
#pragma once
#include "hopper/tma.h"
#include "ranges.h"
#include "scores.h"

namespace minimal_attn::hopper {

// use(a Mask): of general kernels there are those with softcap, and those with terms or dropout; both at once are
// portable's. In one kernel for all ptxas spilled accumulators, of calls with softcap, too; with a branch at the top it
// serialised products (C7512).
template <class Mask, class Use>
auto with_or_without_terms(const Attention &a, const Use &use) {
    if constexpr (kIsGeneral<Mask>)
        if (has_terms(a) || has_dropout(a)) return use(WithTerms());
    return use(Mask());
}

// Whether a term may be -inf. Then P = 0, and the score's dP may be anything.
__device__ inline bool may_hide(const Attention &a) { return a.terms.mask || a.terms.bias; }

// Two neighbours in one load.
__device__ inline float2 two_numbers(const float *at) { return *(const float2 *)at; }
__device__ inline __half2 two_numbers(const __half *at) { return *(const __half2 *)at; }
__device__ inline __nv_bfloat162 two_numbers(const __nv_bfloat16 *at) { return *(const __nv_bfloat162 *)at; }
__device__ inline uchar2 two_numbers(const unsigned char *at) { return *(const uchar2 *)at; }

// s with a number of a bias or of a mask.
template <class Number>
__device__ float with_number(float unit, float s, Number x) {
    if constexpr (std::is_same_v<Number, unsigned char>) return x ? s : -INFINITY;
    return (float)x == -INFINITY ? -INFINITY : fmaf(unit, s, (float)x);
}

// Where a thread's numbers of a bias or mask are: of its two rows, from the tile's first column on. Columns are `step`
// bytes apart, and `last` is the last one that exists: tiles reach beyond queries and keys.
template <class Number>
struct Numbers {
    const Number *rows[2];
    int step, last;
    bool in_pairs;  // two neighbours may be read at once
    __device__ const Number *at(int column, int r) const {
        return (const Number *)((const char *)rows[r] + (int64_t)step * min(column, last));
    }
};

template <class Number, int Count>
__device__ void add_numbers(float (&S)[Count], float unit, const Numbers<Number> &numbers) {
    const int first = opaque(threadIdx.x % 4 * 2);  // else ptxas keeps what two calls have in common
    if (numbers.in_pairs) {
        const Number *const rows[2] = {numbers.rows[0] + first, numbers.rows[1] + first};
#pragma unroll
        for (int x0 = 0; x0 < Count; x0 += 16) {
            decltype(two_numbers(rows[0])) two[8];
#pragma unroll
            for (int x = x0; x < x0 + 16 && x < Count; x += 2)
                two[x / 2 % 8] = two_numbers(rows[x / 2 % 2] + x / 4 * 8);
#pragma unroll
            for (int x = x0; x < x0 + 16 && x < Count; ++x) {
                const auto number = x % 2 ? two[x / 2 % 8].y : two[x / 2 % 8].x;
                S[x] = with_number(unit, S[x], number);
            }
            __syncwarp();
        }
    } else {
#pragma unroll
        for (int x0 = 0; x0 < Count; x0 += 8) {
            Number number[8];
#pragma unroll
            for (int x = x0; x < x0 + 8; ++x) number[x % 8] = *numbers.at(first + x / 4 * 8 + x % 2, x / 2 % 2);
#pragma unroll
            for (int x = x0; x < x0 + 8; ++x) S[x] = with_number(unit, S[x], number[x % 8]);
            __syncwarp();
        }
    }
}

// numbers_of<Number>(tensor, strides) tells where they are.
template <class T, int Count, class NumbersOf>
__device__ void add_bias_and_mask(float (&S)[Count], const Terms &terms, bool is_whole, const NumbersOf &numbers_of) {
    const float unit = terms.alibi_slopes ? 1.f : terms.unit;  // ALiBi has multiplied by it
    if (terms.bias && terms.bias_is_float32) {
        add_numbers(S, unit, numbers_of((const float *)terms.bias, terms.bias_stride));
    } else if (terms.bias) {
        add_numbers(S, unit, numbers_of((const T *)terms.bias, terms.bias_stride));
    } else if (!terms.alibi_slopes) {
#pragma unroll
        for (float &s : S) s *= unit;
    }
    if (terms.mask && !is_whole) add_numbers(S, unit, numbers_of(terms.mask, terms.mask_stride));
}

// Rows are queries i and i + 8; the tile's keys begin at j0. Products become whole scores. is_whole: a mask shows the
// tile as a whole, so it isn't read.
template <class T, int Count>
__device__ void add_terms(float (&S)[Count], const Attention &a, int b, int h, int i, int j0, bool is_whole = false) {
    const Terms &terms = a.terms;
    if (!has_terms(a)) return;  // but dropout
    if (terms.alibi_slopes) {
        const float slope = terms.alibi_slopes[b * terms.slopes_stride + h * terms.slope_stride];
        const int *const positions = terms.positions + b * range_rows(a) + i;
        const int j = j0 + threadIdx.x % 4 * 2;
        const float distance[2] = {(float)(positions[0] - j), (float)(positions[8] - j)};
#pragma unroll
        for (int x = 0; x < Count; ++x)
            S[x] = fmaf(terms.unit, S[x], term_of_distance(slope, distance[x / 2 % 2] - (x / 4 * 8 + x % 2)));
        if (!may_hide(a)) return;
    }
    add_bias_and_mask<T>(S, terms, is_whole,
                         [&](const auto *x, const PairStrides &stride) -> Numbers<std::decay_t<decltype(*x)>> {
                             x += b * stride.batch + h * stride.head + j0 * stride.key;
                             const bool in_pairs = terms.in_pairs && j0 % 2 == 0 && j0 + 2 * Count <= a.Nk;
                             return {{x + min(i, a.Nq - 1) * stride.row, x + min(i + 8, a.Nq - 1) * stride.row},
                                     (int)stride.key * (int)sizeof(*x),
                                     a.Nk - 1 - j0,
                                     in_pairs};
                         });
}

// Rows are keys j and j + 8; the tile's queries begin at i0.
template <class T, int Count>
__device__ void add_terms_transposed(float (&S)[Count], const Attention &a, int b, int h, int i0, int j,
                                     bool is_whole = false) {
    const Terms &terms = a.terms;
    if (!has_terms(a)) return;
    if (terms.alibi_slopes) {
        const float slope = terms.alibi_slopes[b * terms.slopes_stride + h * terms.slope_stride];
        const int *const positions = terms.positions + b * range_rows(a) + i0 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int x = 0; x < Count; x += 4) {
            const int2 p = *(const int2 *)(positions + 2 * x);
            const float distance[2] = {(float)(p.x - j), (float)(p.y - j)};
#pragma unroll
            for (int y = x; y < x + 4; ++y)
                S[y] = fmaf(terms.unit, S[y], term_of_distance(slope, distance[y % 2] - y / 2 % 2 * 8));
            if (x % 16 == 12) __syncwarp();
        }
        if (!may_hide(a)) return;
    }
    add_bias_and_mask<T>(S, terms, is_whole,
                         [&](const auto *x, const PairStrides &stride) -> Numbers<std::decay_t<decltype(*x)>> {
                             x += b * stride.batch + h * stride.head + i0 * stride.row;
                             return {{x + min(j, a.Nk - 1) * stride.key, x + min(j + 8, a.Nk - 1) * stride.key},
                                     (int)stride.row * (int)sizeof(*x),
                                     a.Nq - 1 - i0,
                                     false};
                         });
}

// dP = 0 where P = 0: there dP may be anything.
template <int Count>
__device__ void clear_hidden(float (&dP)[Count], const float (&P)[Count]) {
#pragma unroll
    for (int x = 0; x < Count; ++x)
        if (P[x] == 0.f) dP[x] = 0.f;
}

// The function sets hidden rows of a tile of queries to 0. Hidden are the rows whose log2_l is inf: they see no key.
// They may hold NaN, and 0 * NaN is NaN. All 128 threads of a consumer call it.
template <int Rows, int Boxes>
__device__ void zero_hidden_rows(unsigned char *tile, const float (&log2_l)[Rows], int barrier) {
    bool any = false;
#pragma unroll
    for (int row = 0; row < Rows; row += 32) any |= log2_l[row + threadIdx.x % 32] == INFINITY;
    if (!__any_sync(~0u, any)) return;
    zero_rows<Rows, Boxes>(tile, [&](int row) { return log2_l[row] == INFINITY; }, barrier);
}

}  // namespace minimal_attn::hopper

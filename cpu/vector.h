// cpu/vector.h: vectors of W float32, and what is done with them lane by lane. kernel.h includes it once for each
// instruction set, which gives W.

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t VecInt __attribute__((vector_size(4 * W)));
typedef uint32_t VecUint __attribute__((vector_size(4 * W)));

inline Vec &vec(float *x) { return *(Vec *)x; }
inline const Vec &vec(const float *x) { return *(const Vec *)x; }

// From any address.
[[gnu::always_inline]] inline Vec load_vec(const float *x) {
    Vec v;
    std::memcpy(&v, x, sizeof(v));
    return v;
}

// A row travels from memory to the L2 cache while other rows are computed, which need the L1. Inline, since GCC drops
// calls of a function that does nothing but prefetch.
[[gnu::always_inline]] inline void prefetch(const void *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)row + at, 0, 2);
}

// b, where one is NaN
[[gnu::always_inline]] inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
[[gnu::always_inline]] inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

[[gnu::always_inline]] inline float sum_of(Vec x) {
    for (int s = W / 2; s > 0; s /= 2)
        for (int c = 0; c < s; ++c) x[c] += x[c + s];
    return x[0];
}

[[gnu::always_inline]] inline float max_of(Vec x) {
    for (int s = W / 2; s > 0; s /= 2)
        for (int c = 0; c < s; ++c) x[c] = x[c] > x[c + s] ? x[c] : x[c + s];
    return x[0];
}

// e^x for x <= 0, exactly 0 from x = -88 on. e^x = 2^n e^r with |r| <= log(2) / 2, and a polynomial for e^r. The error is
// at most 1 unit in the last place, 1.16 without FMA.
[[gnu::always_inline]] inline Vec exp(Vec x) {
    const Vec least = Vec{} - 88.f;  // here n = -127, for which the exponent's bits, and so the power, are 0
    x = max(least, x);
    // Adding `magic` rounds to an integer n, and leaves n + 127, the exponent of 2^n, in the lowest bits.
    const float magic = 0x1.8p23f + 127.f;
    const Vec shifted = x * 0x1.715476p0f + magic, n = shifted - magic;
    const Vec r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;  // log(2) in two: n times the first is exact
    Vec p = r * 0x1.6a2448p-10f + 0x1.1239d6p-7f;
    p = p * r + 0x1.5558f2p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    return p * (Vec)((VecInt)shifted << 23);
}

// The error is at most 2 units in the last place. If all |x| are below kNear0, all_near_0 saves the exponential.
constexpr float kNear0 = 0.625f;
template <bool all_near_0 = false>
[[gnu::always_inline]] inline Vec tanh(Vec x) {
    const Vec z = x * x;
    Vec p = z * -0x1.72edd2p-8f + 0x1.515ce8p-6f;
    p = p * z - 0x1.b8152ap-5f;
    p = p * z + 0x1.110586p-3f;
    p = p * z - 0x1.55553ep-2f;
    const Vec near_0 = x + x * z * p;
    if constexpr (all_near_0) return near_0;
    const Vec magnitude = x < 0.f ? -x : x, e = exp(-2.f * magnitude), far = (1.f - e) / (1.f + e);
    return magnitude < kNear0 ? near_0 : x < 0.f ? -far : far;
}

// Those of scores.h.
template <bool all_near_0 = false>
[[gnu::always_inline]] inline Vec changed(const Scores &scores, Vec QK) {
    return tanh<all_near_0>(QK * scores.ratio);
}
[[gnu::always_inline]] inline Vec slope_of(Vec t) { return 1.f - t * t; }
[[gnu::always_inline]] inline Vec whole(const Attention &a, Vec t, Vec term) {
    return term == -INFINITY ? Vec{} - INFINITY : a.terms.unit * t + term;
}
using minimal_attn::whole;

// use(at, t) for each vector of n products; t is what they change to. Most tiles are near 0 as a whole.
template <class Use>
[[gnu::always_inline]] inline void change_products(const Scores &scores, int64_t n, float *S, const Use &use) {
    Vec largest = {};
    for (int64_t at = 0; at < n; at += W) {
        const Vec x = vec(S + at) * scores.ratio;
        largest = max(x < 0.f ? -x : x, largest);
    }
    if (max_of(largest) < kNear0)
        for (int64_t at = 0; at < n; at += W) use(at, changed<true>(scores, vec(S + at)));
    else
        for (int64_t at = 0; at < n; at += W) use(at, changed(scores, vec(S + at)));
}

// use(T()) for the type of a tensor. What differs between types is here alone; all other code is compiled once.
template <class Use>
[[gnu::always_inline]] inline void with_type(Dtype dtype, const Use &use) {
    if (dtype == Dtype::float32) return use(float());
    return dtype == Dtype::float16 ? use(c10::Half()) : use(c10::BFloat16());
}

template <class From, class To>
[[gnu::flatten]] void convert(const From *from, To *to, int n) {
    for (int c = 0; c < n; ++c) to[c] = from[c];
}

// Of two vectors, one after the other, the numbers at these places.
[[gnu::always_inline]] inline Vec shuffle(Vec a, Vec b, VecInt places) {
#ifndef __clang__
    return __builtin_shuffle(a, b, places);
#else
    Vec result;
    for (int c = 0; c < W; ++c) result[c] = places[c] < W ? a[places[c]] : b[places[c] - W];
    return result;
#endif
}

// Of W x W numbers: swaps the two s x s blocks beside the diagonal of each 2s x 2s block, for s = 1, 2, 4, ...
template <int s = 1>
[[gnu::always_inline]] inline void transpose(Vec (&x)[W]) {
    VecInt upper, lower;
    for (int c = 0; c < W; ++c) {
        upper[c] = c & s ? W + c - s : c;
        lower[c] = c & s ? W + c : c + s;
    }
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) {
        if (r & s) continue;
        const Vec above = x[r], below = x[r + s];
        x[r] = shuffle(above, below, upper);
        x[r + s] = shuffle(above, below, lower);
    }
    if constexpr (2 * s < W) transpose<2 * s>(x);
}

[[gnu::noinline]] inline void transpose(const float *from, int64_t from_row, float *to, int64_t to_row) {
    Vec x[W];
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) x[r] = vec(from + r * from_row);
    transpose(x);
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) vec(to + r * to_row) = x[r];
}

// The next smaller height of a register tile, for what the larger ones leave.
constexpr int smaller(int C) { return C == 6 ? 4 : C == 3 ? 2 : C / 2; }

// The one product of this folder. use(x, r, sum over y < n of A(x, y) B(y, vector r)) for x0 <= x < x1. A number of A
// is broadcast; C x R sums stay in registers. A_x, A_y and B_y are strides.
template <int R, int C, class Use>
[[gnu::always_inline]] inline void multiply(int x0, int x1, int n, const float *A, int64_t A_x, int64_t A_y,
                                            const float *B, int64_t B_y, const Use &use) {
    // Two of the next smaller tiles are better than one of these and a tiny rest.
    const int rest = (x1 - x0) % C, end = x1 - rest - (C > 1 && rest > 0 && C + rest == 2 * smaller(C) ? C : 0);
    for (; x0 < end; x0 += C) {
        const float *Ax = A + x0 * A_x;
        Vec sum[C][R] = {};
#pragma GCC unroll 4
        for (int64_t y = 0; y < n; ++y)
            for (int c = 0; c < C; ++c)
                for (int r = 0; r < R; ++r) sum[c][r] += Ax[c * A_x + y * A_y] * load_vec(B + y * B_y + r * W);
        for (int c = 0; c < C; ++c)
            for (int r = 0; r < R; ++r) use(x0 + c, r, sum[c][r]);
    }
    if constexpr (C > 1) multiply<R, smaller(C)>(x0, x1, n, A, A_x, A_y, B, B_y, use);
}

// For few rows (decode.h): the scores of n keys with one row q, times `scale`. W dot products are a vector each;
// transposed, their sum is one. visit(j) is called once for each key, W keys at a time.
template <class Visit>
[[gnu::always_inline]] inline void dot_products(int n, int64_t D, const float *q, const float *K, int64_t K_row,
                                                float scale, float *Si, const Visit &visit) {
    for (int j0 = 0; j0 < n; j0 += W) {
        Vec x[W];
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) {
            const float *k = K + std::min(j0 + j, n - 1) * K_row;
            visit(j0 + j);
            Vec sum = {};
            for (int64_t c = 0; c < D; c += W) sum += load_vec(k + c) * vec(q + c);
            x[j] = sum;
        }
        transpose(x);
#pragma GCC unroll 4
        for (int s = W / 2; s > 0; s /= 2)
#pragma GCC unroll 8
            for (int j = 0; j < s; ++j) x[j] += x[j + s];
        vec(Si + j0) = scale * x[0];
    }
}

// flash_cpu.cpp: Algorithm 1 on the CPU.
//
// Who runs it: every thread takes a tile of Br queries (a, b, h, i), walks its keys in tiles of Bc, takes the
// next. A query is one lane of a vector register, as it is one thread on a GPU: scores and output are held
// transposed, Sij as (key, query) and Oi as (channel, query). Then a row's max and sum need no shuffles, the
// softmax state (mi, li) is one vector, and both products have one form, in which K and V are read where they
// are, unpacked and untransposed, one number at a time, and broadcast:
//
//     Sij(j, i) = sum over channels c of Kj(j, c) Qi(c, i)      Oi(c, i) += sum over keys j of Vj(j, c)
//     Sij(j, i)
//
// A vector has W lanes (16 with AVX-512, 8 with AVX2, 4 otherwise). What a warp is on a GPU is a strip here:
// R vectors, P = R * W queries, that go through all steps of a tile together; R * C sums stay in registers.
//
// The buffers of a thread, float32, in KB for d = 64 (they grow with d, but for Sij):
//     Qi 16, Oi 16    (strip, channel, query in the strip)
//     Sij 16          (key, query) of one strip, then Pij
//     rows 16         (query, channel): Q before it is transposed, O after
//     Kj 16, Vj 16    (key, channel), for half types only: converted once a tile
//     mi, li 0.5
//
// Br and Bc: GFLOP/s of one core (peak 252) on d = 64, N 64 (batch and heads 192) / 512 / 1024, d = 128, N
// 2048:
//     64 x 32   137 193 196 204        128 x 32   139 191 196 206
//     64 x 64   149 192 197 210        128 x 64   137 198 198 213       256 x 64   130 193 196 207
//     64 x 128  145 197 198 211        128 x 128  131 197 199 216       256 x 128  136 197 201 214
// R x C with AVX-512, likewise: 4 x 4 (16 sums: FMAs take 4 clocks, two start in each) is as good as any
// larger.
//
// GCC compiles a function for the instructions it is told of, and a vector wider than those in pieces. So the
// file has two parts: this one includes the second once an instruction set, and chooses when it runs.
#ifndef INSTRUCTION_SET

#include "flash.h"

#include <algorithm>
#include <atomic>
#include <type_traits>

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace minimal_attn {
namespace {

constexpr int Br = 64, Bc = 64;

// A sum of floats keeps more of them in short pieces: as many products are summed in registers.
constexpr int channels_per_sum = 16, keys_per_sum = 32;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A thread's buffers, all on 64 bytes; d is rounded up to the longest vector.
struct Buffers {
    static int64_t size(int64_t d) { return 3 * Br * d + 2 * Bc * d + Bc * Br + 2 * Br; }

    Buffers(float *memory, int64_t d)
        : Qi(memory),
          Oi(Qi + Br * d),
          rows(Oi + Br * d),
          Kj(rows + Br * d),
          Vj(Kj + Bc * d),
          Sij(Vj + Bc * d),
          mi(Sij + Bc * Br),
          li(mi + Br) {}

    float *Qi, *Oi, *rows, *Kj, *Vj, *Sij, *mi, *li;
};

struct QueryTile {
    int64_t b, h;
    int i0, i1;  // queries i0 <= i < i1
    int64_t d;   // as in Buffers
};

template <class T>
T *row_of(const void *x, const Strides &stride, int64_t b, int64_t h, int64_t i) {
    return (T *)x + b * stride.batch + h * stride.head + i * stride.row;
}

}  // namespace
}  // namespace minimal_attn

#if defined(__x86_64__) && !defined(__clang__)
#define INSTRUCTION_SET avx512
#pragma GCC push_options
#pragma GCC target("avx512f")
namespace minimal_attn::avx512 {
constexpr int W = 16, R_max = 4, sums = 16;
}
#include "flash_cpu.cpp"
#pragma GCC pop_options
#undef INSTRUCTION_SET

#define INSTRUCTION_SET avx2
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace minimal_attn::avx2 {
constexpr int W = 8, R_max = 2, sums = 8;
}
#include "flash_cpu.cpp"
#pragma GCC pop_options
#undef INSTRUCTION_SET
#endif

#define INSTRUCTION_SET any_cpu
namespace minimal_attn::any_cpu {
constexpr int W = 4, R_max = 2, sums = 8;
}
#include "flash_cpu.cpp"
#undef INSTRUCTION_SET

namespace minimal_attn {

static auto forward_of(Dtype dtype) {
#if defined(__x86_64__) && !defined(__clang__)
    if (__builtin_cpu_supports("avx512f")) return avx512::forward_of(dtype);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::forward_of(dtype);
#endif
    return any_cpu::forward_of(dtype);
}

void forward_cpu(const Attention &a) {
    const auto forward = forward_of(a.dtype);
    const int64_t Tr = round_up(a.Nq, Br) / Br, tiles = a.B * a.Hq * Tr, d = round_up(a.d, 16);
    std::atomic<int64_t> next_tile{0};
    at::parallel_for(0, std::min<int64_t>(tiles, at::get_num_threads()), 1, [&](int64_t, int64_t) {
        const auto memory = c10::GetCPUAllocator()->allocate(Buffers::size(d) * sizeof(float));
        const Buffers buffers((float *)memory.get(), d);
        for (int64_t tile; (tile = next_tile++) < tiles;) {
            const int64_t i =
                Tr - 1 - tile % Tr;  // the last queries first: if causal, they see the most keys
            const int i0 = i * Br, i1 = std::min<int64_t>(a.Nq, (i + 1) * Br);
            forward(a, {tile / Tr / a.Hq, tile / Tr % a.Hq, i0, i1, d}, buffers);
        }
    });
}

}  // namespace minimal_attn

#else  // the second part, for one INSTRUCTION_SET

namespace minimal_attn::INSTRUCTION_SET {
namespace {

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t VecInt __attribute__((vector_size(4 * W)));

inline Vec &vec(float *x) { return *(Vec *)x; }
inline const Vec &vec(const float *x) { return *(const Vec *)x; }

// e^x for x <= 0, within 1 ulp; 0 where float32 has no normal number for it. e^x = 2^n e^r, |r| <= log(2)
// / 2.
inline Vec exp(Vec x) {
    const float round = 0x1.8p23f;  // adding it leaves no bits behind the point, and n in the last ones
    const Vec n_round = x * 0x1.715476p0f + round, n = n_round - round;
    const Vec r =
        x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;  // log(2) in two pieces, n times the first exact
    Vec p = r * 0x1.6a2448p-10f + 0x1.1239d6p-7f;
    p = p * r + 0x1.5558f2p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    const Vec power = (Vec)(((VecInt)n_round + 127) << 23);
    return x < -87.3f ? Vec{} : p * power;
}

// to(c, r) = from(r, c), W x W numbers. Step s swaps the two s x s blocks beside the diagonal of every 2s x
// 2s.
template <int s = 1>
inline void transpose(Vec (&x)[W]) {
    VecInt upper, lower;
    for (int c = 0; c < W; ++c) {
        upper[c] = c & s ? W + c - s : c;
        lower[c] = c & s ? W + c : c + s;
    }
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) {
        if (r & s) continue;
        const Vec above = x[r], below = x[r + s];
        x[r] = __builtin_shuffle(above, below, upper);
        x[r + s] = __builtin_shuffle(above, below, lower);
    }
    if constexpr (2 * s < W) transpose<2 * s>(x);
}

void transpose(const float *from, int64_t from_row, float *to, int64_t to_row) {
    Vec x[W];
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) x[r] = vec(from + r * from_row);
    transpose(x);
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) vec(to + r * to_row) = x[r];
}

// end(x, r, sum over y < n of A(x, y) B(y, vector r)) for x_begin <= x < x_end; A's strides are A_x and A_y.
template <int R, int C, class End>
[[gnu::always_inline]] inline void multiply(int x_begin, int x_end, int n, const float *A, int64_t A_x,
                                            int64_t A_y, const float *B, const End &end) {
    int x = x_begin;
    for (; x + C <= x_end; x += C) {
        const float *Ax = A + x * A_x;
        Vec sum[C][R] = {};
        for (int64_t y = 0; y < n; ++y)
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) sum[c][r] += Ax[c * A_x + y * A_y] * vec(B + (y * R + r) * W);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) end(x + c, r, sum[c][r]);
    }
    if constexpr (C > 1) multiply<R, C / 2>(x, x_end, n, A, A_x, A_y, B, end);
}

// Keys of one tile, in float32.
struct KeyTile {
    Keys keys;
    const float *Kj, *Vj;
    int64_t K_row, V_row;
};

// -inf for each query i0 + lane that doesn't see the key.
template <int P>
void mask(const Band &band, int i0, Keys keys, float *Sij) {
    for (int64_t j = keys.begin; j < keys.end; ++j, Sij += P) {
        std::fill(Sij, Sij + clamp(j - band.last - i0, 0, P), -INFINITY);
        std::fill(Sij + clamp(j - band.first - i0 + 1, 0, P), Sij + P, -INFINITY);
    }
}

// Steps 9 to 13 of Algorithm 1 for the strip of queries i0 <= i < i1.
template <int R>
void update(const Attention &a, const Band &band, int i0, int i1, const KeyTile &tile, const float *Qi,
            float *Oi, float *mi, float *li, float *Sij) {
    constexpr int C = sums / R, P = R * W;
    const int n = tile.keys.end - tile.keys.begin;

    // 9. Sij = softmax_scale Qi Kj^T
    for (int c = 0; c < a.d; c += channels_per_sum)
        multiply<R, C>(0, n, std::min(channels_per_sum, a.d - c), tile.Kj + c, tile.K_row, 1, Qi + c * P,
                       [&](int j, int r, Vec sum) {
                           Vec &s = vec(Sij + j * P + r * W);
                           s = c == 0 ? a.softmax_scale * sum : s + a.softmax_scale * sum;
                       });
    const Keys all = keys_of_all(band, i0, i1);
    if (tile.keys.begin < all.begin || tile.keys.end > all.end) mask<P>(band, i0, tile.keys, Sij);

    // 10. mij, Pij, lij, and 11. the new mi and li
    Vec m[R], l[R] = {}, alpha[R];
    for (int r = 0; r < R; ++r) m[r] = vec(mi + r * W);
    for (int j = 0; j < n; ++j)
        for (int r = 0; r < R; ++r) {
            const Vec s = vec(Sij + j * P + r * W);
            m[r] = s > m[r] ? s : m[r];
        }
    for (int r = 0; r < R; ++r) {
        const Vec m_safe = m[r] == -INFINITY ? Vec{} : m[r];
        alpha[r] = exp(vec(mi + r * W) - m_safe);
        vec(mi + r * W) = m[r];
        m[r] = m_safe;
    }
    for (int j = 0; j < n; ++j)
        for (int r = 0; r < R; ++r) {
            Vec &p = vec(Sij + j * P + r * W);
            p = exp(p - m[r]);
            l[r] += p;
        }
    for (int r = 0; r < R; ++r) vec(li + r * W) = alpha[r] * vec(li + r * W) + l[r];

    // 12. Oi = alpha Oi + Pij Vj (the division by li waits for the last tile)
    for (int j = 0; j < n; j += keys_per_sum)
        multiply<R, C>(0, a.d, std::min(keys_per_sum, n - j), tile.Vj + j * tile.V_row, 1, tile.V_row,
                       Sij + j * P, [&](int c, int r, Vec sum) {
                           Vec &o = vec(Oi + c * P + r * W);
                           o = j == 0 ? alpha[r] * o + sum : o + sum;
                       });
}

// The keys' rows of K or V: float32 where they are, half types converted.
template <class T>
const float *load(const T *x, int64_t stride, Keys keys, int d, float *buffer, int64_t *row) {
    constexpr bool in_place = std::is_same_v<T, float>;
    x += keys.begin * stride;
    *row = in_place ? stride : d;
    for (int64_t j = 0; j < keys.end - keys.begin; ++j, x += stride) {
        if constexpr (in_place)
            for (int c = 0; c < d; c += 16)
                __builtin_prefetch(x + c);  // 64 bytes; Vj is read down its columns
        else
            std::copy(x, x + d, buffer + j * d);
    }
    if constexpr (in_place) return x - (keys.end - keys.begin) * stride;
    return buffer;
}

// Step 8 of Algorithm 1: Qi, Oi, li, mi.
template <class T, int P>
void begin(const Attention &a, const QueryTile &t, int lanes, const Buffers &buffers) {
    for (int i = 0; i < lanes; ++i) {
        float *row = buffers.rows + i * t.d;
        if (t.i0 + i < t.i1) {
            const T *q = row_of<const T>(a.q, a.q_stride, t.b, t.h, t.i0 + i);
            std::copy(q, q + a.d, row);
        } else {
            std::fill(row, row + a.d, 0.f);
        }
    }
    for (int i = 0; i < lanes; i += W)
        for (int c = 0; c < t.d; c += W)
            transpose(buffers.rows + i * t.d + c, t.d, buffers.Qi + (i / P * t.d + c) * P + i % P, P);
    std::fill(buffers.Oi, buffers.Oi + lanes * t.d, 0.f);
    std::fill(buffers.li, buffers.li + lanes, 0.f);
    std::fill(buffers.mi, buffers.mi + lanes, -INFINITY);
}

// Steps 12 and 13 with the earlier state, and the division by li.
template <class T, int P>
void end(const Attention &a, const QueryTile &t, const Band &band, int lanes, const Buffers &buffers) {
    for (int i = 0; i < lanes; i += W)
        for (int c = 0; c < t.d; c += W)
            transpose(buffers.Oi + (i / P * t.d + c) * P + i % P, P, buffers.rows + i * t.d + c, t.d);
    for (int i = t.i0; i < t.i1; ++i) {
        const int64_t row = (t.b * a.Hq + t.h) * a.Nq + i;
        const int lane = i - t.i0;
        const RowEnd end = end_of_row(!empty(keys_of_row(band, i)), buffers.li[lane], buffers.mi[lane],
                                      a.o_in ? a.l_in[row] : 0.f, a.o_in ? a.m_in[row] : -INFINITY);
        float *o = buffers.rows + lane * t.d;
        for (int c = 0; c < a.d; ++c) o[c] = end.reads_Oi ? end.weight_Oi * o[c] : 0.f;
        if (a.o_in && end.reads_o_in) {
            const float *o_in = row_of<const float>(a.o_in, a.o_in_stride, t.b, t.h, i);
            for (int c = 0; c < a.d; ++c) o[c] += end.weight_o_in * o_in[c];
        }
        if (a.l) {
            std::copy(o, o + a.d, row_of<float>(a.o, a.o_stride, t.b, t.h, i));
            a.l[row] = end.l;
            a.m[row] = end.m;
        } else {
            std::copy(o, o + a.d, row_of<T>(a.o, a.o_stride, t.b, t.h, i));
        }
    }
}

template <class T, int R = R_max>
void forward(const Attention &a, const QueryTile &t, const Buffers &buffers) {
    if constexpr (R > 1)
        if (t.i1 - t.i0 <= R / 2 * W)
            return forward<T, R / 2>(a, t, buffers);  // few queries: a thinner strip
    constexpr int P = R * W;
    const int lanes = round_up(t.i1 - t.i0, P);
    const Band band = band_of(a, t.b);
    const T *K = row_of<const T>(a.k, a.k_stride, t.b, t.h / (a.Hq / a.Hkv), 0);
    const T *V = row_of<const T>(a.v, a.v_stride, t.b, t.h / (a.Hq / a.Hkv), 0);

    begin<T, P>(a, t, lanes, buffers);
    const Keys seen = keys_of_any(band, t.i0, t.i1);
    for (int64_t j = seen.begin; j < seen.end; j += Bc) {
        KeyTile tile{{(int)j, (int)std::min<int64_t>(seen.end, j + Bc)}};
        tile.Kj = load(K, a.k_stride.row, tile.keys, a.d, buffers.Kj, &tile.K_row);
        tile.Vj = load(V, a.v_stride.row, tile.keys, a.d, buffers.Vj, &tile.V_row);
        for (int i = 0; i < lanes; i += P)
            update<R>(a, band, t.i0 + i, std::min(t.i1, t.i0 + i + P), tile, buffers.Qi + i * t.d,
                      buffers.Oi + i * t.d, buffers.mi + i, buffers.li + i, buffers.Sij);
    }
    end<T, P>(a, t, band, lanes, buffers);
}

}  // namespace

static auto forward_of(Dtype dtype) {
    return dtype == Dtype::float32   ? forward<float>
           : dtype == Dtype::float16 ? forward<c10::Half>
                                     : forward<c10::BFloat16>;
}

}  // namespace minimal_attn::INSTRUCTION_SET

#endif

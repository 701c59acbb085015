// flash_cpu.cpp: Algorithm 1 on the CPU.
//
// A thread takes a tile of Br rows of Q, walks its keys in tiles of Bc, then takes the next. A query is a
// lane of a vector register, as it is a thread on a GPU: scores and output are kept transposed. Then the max
// and the sum of a row need no shuffles, mi and li are vectors, and both products have one form, which reads
// K and V where they are, one number at a time:
//
//     Sij(j, i) = sum over channels c of Kj(j, c) Qi(c, i)
//     Oi(c, i) += sum over keys j of Vj(j, c) Pij(j, i)
//
// A vector has W lanes: 16 with AVX-512, 8 with AVX2, else 4. R of them are a strip, what a warp is on a GPU:
// its P = R * W queries go through a tile together, and R * C sums of a product stay in registers. Query
// heads that share a key head share its tiles: row i * group + g of Q is query i of the g-th of these heads.
//
// A thread's buffers, float32, in KB for d = 64 and Br = 128 (all but Sij, mi and li grow with d):
//     Qi 32, Oi 32   (strip, channel, query)
//     Sij 16         (key, query) of one strip, then Pij
//     rows 32        (query, channel): Q before it is transposed, O after
//     Kj 16, Vj 16   (key, channel), where they are converted or copied
//     mi, li 1
//
// GCC compiles a function for the instructions that it is told of, so this file has two parts: the first
// includes the second once for each set of instructions, and chooses between them at run time.
#ifndef INSTRUCTIONS

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

// Br is 128, or 64 where there are too few tiles for all threads. On two Intel cores 128 is up to 7 % faster than 64
// from N 512 on, on two AMD cores 4 %.
constexpr int Bc = 64;

// So many products are summed in registers before the sum goes to memory: sums in pieces round less, but each piece
// costs a pass over Sij (up to 4 % of the time for 32 channels instead of 64; 16 up to 13 %).
constexpr int channels_per_sum = 32, scores_per_sum = 8;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Buffers {  // d is a multiple of 16, so that each begins at a multiple of 64 bytes
    static int64_t size(int Br, int64_t d) { return 3 * Br * d + 2 * Bc * d + Bc * Br + 2 * Br; }

    Buffers(float *memory, int Br, int64_t d) {
        Qi = memory, Oi = Qi + Br * d, rows = Oi + Br * d, Kj = rows + Br * d, Vj = Kj + Bc * d;
        Sij = Vj + Bc * d, mi = Sij + Bc * Br, li = mi + Br;
    }

    float *Qi, *Oi, *rows, *Kj, *Vj, *Sij, *mi, *li;
};

// Of batch b and key head h: the rows from query i0 of the g0-th query head on, one a lane.
struct QueryTile {
    int64_t b, h;
    int group, i0, g0, rows;
    int64_t d;  // as in Buffers

    int query(int lane) const { return i0 + (g0 + lane) / group; }
    int64_t head(int lane) const { return h * group + (g0 + lane) % group; }
};

template <class T>
T *row_of(const void *x, const Strides &stride, int64_t b, int64_t h, int64_t i) {
    return (T *)x + b * stride.batch + h * stride.head + i * stride.row;
}

}  // namespace
}  // namespace minimal_attn

#if defined(__x86_64__) && !defined(__clang__)
#define INSTRUCTIONS avx512
#pragma GCC push_options
#pragma GCC target("avx512f")
namespace minimal_attn::avx512 {
constexpr int W = 16, sums = 16;
}
#include "flash_cpu.cpp"
#pragma GCC pop_options
#undef INSTRUCTIONS

#define INSTRUCTIONS avx2
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace minimal_attn::avx2 {
constexpr int W = 8, sums = 12;
}
#include "flash_cpu.cpp"
#pragma GCC pop_options
#undef INSTRUCTIONS
#endif

#define INSTRUCTIONS any_cpu
namespace minimal_attn::any_cpu {
constexpr int W = 4, sums = 8;
}
#include "flash_cpu.cpp"
#undef INSTRUCTIONS

namespace minimal_attn {

static auto forward_of(Dtype dtype) {
#if defined(__x86_64__) && !defined(__clang__)
    if (__builtin_cpu_supports("avx512f")) return avx512::forward_of(dtype);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::forward_of(dtype);
#endif
    return any_cpu::forward_of(dtype);
}

void forward_cpu(const Attention &a) {
    if (a.B == 0 || a.Hq == 0 || a.Nq == 0) return;
    const auto forward = forward_of(a.dtype);
    const int group = a.Hq / a.Hkv;
    const int64_t rows = (int64_t)a.Nq * group;
    const int Br = a.B * a.Hkv * rows >= 4 * 128 * at::get_num_threads() ? 128 : 64;
    const int64_t Tr = round_up(rows, Br) / Br, tiles = a.B * a.Hkv * Tr;
    const int64_t d = round_up(a.d, 16);
    std::atomic<int64_t> next_tile{0};
    at::parallel_for(0, std::min<int64_t>(tiles, at::get_num_threads()), 1, [&](int64_t, int64_t) {
        const auto memory = c10::GetCPUAllocator()->allocate(Buffers::size(Br, d) * sizeof(float));
        const Buffers buffers((float *)memory.get(), Br, d);
        for (int64_t tile; (tile = next_tile++) < tiles;) {
            const int64_t bh = tile / Tr, row = (Tr - 1 - tile % Tr) * Br;  // if causal, the longest first
            const int i0 = row / group, g0 = row % group, n = std::min<int64_t>(Br, rows - row);
            forward(a, {bh / a.Hkv, bh % a.Hkv, group, i0, g0, n, d}, buffers);
        }
    });
}

}  // namespace minimal_attn

#else  // The second part, for one set of INSTRUCTIONS.

namespace minimal_attn::INSTRUCTIONS {
namespace {

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t VecInt __attribute__((vector_size(4 * W)));

Vec &vec(float *x) { return *(Vec *)x; }
const Vec &vec(const float *x) { return *(const Vec *)x; }

// e^x for x <= 0 within 1 ulp, 0 below float32's normal numbers. e^x = 2^n e^r with |r| <= log(2) / 2.
[[gnu::always_inline]] inline Vec exp(Vec x) {
    // Adding it rounds to an integer n, and leaves n + 127, the exponent of 2^n, in the lowest bits.
    const float magic = 0x1.8p23f + 127.f;
    const Vec shifted = x * 0x1.715476p0f + magic, n = shifted - magic;
    const Vec r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;  // log(2) in two: n times the first is exact
    Vec p = r * 0x1.6a2448p-10f + 0x1.1239d6p-7f;
    p = p * r + 0x1.5558f2p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    const Vec power = (Vec)((VecInt)shifted << 23);
    return x < -87.3f ? Vec{} : p * power;
}

template <class From, class To>
[[gnu::flatten]] void convert(const From *from, To *to, int n) {
    for (int c = 0; c < n; ++c) to[c] = from[c];
}

// From two vectors, one after the other, the numbers at these places.
[[gnu::always_inline]] inline Vec shuffle(Vec a, Vec b, VecInt places) {
#ifndef __clang__
    return __builtin_shuffle(a, b, places);
#else
    Vec result;
    for (int c = 0; c < W; ++c) result[c] = places[c] < W ? a[places[c]] : b[places[c] - W];
    return result;
#endif
}

// Of W x W numbers: swaps the two s x s blocks beside the diagonal of each 2s x 2s one, for s = 1, 2, 4, ...
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

void transpose(const float *from, int64_t from_row, float *to, int64_t to_row) {
    Vec x[W];
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) x[r] = vec(from + r * from_row);
    transpose(x);
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) vec(to + r * to_row) = x[r];
}

// use(x, r, sum over y < n of A(x, y) B(y, vector r)) for x0 <= x < x1. A_x, A_y: strides of A.
template <int R, int C, class Use>
[[gnu::always_inline]] inline void multiply(int x0, int x1, int n, const float *A, int64_t A_x, int64_t A_y,
                                            const float *B, const Use &use) {
    for (; x0 + C <= x1; x0 += C) {
        const float *Ax = A + x0 * A_x;
        Vec sum[C][R] = {};
        for (int64_t y = 0; y < n; ++y)
            for (int c = 0; c < C; ++c)
                for (int r = 0; r < R; ++r) sum[c][r] += Ax[c * A_x + y * A_y] * vec(B + (y * R + r) * W);
        for (int c = 0; c < C; ++c)
            for (int r = 0; r < R; ++r) use(x0 + c, r, sum[c][r]);
    }
    if constexpr (C > 1) multiply<R, C / 2>(x0, x1, n, A, A_x, A_y, B, use);
}

struct KeyTile {
    Keys keys;
    const float *Kj, *Vj;
    int64_t K_row, V_row;  // strides
};

// -inf for each of the P queries from a lane on that doesn't see the key.
template <int P>
void mask(const Band &band, const QueryTile &t, int lane, Keys keys, float *Sij) {
    const int64_t row0 = (int64_t)t.i0 * t.group + t.g0 + lane, none = 0, all = P;
    for (int64_t j = keys.begin; j < keys.end; ++j, Sij += P) {
        std::fill(Sij, Sij + clamp((j - band.last) * t.group - row0, none, all), -INFINITY);
        std::fill(Sij + clamp((j - band.first + 1) * t.group - row0, none, all), Sij + P, -INFINITY);
    }
}

// Steps 9 to 12 of Algorithm 1, for the strip that begins at a lane.
template <int R>
void update(const Attention &a, const Band &band, const QueryTile &t, int lane, const KeyTile &tile,
            const Buffers &buffers) {
    constexpr int C = sums / R, P = R * W;
    const float *Qi = buffers.Qi + lane * t.d;
    float *Oi = buffers.Oi + lane * t.d, *mi = buffers.mi + lane, *li = buffers.li + lane, *Sij = buffers.Sij;
    const int n = tile.keys.end - tile.keys.begin;

    // 9. Sij = softmax_scale Qi Kj^T
    for (int c0 = 0; c0 < a.d; c0 += channels_per_sum) {
        const float scale =
            c0 + channels_per_sum < a.d ? 1.f : a.softmax_scale;  // of the whole sum: a part may overflow
        const auto add = [&](int j, int r, Vec sum) {
            Vec &s = vec(Sij + j * P + r * W);
            s = scale * ((c0 == 0 ? Vec{} : s) + sum);
        };
        const int channels = std::min(channels_per_sum, a.d - c0);
        multiply<R, C>(0, n, channels, tile.Kj + c0, tile.K_row, 1, Qi + c0 * P, add);
    }
    const Keys all = keys_of_all(band, t.query(lane), t.query(std::min(t.rows, lane + P) - 1) + 1);
    if (tile.keys.begin < all.begin || tile.keys.end > all.end) mask<P>(band, t, lane, tile.keys, Sij);

    // 10. - 11. mi, alpha, then Pij = exp(Sij - mi), li = alpha li + rowsum(Pij)
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
    for (int j0 = 0; j0 < n; j0 += scores_per_sum) {
        Vec sum[R] = {};
        for (int j = j0; j < std::min(j0 + scores_per_sum, n); ++j)
            for (int r = 0; r < R; ++r) {
                Vec &p = vec(Sij + j * P + r * W);
                p = exp(p - m[r]);
                sum[r] += p;
            }
        for (int r = 0; r < R; ++r) l[r] += sum[r];
    }
    for (int r = 0; r < R; ++r) vec(li + r * W) = alpha[r] * vec(li + r * W) + l[r];

    // 12. Oi = alpha Oi + Pij Vj; the division by li waits for the end of the row
    const auto add = [&](int c, int r, Vec sum) {
        Vec &o = vec(Oi + c * P + r * W);
        o = alpha[r] * o + sum;
    };
    multiply<R, C>(0, a.d, n, tile.Vj, 1, tile.V_row, Sij, add);
}

// A row travels from memory while others are computed: into the L2 cache, as the L1 holds what they need.
template <class T>
void prefetch(const T *row, int d) {
    for (int c = 0; c < d; c += 64 / sizeof(T)) __builtin_prefetch(row + c, 0, 2);
}

// Step 6: a tile of K or V, in place or as float32 in the buffer.
template <bool in_place, class T>
const float *load(const T *x, int64_t stride, Keys keys, int d, float *buffer, int64_t *row) {
    *row = in_place ? stride : d;
    if constexpr (in_place) return x + keys.begin * stride;
    for (int64_t j = keys.begin; j < keys.end; ++j) convert(x + j * stride, buffer + (j - keys.begin) * d, d);
    return buffer;
}

// Step 8: Qi, and Oi = 0, li = 0, mi = -inf.
template <class T, int P>
void start_rows(const Attention &a, const QueryTile &t, int lanes, const Buffers &buffers) {
    for (int lane = 0; lane < lanes; ++lane) {
        float *row = buffers.rows + lane * t.d;
        if (lane < t.rows)
            convert(row_of<const T>(a.q, a.q_stride, t.b, t.head(lane), t.query(lane)), row, a.d);
        else
            std::fill(row, row + a.d, 0.f);
    }
    for (int i = 0; i < lanes; i += W)
        for (int c = 0; c < t.d; c += W)
            transpose(buffers.rows + i * t.d + c, t.d, buffers.Qi + (i / P * t.d + c) * P + i % P, P);
    std::fill(buffers.Oi, buffers.Oi + lanes * t.d, 0.f);
    std::fill(buffers.li, buffers.li + lanes, 0.f);
    std::fill(buffers.mi, buffers.mi + lanes, -INFINITY);
}

// The division by li, the earlier state, and step 13 with it.
template <class T, int P>
void end_rows(const Attention &a, const Band &band, const QueryTile &t, int lanes, const Buffers &buffers) {
    for (int i = 0; i < lanes; i += W)
        for (int c = 0; c < t.d; c += W)
            transpose(buffers.Oi + (i / P * t.d + c) * P + i % P, P, buffers.rows + i * t.d + c, t.d);
    for (int lane = 0; lane < t.rows; ++lane) {
        const int i = t.query(lane);
        const int64_t h = t.head(lane), bhi = (t.b * a.Hq + h) * a.Nq + i;
        const RowEnd end = end_of_row(!empty(keys_of_row(band, i)), buffers.li[lane], buffers.mi[lane],
                                      a.o_in ? a.l_in[bhi] : 0.f, a.o_in ? a.m_in[bhi] : -INFINITY);
        float *o = buffers.rows + lane * t.d;
        for (int c = 0; c < a.d; ++c) o[c] = end.reads_Oi ? end.weight_Oi * o[c] : 0.f;
        if (a.o_in && end.reads_o_in) {
            const float *o_in = row_of<const float>(a.o_in, a.o_in_stride, t.b, h, i);
            for (int c = 0; c < a.d; ++c) o[c] += end.weight_o_in * o_in[c];
        }
        if (a.l) {
            convert(o, row_of<float>(a.o, a.o_stride, t.b, h, i), a.d);
            a.l[bhi] = end.l;
            a.m[bhi] = end.m;
        } else {
            convert(o, row_of<T>(a.o, a.o_stride, t.b, h, i), a.d);
        }
    }
}

template <class T, int R = 4>
void forward(const Attention &a, const QueryTile &t, const Buffers &buffers) {
    if constexpr (R > 1)
        if (t.rows <= R / 2 * W) return forward<T, R / 2>(a, t, buffers);  // a thinner strip will do
    constexpr int P = R * W;
    const int lanes = round_up(t.rows, P);
    const Band band = band_of(a, t.b);
    const Keys seen = keys_of_any(band, t.i0, t.query(t.rows - 1) + 1);
    const T *K = row_of<const T>(a.k, a.k_stride, t.b, t.h, 0);
    const T *V = row_of<const T>(a.v, a.v_stride, t.b, t.h, 0);
    const auto prefetch_tile = [&](int j0) {
        for (int64_t j = j0; j < std::min(seen.end, j0 + Bc); ++j)
            prefetch(K + j * a.k_stride.row, a.d), prefetch(V + j * a.v_stride.row, a.d);
    };
    // 6. Kj and Vj
    const auto tile_at = [&](int j) {
        // For few queries memory is what takes time, and it is faster if rows are read whole: by a copy.
        constexpr bool in_place = std::is_same_v<T, float> && R > 1;
        KeyTile tile;
        tile.keys = {j, std::min(seen.end, j + Bc)};
        prefetch_tile(tile.keys.end);
        tile.Kj = load<in_place>(K, a.k_stride.row, tile.keys, a.d, buffers.Kj, &tile.K_row);
        tile.Vj = load<in_place>(V, a.v_stride.row, tile.keys, a.d, buffers.Vj, &tile.V_row);
        return tile;
    };

    if (t.query(t.rows - 1) == a.Nq - 1) prefetch_tile(seen.begin);  // whoever comes first to a head
    for (int lane = 0; lane < t.rows; ++lane) {
        prefetch(row_of<T>(a.q, a.q_stride, t.b, t.head(lane), t.query(lane)), a.d);
        if (a.l)
            prefetch(row_of<float>(a.o, a.o_stride, t.b, t.head(lane), t.query(lane)), a.d);
        else
            prefetch(row_of<T>(a.o, a.o_stride, t.b, t.head(lane), t.query(lane)), a.d);
    }
    // 8. Qi, Oi, li, mi; 5. for j: the tiles of keys that some query of this tile sees; 13. O, l and m
    KeyTile tile = tile_at(seen.begin);
    start_rows<T, P>(a, t, lanes, buffers);
    for (; !empty(tile.keys); tile = tile_at(tile.keys.end))
        for (int lane = 0; lane < lanes; lane += P) update<R>(a, band, t, lane, tile, buffers);
    end_rows<T, P>(a, band, t, lanes, buffers);
}

}  // namespace

static auto forward_of(Dtype dtype) {
    return dtype == Dtype::float32   ? forward<float>
           : dtype == Dtype::float16 ? forward<c10::Half>
                                     : forward<c10::BFloat16>;
}

}  // namespace minimal_attn::INSTRUCTIONS

#endif

// cpu/forward.cpp: Algorithm 1 on the CPU.
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
//     with AMX the parts of Qi 48, Kj 24, Vj 24 and Pij 24 (see there), and products 16
//
// GCC compiles a function for the instructions that it is told of, so this file has two parts: the first
// includes the second once for each set of instructions, and chooses between them at run time.
#ifndef INSTRUCTIONS

#include "flash.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#if defined(__linux__) && defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 11
#define WITH_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace minimal_attn {
namespace {

// Br is 128, or 64 where there are too few tiles for all threads. On two Intel cores 128 is up to 7 % faster than 64
// from N 512 on, on two AMD cores 4 %. With AMX it is 256, since each tile of rows splits its keys again: 1 to 9 %.
constexpr int Bc = 64;

// So many products are summed in registers before the sum goes to memory: sums in pieces round less, but each piece
// costs a pass over Sij (up to 4 % of the time for 32 channels instead of 64; 16 up to 13 %).
constexpr int channels_per_sum = 32, scores_per_sum = 8;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// AMX multiplies matrices of bfloat16, 16 times as fast as AVX-512 those of float32. So a float32 is taken as the sum
// of three bfloat16s, its parts: its sign and exponent with the first 8 of its 24 bits, with the next 8, with the last.
// Of the nine products of two numbers' parts six are added up; the others are below 2^-21 of the whole.
//
// A tile of a part has 16 rows of 64 bytes, one of each of 16 keys, queries or channels x for 32 of the numbers y over
// which the sum runs; the three parts follow each other. Numbers y and y + 16 are neighbors, so that a row is two
// vectors, packed. B's tiles have them the other way, as AMX wants: in row y those of y and y + 16 for each x.
constexpr int x_tile = 16, y_tile = 32, part_size = x_tile * y_tile / 2, parts_size = 3 * part_size;  // in floats
constexpr int amx_P = 64;  // queries of a strip that AMX is used for

#ifdef WITH_AMX
// Whether there is AMX, and Linux lets this process use it, for which it must ask.
bool has_amx() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool allowed = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("amx-bf16") &&
                                syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return allowed;
}

#pragma GCC push_options
#pragma GCC target("avx512f,amx-tile,amx-bf16")

// A thread's eight tile registers, between these two, of 16 rows of 64 bytes: 0 to 3 are of C, 4 and 5 of A, 6 and 7 of B.
[[gnu::noipa]] void begin_amx() {
    alignas(64) static const struct {
        uint8_t palette = 1, start_row = 0, zeros[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } registers;
    _tile_loadconfig(&registers);
}

[[gnu::noipa]] void end_amx() { _tile_release(); }

inline void load_A(const float *A, int64_t next) {
    _tile_loadd(4, A, 64);
    _tile_loadd(5, A + next, 64);
}

inline void load_B(const float *B, int64_t next) {
    _tile_loadd(6, B, 64);
    _tile_loadd(7, B + next, 64);
}

inline void multiply_tiles() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

// C(x, i) = sum over y of A(x, y) B(y, i), from the parts of A and B, which have so many tiles in x, i and y. Small
// products come first, to be rounded when the sum is small. The compiler must not look into this function (noipa):
// it isn't told that tile loads read memory.
[[gnu::noipa]] void multiply_parts(int xs, int is, int ys, const float *A, const float *B, float *C, int64_t C_row) {
    constexpr int first = 0, second = part_size, third = 2 * part_size;
    const int64_t next = (int64_t)ys * parts_size;
    for (int x = 0; x < xs; x += 2)
        for (int i = 0; i < is; i += 2) {
            const float *Ax = A + x * next, *Bi = B + i * next;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t y = 0; y < next; y += parts_size) {
                load_A(Ax + y + third, next), load_B(Bi + y + first, next), multiply_tiles();
                load_A(Ax + y + second, next), multiply_tiles();
                load_B(Bi + y + second, next), multiply_tiles();
                load_A(Ax + y + first, next), multiply_tiles();
                load_B(Bi + y + third, next), multiply_tiles();
            }
            for (int64_t y = 0; y < next; y += parts_size)
                load_A(Ax + y + first, next), load_B(Bi + y + first, next), multiply_tiles();
            float *Cxi = C + x * x_tile * C_row + i * x_tile;
            _tile_stored(0, Cxi, C_row * 4);
            _tile_stored(1, Cxi + x_tile, C_row * 4);
            _tile_stored(2, Cxi + x_tile * C_row, C_row * 4);
            _tile_stored(3, Cxi + x_tile * C_row + x_tile, C_row * 4);
        }
}

#pragma GCC pop_options
#else
constexpr bool has_amx() { return false; }
inline void begin_amx() {}
inline void end_amx() {}
inline void multiply_parts(int, int, int, const float *, const float *, float *, int64_t) {}
#endif

// Whether products are worth AMX: with fewer rows or keys splitting takes longer than it saves ((16, 12, 64, 64): 19 %).
bool uses_amx(const Attention &a) {
    const int64_t rows = (int64_t)a.Nq * (a.Hq / a.Hkv);
    return a.dtype == Dtype::float32 && a.d >= y_tile && a.d % x_tile == 0 && rows >= 128 && a.Nk >= 128 && has_amx();
}

struct Buffers {  // d is a multiple of 16, so that each begins at a multiple of 64 bytes
    static int64_t size(int Br, int64_t d, bool with_parts) {
        const int64_t D = round_up(d, y_tile), parts = (Br * D + 2 * Bc * D + Bc * amx_P) * 3 / 2;
        return 3 * Br * d + 2 * Bc * d + Bc * Br + 2 * Br + (with_parts ? parts + D * amx_P : 0);
    }

    Buffers(float *memory, int Br, int64_t d) {
        Qi = memory, Oi = Qi + Br * d, rows = Oi + Br * d, Kj = rows + Br * d, Vj = Kj + Bc * d;
        Sij = Vj + Bc * d, mi = Sij + Bc * Br, li = mi + Br;
        const int64_t D = round_up(d, y_tile);
        Qi_parts = li + Br, Kj_parts = Qi_parts + Br * D * 3 / 2, Vj_parts = Kj_parts + Bc * D * 3 / 2;
        Pij_parts = Vj_parts + Bc * D * 3 / 2, products = Pij_parts + Bc * amx_P * 3 / 2;
    }

    float *Qi, *Oi, *rows, *Kj, *Vj, *Sij, *mi, *li;
    float *Qi_parts, *Kj_parts, *Vj_parts, *Pij_parts, *products;
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
#include "cpu/forward.cpp"
#pragma GCC pop_options
#undef INSTRUCTIONS

#define INSTRUCTIONS avx2
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace minimal_attn::avx2 {
constexpr int W = 8, sums = 12;
}
#include "cpu/forward.cpp"
#pragma GCC pop_options
#undef INSTRUCTIONS
#endif

#define INSTRUCTIONS any_cpu
namespace minimal_attn::any_cpu {
constexpr int W = 4, sums = 8;
}
#include "cpu/forward.cpp"
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
    const bool with_parts = uses_amx(a);
    const auto enough_for = [&](int Br) { return a.B * a.Hkv * rows >= 4 * Br * at::get_num_threads(); };
    const int Br = with_parts && enough_for(256) ? 256 : enough_for(128) ? 128 : 64;
    const int64_t Tr = round_up(rows, Br) / Br, tiles = a.B * a.Hkv * Tr;
    const int64_t d = round_up(a.d, 16), threads = at::get_num_threads();
    const auto tile_at = [&](int64_t tile) {
        const int64_t bh = tile / Tr, row = (Tr - 1 - tile % Tr) * Br;  // if causal, the longest first
        const int i0 = row / group, g0 = row % group, n = std::min<int64_t>(Br, rows - row);
        return QueryTile{bh / a.Hkv, bh % a.Hkv, group, i0, g0, n, d};
    };
    std::atomic<int64_t> next_tile{0};
    at::parallel_for(0, std::min(tiles, threads), 1, [&](int64_t, int64_t) {
        const auto memory = c10::GetCPUAllocator()->allocate(Buffers::size(Br, d, with_parts) * sizeof(float));
        const Buffers buffers((float *)memory.get(), Br, d);
        for (int64_t tile; (tile = next_tile++) < tiles;)  // and what this thread takes next, as far as one can say
            forward(a, tile_at(tile), tile_at(std::min(tile + threads, tiles - 1)), buffers);
    });
}

}  // namespace minimal_attn

#else  // The second part, for one set of INSTRUCTIONS.

namespace minimal_attn::INSTRUCTIONS {
namespace {

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t VecInt __attribute__((vector_size(4 * W)));
typedef uint32_t VecUint __attribute__((vector_size(4 * W)));

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
    bool in_parts;         // and Qi, too
};

template <int R>
constexpr bool fits_amx = W == x_tile && (R * W) == amx_P;

// A row of tiles, in three parts, of numbers whose y differs by 16.
[[gnu::always_inline]] inline void split(Vec a, Vec b, float *to) {
#pragma GCC unroll 3
    for (int part = 0; part < 3; ++part) {
        const VecInt first_of_a = (VecInt)a & -0x10000, first_of_b = (VecInt)b & -0x10000;
        vec(to + part * part_size) = (Vec)((first_of_a >> 16 & 0xffff) | first_of_b);
        a -= (Vec)first_of_a, b -= (Vec)first_of_b;
    }
}

// Of the numbers met so far, as integers: the largest absolute value in each lane, and the least but 0, minus 1.
struct Range {
    VecUint largest = {}, least = ~VecUint{};

    // Infinite numbers and NaN have no parts. AMX takes subnormal numbers, which small ones' parts and their products may
    // be, for 0, and sums overflow at other places: numbers from 2^-48 to 2^60 are far from both.
    bool splits_well() const {
        bool all = true;
        for (int c = 0; c < W; ++c) all = all && largest[c] < (127u + 60) << 23 && least[c] >= ((127u - 48) << 23) - 1;
        return all;
    }
};

// A vector from anywhere, into the range, too.
[[gnu::always_inline]] inline Vec read(const float *x, Range *range) {
    Vec v;
    std::memcpy(&v, x, sizeof(v));
    const VecUint size = (VecUint)v & 0x7fffffff, less = size - 1;  // 0 becomes the largest
    range->largest = size > range->largest ? size : range->largest;
    range->least = less < range->least ? less : range->least;
    return v;
}

// The last 16 of y may be missing: zeros.
template <int P>
bool split_queries(const Attention &a, const QueryTile &t, int lanes, const Buffers &buffers) {
    Range range;
    float *to = buffers.Qi_parts;
    for (int i = 0; i < lanes; i += W)
        for (int c = 0; c < a.d; c += y_tile, to += parts_size)
            for (int y = 0; y < x_tile; ++y) {
                const float *q = buffers.Qi + (i / P * t.d + c + y) * P + i % P;
                const Vec lower = read(q, &range);
                split(lower, c + x_tile < a.d ? read(q + x_tile * P, &range) : Vec{}, to + y * W);
            }
    return range.splits_well();
}

inline bool split_keys(int d, const KeyTile &tile, const Buffers &buffers) {
    const int n = tile.keys.end - tile.keys.begin, tiles_of_d = round_up(d, y_tile) / y_tile;
    Range range;
    for (int j = 0; j < n; ++j) {  // what follows key n makes scores that nobody reads
        const float *k = tile.Kj + j * tile.K_row;
        float *to = buffers.Kj_parts + j / x_tile * tiles_of_d * parts_size + j % x_tile * W;
        for (int c = 0; c < d; c += y_tile, to += parts_size) {
            const Vec lower = read(k + c, &range);
            split(lower, c + x_tile < d ? read(k + c + x_tile, &range) : Vec{}, to);
        }
    }
    float *to = buffers.Vj_parts;
    for (int c = 0; c < d; c += x_tile)
        for (int j = 0; j < n; j += y_tile, to += parts_size) {
            Vec x[2][W];
            for (int half = 0; half < 2; ++half) {
                const int j0 = j + half * x_tile;
#pragma GCC unroll 16
                for (int r = 0; r < W; ++r)  // beyond key n any number that is finite, for Pij is 0
                    x[half][r] = read(tile.Vj + std::min(j0 + r, n - 1) * tile.V_row + c, &range);
                transpose(x[half]);
            }
            for (int r = 0; r < W; ++r) split(x[0][r], x[1][r], to + r * W);
        }
    return range.splits_well();
}

template <int R>
void split_scores(int n, const Buffers &buffers) {
    float *to = buffers.Pij_parts;
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < n; j += y_tile, to += parts_size)
            for (int y = j; y < j + x_tile; ++y) {
                const float *p = buffers.Sij + (y * R + r) * W;
                split(y < n ? vec(p) : Vec{}, y + x_tile < n ? vec(p + x_tile * R * W) : Vec{}, to + (y - j) * W);
            }
}

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

    const int tiles_of_d = round_up(a.d, y_tile) / y_tile, tiles_of_n = round_up(n, y_tile) / y_tile;
    // If a tile had these rows alone, its strip would be thinner: so ordinary numbers give the same bits for any Br, and
    // number of threads.
    const bool in_parts = fits_amx<R> && tile.in_parts && t.rows - lane > P / 2;

    // 9. Sij = softmax_scale Qi Kj^T
    if (in_parts) {
        const float *Qi_parts = buffers.Qi_parts + lane * tiles_of_d * y_tile * 3 / 2;
        multiply_parts(2 * tiles_of_n, R, tiles_of_d, buffers.Kj_parts, Qi_parts, Sij, P);
        for (int j = 0; j < n; ++j)
            for (int r = 0; r < R; ++r) vec(Sij + j * P + r * W) *= a.softmax_scale;
    } else {
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
    if (in_parts) {
        split_scores<R>(n, buffers);
        multiply_parts(2 * tiles_of_d, R, tiles_of_n, buffers.Vj_parts, buffers.Pij_parts, buffers.products, P);
        for (int c = 0; c < a.d; ++c)
            for (int r = 0; r < R; ++r) add(c, r, vec(buffers.products + c * P + r * W));
    } else {
        multiply<R, C>(0, a.d, n, tile.Vj, 1, tile.V_row, Sij, add);
    }
}

// A row travels from memory while others are computed: into the L2 cache, as the L1 holds what they need. Inline, since
// GCC drops calls of a function that does nothing but prefetch.
template <class T>
[[gnu::always_inline]] inline void prefetch(const T *row, int d) {
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

// A later tile's rows of Q and O, and its first Kj and Vj if they aren't those of the same head.
template <class T>
[[gnu::always_inline]] inline void prefetch(const Attention &a, const QueryTile &t, bool same_head) {
    for (int lane = 0; lane < t.rows; ++lane) {
        prefetch(row_of<T>(a.q, a.q_stride, t.b, t.head(lane), t.query(lane)), a.d);
        if (a.l)
            prefetch(row_of<float>(a.o, a.o_stride, t.b, t.head(lane), t.query(lane)), a.d);
        else
            prefetch(row_of<T>(a.o, a.o_stride, t.b, t.head(lane), t.query(lane)), a.d);
    }
    const Keys seen = keys_of_any(band_of(a, t.b), t.i0, t.query(t.rows - 1) + 1);
    for (int64_t j = seen.begin; j < std::min(seen.end, seen.begin + Bc) && !same_head; ++j) {
        prefetch(row_of<T>(a.k, a.k_stride, t.b, t.h, j), a.d);
        prefetch(row_of<T>(a.v, a.v_stride, t.b, t.h, j), a.d);
    }
}

template <class T, int R = 4>
void forward(const Attention &a, const QueryTile &t, const QueryTile &next, const Buffers &buffers) {
    if constexpr (R > 1)
        if (t.rows <= R / 2 * W) return forward<T, R / 2>(a, t, next, buffers);  // a thinner strip will do
    constexpr int P = R * W;
    const int lanes = round_up(t.rows, P);
    const Band band = band_of(a, t.b);
    const Keys seen = keys_of_any(band, t.i0, t.query(t.rows - 1) + 1);
    const T *K = row_of<const T>(a.k, a.k_stride, t.b, t.h, 0);
    const T *V = row_of<const T>(a.v, a.v_stride, t.b, t.h, 0);
    // 6. Kj and Vj
    const auto tile_at = [&](int j) {
        // For few queries memory is what takes time, and it is faster if rows are read whole: by a copy.
        constexpr bool in_place = std::is_same_v<T, float> && R > 1;
        KeyTile tile;
        tile.keys = {j, std::min(seen.end, j + Bc)};
        for (int64_t j_next = tile.keys.end; j_next < std::min(seen.end, tile.keys.end + Bc); ++j_next)
            prefetch(K + j_next * a.k_stride.row, a.d), prefetch(V + j_next * a.v_stride.row, a.d);
        tile.Kj = load<in_place>(K, a.k_stride.row, tile.keys, a.d, buffers.Kj, &tile.K_row);
        tile.Vj = load<in_place>(V, a.v_stride.row, tile.keys, a.d, buffers.Vj, &tile.V_row);
        return tile;
    };

    // 8. Qi, Oi, li, mi; 5. for j: the tiles of keys that some query of this tile sees; 13. O, l and m
    KeyTile tile = tile_at(seen.begin);
    start_rows<T, P>(a, t, lanes, buffers);
    prefetch<T>(a, next, next.b == t.b && next.h == t.h);
    const bool in_parts =
        std::is_same_v<T, float> && fits_amx<R> && uses_amx(a) && split_queries<P>(a, t, lanes, buffers);
    if (in_parts) begin_amx();
    for (; !empty(tile.keys); tile = tile_at(tile.keys.end)) {
        tile.in_parts = in_parts && split_keys(a.d, tile, buffers);
        for (int lane = 0; lane < lanes; lane += P) update<R>(a, band, t, lane, tile, buffers);
    }
    if (in_parts) end_amx();
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

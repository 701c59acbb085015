// cpu/amx.h: products of float32 matrices by AMX, the tile instructions of Intel's server CPUs since Sapphire Rapids.
//
// AMX multiplies matrices of bfloat16, 16 times as fast as AVX-512 multiplies float32. So a float32 is split into three
// bfloat16: its sign and exponent with the first 8 of its 24 bits, with the next 8, and with the last 8. Of the nine
// products of two split numbers six are added up; the other three are below 2^-21 of the whole.
//
// C(x, i) = sum over y of A(x, y) B(y, i) has A and B as tiles of 16 rows of 64 bytes: a row belongs to one x (a key, a
// query or a channel) and holds 32 of the y. The three tiles of a split operand follow each other, then comes the next
// y, then the next x. In a row y and y + 16 are neighbours, so that it is two vectors, packed:
//
//     row x of a tile of A:   y  y+16  y+1  y+17  ...  y+15  y+31        16 bits each
//     row y of a tile of B:   the pair (y, y+16) of x, then that of x + 1, ... x + 15
#pragma once

#include "cpu/tiles.h"

#if defined(__linux__) && defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 11
#define MINIMAL_ATTN_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace minimal_attn::cpu {

constexpr int x_tile = 16, y_tile = 32;         // rows of a tile, numbers of a row
constexpr int tile_size = x_tile * y_tile / 2;  // in floats, as are all sizes here
constexpr int split_size = 3 * tile_size;
constexpr int amx_P = 64;  // queries of a strip that AMX is used for

#ifdef MINIMAL_ATTN_AMX
// Whether the CPU has AMX, and Linux lets this process use it: that must be asked for.
inline bool has_amx() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool allowed = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("amx-bf16") &&
                                syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return allowed;
}

#pragma GCC push_options
#pragma GCC target("avx512f,amx-tile,amx-bf16")

// Between these two calls a thread has eight tile registers of 16 rows of 64 bytes. Here 0 to 3 hold C, 4 and 5 A, 6
// and 7 B.
[[gnu::noipa]] inline void begin_amx() {
    alignas(64) static const struct {
        uint8_t palette = 1, start_row = 0, zeros[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } registers;
    _tile_loadconfig(&registers);
}

[[gnu::noipa]] inline void end_amx() { _tile_release(); }

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

// C(x, i) = sum over y of A(x, y) B(y, i) of split operands, which have xs, is and ys tiles in x, i and y; xs and is
// are even. The small products come first, so that they are rounded while the sum is small. noipa, since the compiler
// isn't told that tile loads read memory.
[[gnu::noipa]] inline void multiply_split(int xs, int is, int ys, const float *A, const float *B, float *C,
                                          int64_t C_row) {
    constexpr int first = 0, second = tile_size, third = 2 * tile_size;
    const int64_t next = (int64_t)ys * split_size;
    for (int x = 0; x < xs; x += 2)
        for (int i = 0; i < is; i += 2) {
            const float *Ax = A + x * next, *Bi = B + i * next;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t y = 0; y < next; y += split_size) {
                load_A(Ax + y + third, next), load_B(Bi + y + first, next), multiply_tiles();
                load_A(Ax + y + second, next), multiply_tiles();
                load_B(Bi + y + second, next), multiply_tiles();
                load_A(Ax + y + first, next), multiply_tiles();
                load_B(Bi + y + third, next), multiply_tiles();
            }
            for (int64_t y = 0; y < next; y += split_size)
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
inline void multiply_split(int, int, int, const float *, const float *, float *, int64_t) {}
#endif

// Whether AMX is worth its splitting: with fewer rows or keys it isn't ((16, 12, 64, 64): 19 % slower than AVX-512).
inline bool is_worth_amx(const Attention &a) {
    const auto fits = [](int d) { return d >= y_tile && d % x_tile == 0; };
    return a.dtype == Dtype::float32 && fits(a.d) && fits(a.d_v) && rows_of_key_head(a) >= 128 && a.Nk >= 128;
}

}  // namespace minimal_attn::cpu

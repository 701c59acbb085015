// cpu/tiles.h: what a thread works on and where: its tile of queries, its buffers. The same for every instruction set.
#pragma once

#include "dropout.h"
#include "ranges.h"
#include "scores.h"

#include <algorithm>

namespace minimal_attn::cpu {

constexpr int Bc = 64;  // keys of a tile; tiles begin at multiples of it, whatever the mask

// So many products are summed in registers before the sum goes to memory. Short sums round less (32: an error of
// 2.7e-7, 64: 3.2e-7), but each costs a pass over Sij: 64 are 1 to 4 % faster than 32. With few keys the errors of
// scores are all there is, so they are summed in shorter pieces.
inline int channels_per_sum(const Attention &a) { return a.Nk < Bc ? 16 : 64; }

// li and Oi are sums over so many tiles of keys, then they are added to li_held and Oi_held. One float32 sum over all
// keys would lose a unit in the last place with every tile.
constexpr int tiles_per_sum = 32;

// Instruction sets differ in how many rows of Q a key head are few (decode.h), but none takes more than these.
constexpr int most_few_rows = 8, most_lanes = 16;

// The best instruction set that plans may choose, by name; AMX, which the backward pass has no code for, aside.
const char *vector_instructions();

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

inline int64_t rows_of_key_head(const Attention &a) { return a.Nq * (a.Hq / a.Hkv); }

// Query heads that share a key head share its tiles of keys: row i * group + g is query i of the g-th of these heads.
struct QueryTile {
    int64_t b, h, group;  // batch, key head, query heads of a key head
    int64_t first_row;
    int rows;
    int64_t all_rows;  // of the batch or, if tiles are cut at documents, of the document

    int query(int lane) const { return group == 1 ? first_row + lane : (first_row + lane) / group; }
    int64_t head(int lane) const { return group == 1 ? h : h * group + (first_row + lane) % group; }
};

// The keys that one of some queries sees, and those that all see. Tables of ranges know whole tiles of 64 queries.
inline TileKeys keys_of_queries(const AnyMask &mask, int i0, int i1) {
    if (!mask.ranges.rows) return {keys_of_any(mask, i0, i1), keys_of_all(mask, i0, i1)};
    TileKeys keys = {{0, 0}, kAllKeys};
    for (int i = i0; i < i1; ++i) add_row(keys, keys_of_row(mask, i));
    return keys;
}

template <class T>
T *row_of(const void *x, const Strides &stride, int64_t b, int64_t h, int64_t i) {
    return (T *)x + b * stride.batch + h * stride.head + i * stride.row;
}

// Columns of Qi and Kj, of Vj and Oi in a thread's buffers.
inline int64_t D_of(const Attention &a) { return round_up(a.d, 16); }
inline int64_t D_v_of(const Attention &a) { return round_up(a.d_v, 16); }

// A thread's memory, in float32. All but mi and li grow with D or D_v; KB for d = 64 and Br = 128:
//     Qi 32, Oi 32            (strip, channel, query)
//     rows 32                 (query, channel): Q before it is transposed, O after
//     Kj 16, Vj 16            (key, channel), where they are converted or copied
//     Sij up to 16            (key, query) of one strip, then Pij
//     mi, li 1
//     Oi_held 32, Oi_lost 32  beyond 32 tiles of keys: sums of Oi, and what their rounding lost
//     ..._split 48 24 24 24   with AMX: operands as three bfloat16 (amx.h), and products 16
struct Buffers {
    float *Qi, *Oi, *rows, *Kj, *Vj, *Sij, *mi, *li;
    // null where they aren't needed
    float *Oi_held = nullptr, *Oi_lost = nullptr, *li_held = nullptr, *li_lost = nullptr, *mi_held = nullptr;
    float *Qi_split = nullptr, *Kj_split = nullptr, *Vj_split = nullptr, *Pij_split = nullptr, *products = nullptr;
    int64_t size = 0;  // of all, in floats

    // memory is a multiple of 64 bytes, and so is the beginning of every buffer; null to know the size.
    Buffers(float *memory, const Attention &a, int Br, bool uses_amx) {
        constexpr int max_P = 64, split_d = 32;
        const int64_t D = D_of(a), D_v = D_v_of(a), lanes = round_up(Br, max_P);
        const int64_t D_split = round_up(a.d, split_d), D_v_split = round_up(a.d_v, split_d);
        const int64_t vectors = std::max<int64_t>(lanes, most_few_rows * most_lanes);  // decode.h has one for each row
        const auto take = [&](float *&buffer, int64_t floats) {
            buffer = memory ? memory + size : nullptr;
            size += floats;
        };
        take(Qi, lanes * D), take(Oi, lanes * D_v), take(rows, lanes * std::max(D, D_v));
        take(mi, vectors), take(li, vectors);
        take(Kj, Bc * D), take(Vj, Bc * D_v), take(Sij, Bc * max_P);
        if (a.Nk > Bc * tiles_per_sum) {
            take(Oi_held, lanes * D_v), take(Oi_lost, lanes * D_v);
            take(li_held, vectors), take(li_lost, vectors), take(mi_held, vectors);
        }
        if (uses_amx) {
            take(Qi_split, lanes * D_split * 3 / 2), take(Kj_split, Bc * D_split * 3 / 2);
            take(Vj_split, Bc * D_v_split * 3 / 2), take(Pij_split, Bc * max_P * 3 / 2);
            take(products, D_v_split * max_P);
        }
    }
};

}  // namespace minimal_attn::cpu

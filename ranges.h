// ranges.h: a mask that gives each query a range of keys of its own. A band (flash.h) is two numbers a batch; here are two
// numbers a query, in tables that make_ranges_* fills once a call, for all heads.
//
//     rows       what query i sees: its part of key_ranges, and of the band, seqlens_k and leftpad_k
//     tiles      of 64 queries: the keys that any of them sees (from the first to the last one), and that all see
//     meeting    of 64 keys: from the first to the last 128 queries that meet one of them
//     batches    whether the ranges grow: none begins or ends before that of the query before it, as in packed documents
//     seeing     of a key: which queries see it. If the ranges grow, these are an interval, without queries that see no key
//
// Queries meet a key that lies between the first and the last one that any of them sees. So the keys that a tile of
// queries meets have no gaps, whatever the ranges are: this fixes which blocks add to dQ, and in which order. Where ranges
// grow, tiles meet that have a visible score between them, and few others.
//
// Ranges has the functions of a band: keys_of_row, keys_of_any, keys_of_all, queries_of_any. A kernel that is compiled
// for both takes the type as `Mask`; Visible is either at run time.
#pragma once

#include <type_traits>
#include <utility>

#include "flash.h"

namespace minimal_attn {

constexpr int kRangeTile = 64;             // queries or keys
constexpr int kMeetTile = 2 * kRangeTile;  // queries, in `meeting`
// `rows` and `tiles` of a batch go on with queries that see nothing: no kernel's tile of queries reaches further.
constexpr int kRangePadding = 256;
constexpr Keys kAllKeys = {0, 1 << 30};  // beyond all numbers of keys

MINIMAL_ATTN_HOST_DEVICE inline int64_t range_tiles(const Attention &a) {
    return (a.Nq + kRangePadding) / kRangeTile + 1;
}
MINIMAL_ATTN_HOST_DEVICE inline int64_t range_rows(const Attention &a) { return range_tiles(a) * kRangeTile; }
// A multiple of 2: some kernels have tiles of 128 keys.
MINIMAL_ATTN_HOST_DEVICE inline int64_t range_key_tiles(const Attention &a) {
    return (a.Nk / (2 * kRangeTile) + 1) * 2;
}

// The mask of one batch.
struct Ranges {
    Keys keys;  // those of the band: outside of them memory may hold anything
    const Keys *rows;
    const TileKeys *tiles;
    const Interval *meeting;
    const BatchRanges *batch;
    const Interval *seeing;
};

MINIMAL_ATTN_HOST_DEVICE inline Ranges ranges_of(const Attention &a, int64_t b) {
    const RangeTables &t = a.ranges;
    return {band_of(a, b).keys,
            t.rows + b * range_rows(a),
            t.tiles + b * range_tiles(a),
            t.meeting + b * range_key_tiles(a),
            t.batches + b,
            t.seeing + b * range_key_tiles(a) * kRangeTile};
}

MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_row(const Ranges &ranges, int i) { return ranges.rows[i]; }

// From the first to the last of both.
MINIMAL_ATTN_HOST_DEVICE inline Interval hull(Interval x, Interval y) {
    if (empty(x)) return y;
    if (empty(y)) return x;
    return {x.begin < y.begin ? x.begin : y.begin, x.end > y.end ? x.end : y.end};
}

MINIMAL_ATTN_HOST_DEVICE inline Interval common(Interval x, Interval y) {
    return {x.begin > y.begin ? x.begin : y.begin, x.end < y.end ? x.end : y.end};
}

MINIMAL_ATTN_HOST_DEVICE inline bool meet(Interval x, Interval y) { return !empty(common(x, y)); }

// Both take whole tiles of queries: `any` may be more than i0 <= i < i1 see, `all` may be less.
MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_any(const Ranges &ranges, int i0, int i1) {
    Keys any = {0, 0};
    for (int tile = i0 / kRangeTile; tile * kRangeTile < i1; ++tile) any = hull(any, ranges.tiles[tile].any);
    return any;
}

MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_all(const Ranges &ranges, int i0, int i1) {
    Keys all = kAllKeys;
    for (int tile = i0 / kRangeTile; tile * kRangeTile < i1; ++tile) all = common(all, ranges.tiles[tile].all);
    return all;
}

// Keys that the kMeetTile queries around query i meet.
MINIMAL_ATTN_HOST_DEVICE inline Keys keys_that_meet(const Ranges &ranges, int i) {
    const int i0 = i / kMeetTile * kMeetTile;
    return keys_of_any(ranges, i0, i0 + kMeetTile);
}

// Whether the tile that has query i has one that sees nothing. `all` then ends at 0, and else not: each range ends later.
MINIMAL_ATTN_HOST_DEVICE inline bool has_blind_query(const Ranges &ranges, int i) {
    return ranges.tiles[i / kRangeTile].all.end == 0;
}

// Nq bounds the result, as it does for a band.
MINIMAL_ATTN_HOST_DEVICE inline Interval queries_of_any(const Ranges &ranges, int Nq, Keys keys) {
    Interval queries = {0, 0};
    for (int tile = keys.begin / kRangeTile; tile * kRangeTile < keys.end; ++tile)
        queries = hull(queries, ranges.meeting[tile]);
    return {queries.begin, queries.end < Nq ? queries.end : Nq};
}

MINIMAL_ATTN_HOST_DEVICE inline Ranges narrow(const Ranges &ranges) { return ranges; }

// For kernels that are compiled for both: Mask is Band or Ranges, Narrow<Mask> what narrow() makes of it.
template <class Mask>
MINIMAL_ATTN_HOST_DEVICE Mask mask_of(const Attention &a, int64_t b) {
    if constexpr (std::is_same_v<Mask, Ranges>)
        return ranges_of(a, b);
    else
        return band_of(a, b);
}
template <class Mask>
using Narrow = decltype(narrow(std::declval<Mask>()));

// use(a Mask), for the call's type of mask.
template <class Use>
auto with_mask(const Attention &a, const Use &use) {
    return a.key_ranges ? use(Ranges()) : use(Band());
}

// Either, chosen at run time: for the backends in which that costs nothing.
struct Visible : Band {
    Ranges ranges;  // its tables are null in a band
};

MINIMAL_ATTN_HOST_DEVICE inline Visible visible_of(const Attention &a, int64_t b) {
    return {band_of(a, b), a.key_ranges ? ranges_of(a, b) : Ranges{}};
}

MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_row(const Visible &visible, int i) {
    return visible.ranges.rows ? keys_of_row(visible.ranges, i) : keys_of_row((const Band &)visible, i);
}
MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_any(const Visible &visible, int i0, int i1) {
    return visible.ranges.rows ? keys_of_any(visible.ranges, i0, i1) : keys_of_any((const Band &)visible, i0, i1);
}
MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_all(const Visible &visible, int i0, int i1) {
    return visible.ranges.rows ? keys_of_all(visible.ranges, i0, i1) : keys_of_all((const Band &)visible, i0, i1);
}

// What the tables hold. The last two are for make_ranges_* alone.
MINIMAL_ATTN_HOST_DEVICE inline Keys range_of_row(const Attention &a, const Band &band, int64_t b, int i) {
    if (i >= a.Nq) return {0, 0};
    const int *const range = a.key_ranges + b * a.key_ranges_stride + 2 * i;
    const Keys seen = keys_of_row(band, i);
    const int begin = clamp(range[0], seen.begin, seen.end);
    return {begin, clamp(range[1], begin, seen.end)};
}

// Makes row one of those of a tile.
MINIMAL_ATTN_HOST_DEVICE inline void add_row(TileKeys &tile, Keys row) {
    tile.any = hull(tile.any, row), tile.all = common(tile.all, empty(row) ? Keys{0, 0} : row);
}

// The tables' memory, in bytes. With `memory` it also says where in it they are.
inline int64_t place_ranges(Attention &a, void *memory) {
    char *next = (char *)memory;
    const auto take = [&](auto *&table, int64_t count) {
        table = (std::remove_reference_t<decltype(table)>)next;
        next += count * sizeof(*table);
    };
    take(a.ranges.rows, a.B * range_rows(a));
    take(a.ranges.seeing, a.B * range_key_tiles(a) * kRangeTile);
    take(a.ranges.meeting, a.B * range_key_tiles(a));
    take(a.ranges.tiles, a.B * range_tiles(a));
    take(a.ranges.batches, a.B);
    return next - (char *)memory;
}

// Fill the tables. On a GPU a backward pass has more of them; make_ranges returns null, or why it hasn't launched.
void make_ranges_cpu(const Attention &a);
const char *make_ranges(const Attention &a, bool backward, CUstream_st *stream);

}  // namespace minimal_attn

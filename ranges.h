// ranges.h: a mask that gives each query a range of keys of its own, as key_ranges and cu_seqlens do. A band (flash.h)
// is two numbers a batch. These are two numbers a query, in tables that make_ranges_cuda (ranges.cu) or make_ranges_cpu
// (cpu/ranges.cpp) fills once a call, for all heads.
//
//     rows       of a query: the keys that it sees, after all parts of the mask. A blind query sees none
//     tiles      of 64 queries: `any`, from the first to the last key that one of them sees; `all`, those that all see;
//                `grows`, on a GPU: no range begins or ends before that of the query before it
//     meeting    of 64 keys: from the first to the last 128 queries that meet one of them
//     batches    whether all ranges grow, as those of packed documents; whether a query is blind
//     seeing     of a key, if the ranges grow: the queries that see it
//     positions  of a query, with ALiBi (scores.h): where it is among the keys
//     mask_tables   of a bool mask that heads share: which tiles of 128 queries x 128 keys it hides, shows as a whole,
//                or in part. `rows` begin and end with keys that it shows, and no batch counts as growing
//
// A tile of queries meets the keys from the first to the last one that any of its queries sees. So these have no gaps,
// whatever the ranges are: this fixes which blocks add to dQ, and in which order. docs/ranges.md has a drawing. But
// kernels that skip tiles of a mask meet those that `mask_tables` shows.
//
// Ranges has the functions of a band: keys_of_row, keys_of_any, keys_of_all, queries_of_any. A kernel that is compiled
// for both takes the type as `Mask`; AnyMask is either at run time.
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
    Keys keys;  // of the batch, or of all documents: outside of them memory may hold anything
    const Keys *rows;
    const TileKeys *tiles;
    const Interval *meeting;
    const BatchFlags *batch;
    const Interval *seeing;
};

// From the first to the last key of the documents.
MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_documents(const Attention &a) {
    const int begin = clamp(a.cu_seqlens_k[0], 0, a.Nk);
    return {begin, clamp(a.cu_seqlens_k[a.documents], begin, a.Nk)};
}

MINIMAL_ATTN_HOST_DEVICE inline Ranges ranges_of(const Attention &a, int64_t b) {
    const RangeTables &t = a.ranges;
    return {a.cu_seqlens_k ? keys_of_documents(a) : band_of(a, b).keys,
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

MINIMAL_ATTN_HOST_DEVICE inline Interval intersection(Interval x, Interval y) {
    return {x.begin > y.begin ? x.begin : y.begin, x.end < y.end ? x.end : y.end};
}

MINIMAL_ATTN_HOST_DEVICE inline bool meet(Interval x, Interval y) { return !empty(intersection(x, y)); }

// Both take whole tiles of queries: `any` may be more than i0 <= i < i1 see, `all` may be less.
MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_any(const Ranges &ranges, int i0, int i1) {
    Keys any = {0, 0};
    for (int tile = i0 / kRangeTile; tile * kRangeTile < i1; ++tile) any = hull(any, ranges.tiles[tile].any);
    return any;
}

MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_all(const Ranges &ranges, int i0, int i1) {
    Keys all = kAllKeys;
    for (int tile = i0 / kRangeTile; tile * kRangeTile < i1; ++tile) all = intersection(all, ranges.tiles[tile].all);
    return all;
}

// Keys that the kMeetTile queries around query i meet. That is the largest tile of queries of a backward pass: all
// roles and kernels must agree on what a query meets.
MINIMAL_ATTN_HOST_DEVICE inline Keys keys_met(const Ranges &ranges, int i) {
    const int i0 = i / kMeetTile * kMeetTile;
    return keys_of_any(ranges, i0, i0 + kMeetTile);
}

// Whether one of the 64 queries around i is blind. Then `all` ends at 0; else it ends later, as each range does.
MINIMAL_ATTN_HOST_DEVICE inline bool tile_has_blind_query(const Ranges &ranges, int i) {
    return ranges.tiles[i / kRangeTile].all.end == 0;
}

// With a band the blind queries are the first and the last ones, and kernels don't ask.
MINIMAL_ATTN_HOST_DEVICE inline bool tile_has_blind_query(const BandOf<int> &, int) { return false; }

// ------------------------------------------------------------------------------ tiles of a mask

constexpr int kMaskTile = kMeetTile;  // queries, and keys
enum MaskTile : unsigned char { hides_all, hides_some, shows_all };

MINIMAL_ATTN_HOST_DEVICE inline bool has_mask_tables(const Attention &a) {
    return a.is_general && a.terms.mask && (a.terms.mask_stride.head == 0 || a.Hq == 1);
}
MINIMAL_ATTN_HOST_DEVICE inline int mask_tiles(int n) { return (n + kMaskTile - 1) / kMaskTile; }
MINIMAL_ATTN_HOST_DEVICE inline int words_of_shown(const Attention &a) { return (mask_tiles(a.Nk) + 63) / 64; }

// Of the 128 queries around i.
MINIMAL_ATTN_HOST_DEVICE inline const ShownTiles *shown_tiles(const Attention &a, int64_t b, int i) {
    return a.mask_tables.shown + (b * mask_tiles(a.Nq) + i / kMaskTile) * words_of_shown(a);
}

// Whether kernels that skip tiles compute the one of query i and key j.
MINIMAL_ATTN_HOST_DEVICE inline bool is_shown(const Attention &a, int64_t b, int i, int j) {
    const int tile = j / kMaskTile;
    return !a.mask_tables.shown || shown_tiles(a, b, i)[tile / 64].shown >> tile % 64 & 1;
}

// Whether the mask shows all pairs of that tile.
MINIMAL_ATTN_HOST_DEVICE inline bool is_shown_whole(const Attention &a, int64_t b, int i, int j) {
    const int tile = j / kMaskTile;
    return a.mask_tables.shown && !(shown_tiles(a, b, i)[tile / 64].partial >> tile % 64 & 1);
}

#ifdef __CUDACC__
// A tile of keys, from j0 on, and whether the mask shows all of it. In one register.
struct ShownTile {
    int bits;
    __device__ ShownTile(int j0 = 0, bool is_whole = false) : bits(2 * j0 + is_whole) {}
    __device__ int j0() const { return bits >> 1; }
    __device__ bool is_whole() const { return bits & 1; }
};

// The first of the tiles from key j0 on that is shown, or one beyond all keys.
__device__ inline ShownTile next_shown(const Attention &a, int64_t b, int i, int j0) {
    const ShownTiles *const words = shown_tiles(a, b, i);
    const int tile = j0 / kMaskTile, end = words_of_shown(a);
    uint64_t from_tile = ~uint64_t(0) << tile % 64;
    for (int n = tile / 64; n < end; ++n, from_tile = ~uint64_t(0)) {
        const ulonglong2 word = *(const ulonglong2 *)&words[n];
        if (const uint64_t found = word.x & from_tile) {
            const int bit = __ffsll(found) - 1;
            return {(64 * n + bit) * kMaskTile, !(word.y >> bit & 1)};
        }
    }
    return {kAllKeys.end - 1};
}

// How many of the tiles `tile` <= n < `end` are shown.
__device__ inline int count_shown(const Attention &a, int64_t b, int i, int tile, int end) {
    const ShownTiles *const words = shown_tiles(a, b, i);
    int count = 0;
    for (int n = tile / 64; 64 * n < end; ++n) {
        uint64_t found = words[n].shown;
        if (64 * n < tile) found &= ~uint64_t(0) << (tile - 64 * n);
        if (64 * n + 64 > end) found &= ~(~uint64_t(0) << (end - 64 * n));
        count += __popcll(found);
    }
    return count;
}
#endif

// Nq bounds the result, as it does for a band.
MINIMAL_ATTN_HOST_DEVICE inline Interval queries_of_any(const Ranges &ranges, int Nq, Keys keys) {
    Interval queries = {0, 0};
    for (int tile = keys.begin / kRangeTile; tile * kRangeTile < keys.end; ++tile)
        queries = hull(queries, ranges.meeting[tile]);
    return {queries.begin, queries.end < Nq ? queries.end : Nq};
}

// The mask of general kernels, in which scores change, too (scores.h). MINIMAL_ATTN_KERNELS=plain builds none
// (setup.py).
struct General : Ranges {};
#ifdef MINIMAL_ATTN_PLAIN
constexpr bool kHasGeneral = false;
#else
constexpr bool kHasGeneral = true;
#endif
// In hopper/, of general kernels that add terms or drop weights. There General is of those with softcap alone.
struct WithTerms : General {};
template <class Mask>
constexpr bool kIsGeneral = std::is_base_of_v<General, Mask>;
template <class Mask>
constexpr bool kHasTerms = std::is_same_v<Mask, WithTerms>;

MINIMAL_ATTN_HOST_DEVICE inline Ranges narrow(const Ranges &ranges) { return ranges; }
MINIMAL_ATTN_HOST_DEVICE inline General narrow(const General &ranges) { return ranges; }

// Of all batches, for a kernel that another one replaces where some don't grow.
struct GrowingRanges : Ranges {};
template <class Mask>
constexpr bool kIsRanges = std::is_base_of_v<Ranges, Mask>;

// For kernels that are compiled for both: Mask is Band or Ranges, Narrow<Mask> what narrow() makes of it. In hopper/
// Mask is the narrow one.
template <class Mask>
MINIMAL_ATTN_HOST_DEVICE Mask mask_of(const Attention &a, int64_t b) {
    if constexpr (kIsRanges<Mask>)
        return {ranges_of(a, b)};
    else
        return band_of(a, b);
}
template <class Mask>
using Narrow = decltype(narrow(std::declval<Mask>()));

// use(a Mask), for the call's type of mask.
template <class Use>
auto with_mask(const Attention &a, const Use &use) {
    return has_ranges(a) ? use(Ranges()) : use(Band());
}

// The same for kernels that have a general form.
template <class Use>
auto with_mask_and_scores(const Attention &a, const Use &use) {
    if constexpr (kHasGeneral)
        if (a.is_general) return use(General());
    return with_mask(a, use);
}

// Either, chosen at run time: for the backends in which that costs nothing.
struct AnyMask : Band {
    Ranges ranges;  // its tables are null in a band
};

MINIMAL_ATTN_HOST_DEVICE inline AnyMask any_mask_of(const Attention &a, int64_t b) {
    if (!has_ranges(a)) return {band_of(a, b), {}};
    const Ranges ranges = ranges_of(a, b);
    return {{ranges.keys}, ranges};
}

MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_row(const AnyMask &mask, int i) {
    return mask.ranges.rows ? keys_of_row(mask.ranges, i) : keys_of_row((const Band &)mask, i);
}
MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_any(const AnyMask &mask, int i0, int i1) {
    return mask.ranges.rows ? keys_of_any(mask.ranges, i0, i1) : keys_of_any((const Band &)mask, i0, i1);
}
MINIMAL_ATTN_HOST_DEVICE inline Keys keys_of_all(const AnyMask &mask, int i0, int i1) {
    return mask.ranges.rows ? keys_of_all(mask.ranges, i0, i1) : keys_of_all((const Band &)mask, i0, i1);
}

// The keys of document n that count for its mask, and those that any query may see.
MINIMAL_ATTN_HOST_DEVICE inline Keys used_keys(const Attention &a, int n, Keys keys) {
    if (a.seqused_k) keys.end = keys.begin + clamp(a.seqused_k[n], 0, keys.end - keys.begin);
    return keys;
}
MINIMAL_ATTN_HOST_DEVICE inline Keys first_keys(const Attention &a, int n, Keys keys) {
    if (a.prefix_k) keys.end = keys.begin + clamp(a.prefix_k[n], 0, keys.end - keys.begin);
    return keys;
}

// The band of query i's document, with these bounds. i and j count from the first token of all. cu_seqlens of any
// values are safe.
MINIMAL_ATTN_HOST_DEVICE inline Band band_of_document(const Attention &a, int i, int64_t band_first,
                                                      int64_t band_last) {
    int n = 0;  // the first document that ends behind i
    for (int end = a.documents; n < end;) {
        const int middle = n + (end - n) / 2;
        if (a.cu_seqlens_q[middle + 1] <= i)
            n = middle + 1;
        else
            end = middle;
    }
    const Keys all = keys_of_documents(a);                    // no query sees other keys, whatever the values are
    if (n == a.documents) return {{all.end, all.end}, 0, 0};  // behind the last document: so ranges still grow
    if (a.cu_seqlens_q[n] > i) return {};
    const int begin = clamp(a.cu_seqlens_k[n], all.begin, all.end);
    const Keys keys = used_keys(a, n, {begin, clamp(a.cu_seqlens_k[n + 1], begin, all.end)});
    const int64_t position = keys.end - clamp(a.cu_seqlens_q[n + 1], 0, a.Nq);  // the last query sees the last key
    return {first_keys(a, n, keys), position + band_first, position + band_last};
}

// Where query i is among the keys, for ALiBi. 2^30 is beyond all keys.
MINIMAL_ATTN_HOST_DEVICE inline int position_of_query(const Attention &a, int64_t b, int i) {
    const int64_t position =
        a.cu_seqlens_q ? band_of_document(a, i, 0, 0).first : position_of(a, b, end_of_keys(a, b)) + a.terms.offset;
    return (int)clamp(i + position, -(int64_t)kAllKeys.end, (int64_t)kAllKeys.end);
}

// What query i sees. Only make_ranges_* call this and add_row.
MINIMAL_ATTN_HOST_DEVICE inline Keys range_of_row(const Attention &a, const Band &batch, int64_t b, int i) {
    if (i >= a.Nq) return {0, 0};
    const Keys seen = keys_of_row(a.cu_seqlens_q ? band_of_document(a, i, a.first, a.last) : batch, i);
    if (!a.key_ranges) return seen;
    const int *const range = a.key_ranges + b * a.key_ranges_stride + 2 * i;
    const int begin = clamp(range[0], seen.begin, seen.end);
    return {begin, clamp(range[1], begin, seen.end)};
}

// Adds a row's range to its tile's entry.
MINIMAL_ATTN_HOST_DEVICE inline void add_row(TileKeys &tile, Keys row) {
    tile.any = hull(tile.any, row), tile.all = intersection(tile.all, empty(row) ? Keys{0, 0} : row);
}

// The bytes of the tables. With `memory`, not null, it also sets where in it they are. `rows` and `seeing` come first:
// kernels read 16 and 8 bytes of them at a time. `batches`, of two bytes each, come last.
inline int64_t place_ranges(Attention &a, bool backward, char *memory) {
    int64_t bytes = 0;
    const auto take = [&](auto *&table, int64_t count) {
        if (memory) table = (std::remove_reference_t<decltype(table)>)(memory + bytes);
        bytes += count * sizeof(*table);
    };
    take(a.ranges.rows, a.B * range_rows(a));
    if (backward) take(a.ranges.seeing, a.B * range_key_tiles(a) * kRangeTile);
    if (backward) take(a.ranges.meeting, a.B * range_key_tiles(a));
    take(a.ranges.tiles, a.B * range_tiles(a));
    if (a.terms.alibi_slopes) take(a.terms.positions, a.B * range_rows(a));
    const int64_t groups = has_mask_tables(a) ? a.B * mask_tiles(a.Nq) : 0;
    bytes = (bytes + 15) / 16 * 16;  // kernels read a ShownTiles at a time
    if (a.mask_tables.skips_tiles) take(a.mask_tables.shown, groups * words_of_shown(a));
    take(a.mask_tables.tiles, groups * mask_tiles(a.Nk));
    bytes = (bytes + 1) / 2 * 2;  // for `batches`
    if (backward) take(a.ranges.batches, a.B);
    return bytes;
}

// Fill the tables. make_ranges_cuda returns null, or why it hasn't launched.
void make_ranges_cpu(const Attention &a);
const char *make_ranges_cuda(const Attention &a, bool backward, CUstream_st *stream);

// Sorts each batch's tiles of Br queries by the keys that they meet, those with the most first: order[b * Tr + n] is
// batch b's n-th one. Up to kMostSorted: counting takes the square of the number.
constexpr int kMostSorted = 1 << 13;
const char *sort_tiles_cuda(const Attention &a, int Br, int *order, CUstream_st *stream);

// key_ranges of B x N rows of a mask of n keys: those that are `visible`. False if a row's are no interval, or if
// others aren't `hidden`. T is an unsigned integer of the size of the mask's type.
template <class T>
bool find_ranges_cpu(const T *mask, T hidden, T visible, int64_t batch_stride, int64_t row_stride, int64_t B, int64_t N,
                     int n, int *ranges);

// Runs after a forward kernel: computes the rows of o again that a hidden Inf or NaN has reached (isolate.cu). Each
// `rows_alike` rows, a divisor of 64, have met the same tiles of V. On a CPU isolate_row (cpu/rows.h) does it.
const char *isolate_rows_cuda(const Attention &a, int rows_alike, CUstream_st *stream);

}  // namespace minimal_attn

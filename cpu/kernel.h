// cpu/kernel.h: Algorithm 1 for one tile of queries. forward.cpp includes it once for each instruction set, in a
// namespace that gives
//     W             lanes of a vector
//     max_R         vectors of a strip
//     sums          sums of a product that stay in registers
//     few_rows      rows of Q a key head up to which decode.h is faster
//
// A query is a lane, as it is a thread on a GPU: scores and output are kept transposed. So the max and the sum of a row
// need no shuffles, mi, li and alpha are vectors, and both products have one form, which reads K and V where they are:
//
//     Sij(j, i)  = sum over channels c of Kj(j, c) Qi(c, i)
//     Oi(c, i)  += sum over keys j of     Vj(j, c) Pij(j, i)
//
//                      P queries                               P queries
//                   +------------+                          +------------+
//       channels c  |     Qi     |                  keys j  |    Pij     |
//                   +------------+                          +------------+
//      channels c         |                     keys j            |
//     +----------+  +-----v------+            +----------+  +-----v------+
//  j  |    Kj    |->|    Sij     |         c  |  Vj^T    |->|     Oi     |      (V is read along c, as it lies)
//     +----------+  +------------+            +----------+  +------------+
//       broadcast      vectors                  broadcast      vectors
//
// R vectors are a strip, what a warp is on a GPU: its P = R * W queries go through a tile of keys together.

namespace {

static_assert(few_rows <= most_few_rows && W <= most_lanes);  // the size of Buffers

#include "cpu/vector.h"
#include "cpu/terms.h"
#include "cpu/drop.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"
#include "cpu/split.h"
#include "cpu/decode.h"

// The rows of a tile from `lane` on.
template <int R>
struct Strip {
    static constexpr int P = R * W;
    int lane;
    TileKeys seen;
    float *Qi, *Oi, *mi, *li;

    Strip(const Attention &a, const AnyMask &mask, const QueryTile &t, int lane, const Buffers &buffers) : lane(lane) {
        const int first = t.query(lane), end = t.query(std::min(t.rows, lane + P) - 1) + 1;
        seen = keys_of_queries(mask, first, end);
        Qi = buffers.Qi + lane * D_of(a), Oi = buffers.Oi + lane * D_v_of(a);
        mi = buffers.mi + lane, li = buffers.li + lane;
    }
};

// -inf for the scores of hidden keys: each lane compares j with the bounds of its own query.
template <int R>
void hide_keys(const AnyMask &mask, const QueryTile &t, const Strip<R> &strip, Keys keys, float *Sij) {
    VecInt begin[R], end[R];  // the keys of each lane's query
    for (int lane = 0; lane < R * W; ++lane) {
        const Keys seen = keys_of_row(mask, t.query(strip.lane + lane));
        begin[lane / W][lane % W] = seen.begin, end[lane / W][lane % W] = seen.end;
    }
    for (int j = keys.begin; j < keys.end; ++j, Sij += R * W)
        for (int r = 0; r < R; ++r) {
            Vec &s = vec(Sij + r * W);
            s = (j < begin[r]) | (j >= end[r]) ? Vec{} - INFINITY : s;
        }
}

// Step 9: Sij = softmax_scale Qi Kj^T for the keys of the tile from `skip` on, n of them.
template <int R>
void compute_S(const Attention &a, const Strip<R> &strip, const KeyTile &tile, int skip, int n, bool with_amx,
               const Buffers &buffers) {
    constexpr int P = R * W, C = sums / R;
    float *Sij = buffers.Sij;
    if (with_amx) {
        const int tiles_of_d = round_up(a.d, y_tile) / y_tile, tiles_of_n = round_up(n, y_tile) / y_tile;
        const float *Qi = buffers.Qi_split + strip.lane * tiles_of_d * y_tile * 3 / 2;
        multiply_split(2 * tiles_of_n, R, tiles_of_d, buffers.Kj_split, Qi, Sij, P);
        for (int64_t at = 0; at < n * P; at += W) vec(Sij + at) *= scale_of_products(a);
        return;
    }
    const float *Kj = tile.Kj + skip * tile.K_row;
    const int channels = channels_per_sum(a);
    for (int c = 0; c < a.d; c += channels) {
        const bool is_last = c + channels >= a.d;
        const float scale = is_last ? scale_of_products(a) : 1.f;  // of the whole sum: a part may overflow
        const auto add = [&](int j, int r, Vec sum) {
            Vec &s = vec(Sij + j * P + r * W);
            s = scale * ((c == 0 ? Vec{} : s) + sum);
        };
        multiply<R, C>(0, n, std::min(channels, a.d - c), Kj + c, tile.K_row, 1, strip.Qi + c * P, P, add);
    }
}

// Step 12: Oi = alpha Oi + Pij Vj; the division by li waits for the end of the row.
template <int R>
void add_PV(const Attention &a, const Strip<R> &strip, const KeyTile &tile, int skip, int n, bool with_amx,
            const Vec (&alpha)[R], const Buffers &buffers) {
    constexpr int P = R * W, C = sums / R;
    const auto add = [&](int c, int r, Vec sum) {
        Vec &o = vec(strip.Oi + c * P + r * W);
        o = alpha[r] * o + sum;
    };
    if (with_amx) {
        const int tiles_of_d = round_up(a.d_v, y_tile) / y_tile, tiles_of_n = round_up(n, y_tile) / y_tile;
        split_P<R>(n, buffers);
        multiply_split(2 * tiles_of_d, R, tiles_of_n, buffers.Vj_split, buffers.Pij_split, buffers.products, P);
        for (int c = 0; c < a.d_v; ++c)
            for (int r = 0; r < R; ++r) add(c, r, vec(buffers.products + c * P + r * W));
        return;
    }
    multiply<R, C>(0, a.d_v, n, tile.Vj + skip * tile.V_row, 1, tile.V_row, buffers.Sij, P, add);
}

template <int R>
void hold_strip(const Strip<R> &strip, int64_t D_v, const Buffers &buffers) {
    const int lane = strip.lane;
    hold_sums<R>(D_v, strip.mi, strip.li, strip.Oi, buffers.mi_held + lane, buffers.li_held + lane,
                 buffers.li_lost + lane, buffers.Oi_held + lane * D_v, buffers.Oi_lost + lane * D_v);
}

// Steps 9 to 12 for one strip and one tile of keys. The result depends on the strip's rows and on the tile's place, not
// on other strips. So it has the same bits for any Br and any number of threads.
template <int R>
[[gnu::noinline]] void update(const Attention &a, const AnyMask &mask, const QueryTile &t, const Strip<R> &strip,
                              KeyTile tile, bool with_amx, const Buffers &buffers) {
    Keys keys = intersection(tile.keys, strip.seen.any);
    if (empty(keys)) return;
    if (with_amx) keys = tile.keys;  // split as a whole
    const int skip = keys.begin - tile.keys.begin, n = keys.end - keys.begin;
    const TermsOfTile terms = terms_of_tile(a, t, strip.lane, R * W, keys.begin, n);
    if (terms != TermsOfTile::hide) {
        compute_S(a, strip, tile, skip, n, with_amx, buffers);
        if (has_softcap(a)) change_scores(a, n * R * W, buffers.Sij);
        if (terms == TermsOfTile::are_zero)
            for (int64_t at = 0; at < n * R * W; at += W) vec(buffers.Sij + at) *= a.terms.unit;
        else if (has_terms(a))
            add_terms<R>(a, t, strip.lane, keys.begin, n, buffers.Sij);
        if (keys.begin < strip.seen.all.begin || keys.end > strip.seen.all.end)
            hide_keys(mask, t, strip, keys, buffers.Sij);
        Vec alpha[R];
        update_softmax<R>(n, buffers.Sij, strip.mi, strip.li, alpha);
        if (has_dropout(a)) drop<R>(a, t, strip.lane, keys.begin, n, buffers.Sij);
        add_PV(a, strip, tile, skip, n, with_amx, alpha, buffers);
    }
    if (buffers.Oi_held && tile.ends_sum()) hold_strip(strip, D_v_of(a), buffers);
}

// Step 8: Qi, and Oi = 0, li = 0, mi = -inf.
template <int P>
void start_rows(const Attention &a, const QueryTile &t, int lanes, const Buffers &buffers) {
    const int64_t D = D_of(a), D_v = D_v_of(a);
    load_queries(a, t, lanes, buffers);
    for (int i = 0; i < lanes; i += W)
        for (int c = 0; c < D; c += W)
            transpose(buffers.rows + i * D + c, D, buffers.Qi + i / P * P * D + c * P + i % P, P);
    std::fill(buffers.Oi, buffers.Oi + lanes * D_v, 0.f);
    std::fill(buffers.li, buffers.li + lanes, 0.f);
    std::fill(buffers.mi, buffers.mi + lanes, -INFINITY);
    if (buffers.Oi_held) start_held_sums(lanes, lanes * D_v, buffers);
}

// Step 13.
template <int P>
void end_rows(const Attention &a, const AnyMask &mask, const QueryTile &t, int lanes, const Buffers &buffers) {
    const int64_t D_v = D_v_of(a);
    const float *Oi = buffers.Oi_held ? buffers.Oi_held : buffers.Oi,
                *li = buffers.Oi_held ? buffers.li_held : buffers.li;
    for (int i = 0; i < lanes; i += W)
        for (int c = 0; c < D_v; c += W)
            transpose(Oi + i / P * P * D_v + c * P + i % P, P, buffers.rows + i * D_v + c, D_v);
    for (int lane = 0; lane < t.rows; ++lane) {
        const bool sees_key = !empty(keys_of_row(mask, t.query(lane)));
        end_row(a, t, lane, sees_key, li[lane], buffers.mi[lane], buffers.rows + lane * D_v);
    }
}

// All of Algorithm 1 for a tile of queries. `next` is the tile that this thread probably takes next.
template <int R = max_R>
void forward_many(const Attention &a, const QueryTile &t, const QueryTile &next, const Buffers &buffers) {
    if constexpr (R > 1)
        if (t.rows <= R / 2 * W) return forward_many<R / 2>(a, t, next, buffers);  // a thinner strip will do
    constexpr int P = R * W;
    constexpr int max_strips = 256 / P;  // of the most rows that plan_cpu gives a tile
    const int lanes = round_up(t.rows, P);
    const AnyMask mask = any_mask_of(a, t.b);
    const Keys seen = keys_of_queries(mask, t.query(0), t.query(t.rows - 1) + 1).any;
    // For few queries memory is what takes time, and it is faster if rows are read whole: by a copy.
    const bool in_place = R > 1;

    // 8. Qi, Oi, li, mi
    start_rows<P>(a, t, lanes, buffers);
    prefetch_tile(a, next, next.b == t.b && next.h == t.h);
    bool splits_well[max_strips] = {}, any_splits = false;
    if constexpr (fits_amx<R>)
        for (int lane = 0; lane < lanes && buffers.Qi_split; lane += P) {
            // The strip of fewer rows would be thinner, if its tile had these alone: it must have the same bits.
            splits_well[lane / P] = t.rows - lane > P / 2 && split_queries<P>(a, lane, buffers);
            any_splits |= splits_well[lane / P];
        }
    if (any_splits) begin_amx();

    std::vector<Strip<R>> strips;
    strips.reserve(lanes / P);
    for (int lane = 0; lane < lanes; lane += P) strips.emplace_back(a, mask, t, lane, buffers);
    // 5. for j: the tiles of keys that a query of this tile sees
    const Keys wanted = any_splits ? Keys{std::max(mask.keys.begin, seen.begin / Bc * Bc),
                                          std::min(mask.keys.end, (int)round_up(seen.end, Bc))}
                                   : seen;
    for (int j = wanted.begin; !empty(seen) && j < wanted.end;) {
        KeyTile tile = load_tile(a, t, wanted, j, in_place, true, buffers);
        if constexpr (fits_amx<R>) tile.is_split = any_splits && split_keys(a, tile, buffers);
        for (const Strip<R> &strip : strips)
            update(a, mask, t, strip, tile, tile.is_split && splits_well[strip.lane / P], buffers);
        j = tile.keys.end;
    }
    if (any_splits) end_amx();

    // 13. O, l and m
    if (buffers.Oi_held)
        for (const Strip<R> &strip : strips) hold_strip(strip, D_v_of(a), buffers);
    end_rows<P>(a, mask, t, lanes, buffers);
}

}  // namespace

inline void forward(const Attention &a, const QueryTile &t, const QueryTile &next, const Buffers &buffers) {
    if (t.all_rows <= few_rows)
        forward_few(a, t, next, buffers);
    else
        forward_many(a, t, next, buffers);
}

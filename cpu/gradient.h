// cpu/gradient.h: Algorithm 4 for one tile of keys. backward.cpp includes it once for each instruction set, in a
// namespace that gives W, max_R and sums as kernel.h has them.
//
// Each lane has a key: scores are (query, key). Since lse and D are known, no maximum or sum over a row is needed. All
// products read their right operand by rows. Only Kj and Vj are transposed, once a tile:
//
//     Pij(i, j)   = exp(scale sum over c of Qi(i, c) Kj^T(c, j) - lse(i))
//     dSij(i, j)  = scale Pij(i, j) (sum over c of dOi(i, c) Vj^T(c, j) - D(i))
//     dVj(j, c)  += sum over i of Pij(i, j) dOi(i, c)
//     dKj(j, c)  += sum over i of dSij(i, j) Qi(i, c)
//     dQi(i, c)  += sum over j of dSij(i, j) Kj(j, c)

namespace {

#include "cpu/vector.h"
#include "cpu/terms.h"
#include "cpu/drop.h"

// C(x, column) = sum over y < n of A(x, y) B(y, column), plus C's old value if it `adds`, for x < rows. `columns` is a
// multiple of W. A_x, A_y, B_y and C_x are strides. All products are calls of this one function, which is long to
// compile.
template <int R = max_R>
[[gnu::noinline]] void multiply_matrices(int rows, int columns, int n, const float *A, int64_t A_x, int64_t A_y,
                                         const float *B, int64_t B_y, float *C, int64_t C_x, bool adds) {
    int first = 0;
    for (; first + R * W <= columns; first += R * W)
        multiply<R, sums / R>(0, rows, n, A, A_x, A_y, B + first, B_y, [&](int x, int r, Vec sum) {
            Vec &c = vec(C + x * C_x + first + r * W);
            c = adds ? c + sum : sum;
        });
    if constexpr (R > 1)
        if (first < columns)
            multiply_matrices<R / 2>(rows, columns - first, n, A, A_x, A_y, B + first, B_y, C + first, C_x, adds);
}

// scores(x, column) = sum over d channels c of A(x, c) B_T(c, column), with Bc scores a row. Sums are as short as in
// the forward pass, for the same bits.
inline void multiply_channels(const Attention &a, int d, int rows, int columns, const float *A, const float *B_T,
                              float *scores) {
    const int channels = channels_per_sum(a);
    for (int c = 0; c < d; c += channels)
        multiply_matrices(rows, columns, std::min(channels, d - c), A + c, round_up(d, 16), 1, B_T + c * Bc, Bc, scores,
                          Bc, c > 0);
}

// A row as float32, with zeros up to D.
template <class T>
void load_row(const T *row, int d, int64_t D, float *to) {
    convert(row, to, d);
    std::fill(to + d, to + D, 0.f);
}

template <class T>
void store_row(const float *row, int d, void *tensor, const Strides &stride, int64_t b, int64_t h, int64_t i,
               Dtype dtype) {
    if (dtype == Dtype::float32)
        convert(row, row_of<float>(tensor, stride, b, h, i), d);
    else
        convert(row, row_of<T>(tensor, stride, b, h, i), d);
}

// Step 7: a tile of K or V, and its transpose. Rows of keys that don't count are zeros.
template <class T>
void load_keys(int d, const GradientTile &t, Keys keys, const void *x, const Strides &stride, float *rows,
               float *transposed) {
    const int64_t D = round_up(d, 16);
    std::fill(rows, rows + (keys.begin - t.j0) * D, 0.f);
    std::fill(rows + (keys.end - t.j0) * D, rows + Bc * D, 0.f);
    for (int64_t j = keys.begin; j < keys.end; ++j)
        load_row(row_of<const T>(x, stride, t.b, t.h, j), d, D, rows + (j - t.j0) * D);
    for (int64_t j = 0; j < Bc; j += W)
        for (int64_t c = 0; c < D; c += W) transpose(rows + j * D + c, D, transposed + c * Bc + j, Bc);
}

// Step 10: Qi or dOi. Rows that see no key are zeros, whatever the tensor holds.
template <class T>
void load_queries(int d, const AnyMask &mask, const QueryTile &t, const GradientRow *rows, const void *x,
                  const Strides &stride, float *to) {
    const int64_t D = round_up(d, 16);
    for (int lane = 0; lane < t.rows; ++lane) {
        const int64_t i = t.query(lane);
        const int columns = empty(keys_of_row(mask, i)) || rows[lane].lse == INFINITY ? 0 : d;
        load_row(row_of<const T>(x, stride, t.b, t.head(lane), i), columns, D, to + lane * D);
    }
}

// Calls use(lane, begin, end) for each row of a tile: of the keys from j0 on, it sees those from `begin` to `end`.
template <class Use>
void for_each_row(const AnyMask &mask, const QueryTile &t, int j0, int keys, const Use &use) {
    for (int lane = 0; lane < t.rows; ++lane) {
        const Keys seen = keys_of_row(mask, t.query(lane));
        const int begin = clamp(seen.begin - j0, 0, keys);
        use(lane, begin, clamp(seen.end - j0, begin, keys));
    }
}

// Scores with the bits of the forward pass, before the scaling: Bc of them a row.
inline void compute_S(const Attention &a, int rows, int keys, const GradientBuffers &buffers) {
    const int64_t D = D_of(a);
    if (rows_of_key_head(a) > few_rows)
        return multiply_channels(a, a.d, rows, keys, buffers.Qi, buffers.Kj_T, buffers.Pij);
    for (int lane = 0; lane < rows; ++lane)
        dot_products(keys, D, buffers.Qi + lane * D, buffers.Kj, D, 1.f, buffers.Pij + lane * Bc, [](int) {});
}

typedef double VecDouble __attribute__((vector_size(8 * W)));

// Scores in float64, before the scaling, for tiles that have a row with a large lse: rounding such a score to float32
// changes P too much. Eight rows at a time, for which `rows` is rounded up.
[[gnu::noinline]] void compute_S_double(const Attention &a, int rows, const GradientBuffers &buffers) {
    const int64_t D = D_of(a);
    double *const Q = (double *)buffers.Qi_double;
    for (int64_t at = 0; at < rows * D; ++at) Q[at] = buffers.Qi[at];
    for (int row = 0; row < rows; row += 8)
        for (int j = 0; j < Bc; j += W) {
            VecDouble sum[8] = {};
            for (int c = 0; c < a.d; ++c) {
                const VecDouble k = __builtin_convertvector(vec(buffers.Kj_T + c * Bc + j), VecDouble);
                for (int r = 0; r < 8; ++r) sum[r] += Q[(row + r) * D + c] * k;
            }
            for (int r = 0; r < 8; ++r) *(VecDouble *)((double *)buffers.Sij_double + (row + r) * Bc + j) = sum[r];
        }
}

// exp(scale (S - m) - log_l) of W scores in float64, at most 1.
[[gnu::always_inline]] inline Vec exp_double(const double *S, double scale, double m, double log_l) {
    const Vec x = __builtin_convertvector(scale * (*(const VecDouble *)S - m) - log_l, Vec);
    return exp(min(Vec{}, x));
}

// Changes n products of a row (scores.h), and keeps the slopes.
template <class Real>
[[gnu::noinline]] void change_with_slopes(const Attention &a, int n, Real *S, float *slopes) {
    if constexpr (std::is_same_v<Real, double>)
        for (int c = 0; c < n; ++c)
            S[c] = minimal_attn::changed(a.scores, S[c]), slopes[c] = minimal_attn::slope_of(S[c]);
    else
        change_products(a.scores, n, S, [&](int64_t c, Vec t) { vec(S + c) = t, vec(slopes + c) = slope_of(t); });
}

// Steps 11 and 13 for a tile: Pij, without the mask.
void compute_P(const Attention &a, const QueryTile &t, const GradientRow *rows, int j0, int keys,
               const GradientBuffers &buffers) {
    const int count = t.rows;
    const auto large = std::count_if(rows, rows + count, [&](const GradientRow &row) { return is_large(a, row.lse); });
    if (large < count) compute_S(a, count, keys, buffers);
    if (large > 0) compute_S_double(a, count, buffers);
    for (int lane = 0; lane < count; ++lane) {
        const GradientRow &row = rows[lane];
        float *const P = buffers.Pij + lane * Bc;
        double *const S = (double *)buffers.Sij_double + lane * Bc;
        const bool row_is_large = large > 0 && is_large(a, row.lse);
        const auto change = [&](auto *scores) {
            if (has_softcap(a)) change_with_slopes(a, keys, scores, buffers.slopes + lane * Bc);
            if (has_terms(a)) add_terms(a, t.b, t.head(lane), t.query(lane), j0, keys, scores);
        };
        row_is_large ? change(S) : change(P);
        if (row_is_large) {
            for (int c = 0; c < keys; c += W) vec(P + c) = exp_double(S + c, a.softmax_scale, row.m, row.log_l);
            continue;
        }
        for (int c = 0; c < keys; c += W) {
            const Vec x = a.softmax_scale * vec(P + c) - row.lse;
            vec(P + c) = exp(min(Vec{}, x));
        }
    }
}

// Steps 11 to 20 and 22: Pij, dSij, and what they add to dKj and dVj. The tile of keys begins at `first_key`, this part
// of it at j0. dSij without slope and scale is the gradient of what is added to scores.
void compute_tile(const Attention &a, const AnyMask &mask, const QueryTile &t, int first_key, int j0, int keys,
                  Keys seen_by_all, const GradientRow *rows, const GradientBuffers &buffers, BiasSums &sums) {
    const int64_t D = D_of(a), D_v = D_v_of(a);
    const int vectors = round_up(keys, W);
    float *const P = buffers.Pij, *const dS = buffers.dSij;
    compute_P(a, t, rows, j0, vectors, buffers);
    if (j0 < seen_by_all.begin || j0 + keys > seen_by_all.end)
        for_each_row(mask, t, j0, keys, [&](int lane, int begin, int end) {
            float *const row = P + lane * Bc;
            std::fill(row, row + begin, 0.f), std::fill(row + end, row + keys, 0.f);
        });
    const float scale = a.scores.scale;
    const bool of_bias_is_wanted = !sums.sums.empty();
    // Where Pij = 0 dSij is 0, even if a hidden number is NaN.
    multiply_channels(a, a.d_v, t.rows, vectors, buffers.dOi, buffers.Vj_T, dS);
    if (buffers.Zij) fill_Z_of_tile(a, t, j0, vectors, buffers.Zij);  // step 14
    for (int lane = 0; lane < t.rows; ++lane) {
        const float D_of_row = rows[lane].D, D_low = rows[lane].D_low;
        alignas(64) float of_bias[Bc];
        for (int c = 0; c < vectors; c += W) {
            Vec &p = vec(P + lane * Bc + c), &ds = vec(dS + lane * Bc + c);
            if (buffers.Zij) ds *= vec(buffers.Zij + lane * Bc + c);
            ds = ds - D_of_row - D_low;
            if (of_bias_is_wanted) vec(of_bias + c) = p == 0.f ? Vec{} : p * ds;
            if (buffers.slopes) ds *= vec(buffers.slopes + lane * Bc + c);
            ds = p == 0.f ? Vec{} : scale * p * ds;
            if (buffers.Zij) p *= vec(buffers.Zij + lane * Bc + c);
        }
        if (of_bias_is_wanted) sums.add(t.query(lane), t.head(lane), j0 - first_key, keys, of_bias);
    }
    multiply_matrices(keys, D_v, t.rows, P, 1, Bc, buffers.dOi, D_v, buffers.dVj, D_v, true);
    multiply_matrices(keys, D, t.rows, dS, 1, Bc, buffers.Qi, D, buffers.dKj, D, true);
}

// The rows of a tile from the first to the last one that sees one of the keys. The others have P = 0.
inline QueryTile rows_that_see(const AnyMask &mask, QueryTile t, Keys keys) {
    const auto sees = [&](int lane) { return meet(keys_of_row(mask, t.query(lane)), keys); };
    while (t.rows > 0 && !sees(t.rows - 1)) --t.rows;
    while (t.rows > 0 && !sees(0)) ++t.first_row, --t.rows;
    return t;
}

// All of Algorithm 4 for a tile of keys.
template <class T>
void backward_tile(const Gradient &g, const GradientTile &t, const GradientWorkspace &workspace,
                   const GradientBuffers &buffers, BiasSums &sums) {
    const Attention &a = g.a;
    const int64_t D = D_of(a), D_v = D_v_of(a), rows = rows_of_key_head(a), Tr = query_tiles_of_head(a);
    const int64_t bh = t.b * a.Hkv + t.h;
    const AnyMask mask = any_mask_of(a, t.b);
    // 7., 8. Kj, Vj, dKj = 0, dVj = 0
    const Keys keys = {std::max(mask.keys.begin, t.j0), std::min(mask.keys.end, t.j0 + Bc)};
    if (!empty(keys)) {
        load_keys<T>(a.d_v, t, keys, a.v, a.v_stride, buffers.Kj, buffers.Vj_T);  // no product reads Vj by rows
        load_keys<T>(a.d, t, keys, a.k, a.k_stride, buffers.Kj, buffers.Kj_T);
    }
    std::fill(buffers.dKj, buffers.dKj + Bc * D, 0.f);
    std::fill(buffers.dVj, buffers.dVj + Bc * D_v, 0.f);
    for (int64_t i = 0; i < Tr && !empty(keys); ++i) {
        const QueryTile queries = query_tile(a, bh * Tr + i);
        const int64_t first_row = queries.first_row;
        const Keys seen = keys_of_any(mask, queries.query(0), queries.query(queries.rows - 1) + 1);
        if (empty(seen) || seen.end <= t.j0 || seen.begin >= t.j0 + Bc) continue;
        // The part of the tile that the mask leaves: its rows, and its columns from a multiple of W on.
        QueryTile part = rows_that_see(mask, queries, keys);
        const TileKeys part_sees = keys_of_queries(mask, part.query(0), part.query(part.rows - 1) + 1);
        const Keys columns = intersection(part_sees.any, keys);
        const int j0 = t.j0 + (columns.begin - t.j0) / W * W, columns_of_part = columns.end - j0;
        const GradientBuffers own = buffers.from(j0 - t.j0, a);
        if (terms_of_tile(a, part, 0, part.rows, j0, columns_of_part) == TermsOfTile::hide) part.rows = 0;
        if (part.rows > 0) {
            const GradientRow *const rows_of_part = workspace.rows_of(a, part);
            load_queries<T>(a.d, mask, part, rows_of_part, a.q, a.q_stride, buffers.Qi);
            load_queries<T>(a.d_v, mask, part, rows_of_part, g.do_, g.do_stride, buffers.dOi);
            compute_tile(a, mask, part, t.j0, j0, columns_of_part, part_sees.all, rows_of_part, own, sums);
        }
        // 21. dQi = dQi + dSij Kj. Tiles of keys take turns in their order, which fixes the sum's bits.
        float *const dQi = a.Nk > Bc ? workspace.dQ + (bh * rows + first_row) * D : buffers.dQi;
        const int first_tile = seen.begin / Bc, last_tile = (seen.end - 1) / Bc, tile = t.j0 / Bc;
        std::atomic<int> &turn = workspace.turns[bh * Tr + i];
        while (turn.load(std::memory_order_acquire) != tile - first_tile) std::this_thread::yield();
        if (tile == first_tile) std::fill(dQi, dQi + queries.rows * D, 0.f);
        multiply_matrices(part.rows, D, columns_of_part, own.dSij, Bc, 1, own.Kj, D,
                          dQi + (part.first_row - first_row) * D, D, true);
        turn.store(tile - first_tile + 1, std::memory_order_release);
        if (tile < last_tile) continue;
        for (int lane = 0; lane < queries.rows; ++lane)
            store_row<T>(dQi + lane * D, a.d, g.dq, g.dq_stride, t.b, queries.head(lane), queries.query(lane),
                         g.out_dtype);
    }
    // 24. dKj, dVj
    for (int j = t.j0; j < std::min(t.j0 + Bc, a.Nk); ++j) {
        store_row<T>(buffers.dKj + (j - t.j0) * D, a.d, g.dk, g.dk_stride, t.b, t.h, j, g.out_dtype);
        store_row<T>(buffers.dVj + (j - t.j0) * D_v, a.d_v, g.dv, g.dv_stride, t.b, t.h, j, g.out_dtype);
    }
}

// Step 19: D = rowsum(dO o O), less the gradient of lse. Rows without a key get their dQ here, which is 0. Returns
// whether a row has a large lse.
template <class T>
bool begin_rows(const Gradient &g, const QueryTile &t, GradientRow *rows) {
    const Attention &a = g.a;
    bool any_large = false;
    for (int lane = 0; lane < t.rows; ++lane) {
        const int64_t i = t.query(lane), h = t.head(lane), at = (t.b * a.Hq + h) * a.Nq + i;
        const T *o = row_of<const T>(g.o, g.o_stride, t.b, h, i), *dO = row_of<const T>(g.do_, g.do_stride, t.b, h, i);
        float sum[16] = {};
        int x = 0;
        for (; x + 16 <= a.d_v; x += 16)
            for (int c = 0; c < 16; ++c) sum[c] += (float)o[x + c] * (float)dO[x + c];
        for (; x < a.d_v; ++x) sum[x % 16] += (float)o[x] * (float)dO[x];
        for (int half = 8; half > 0; half /= 2)
            for (int c = 0; c < half; ++c) sum[c] += sum[c + half];
        const double lse = g.lse[at];
        rows[lane] = {g.lse[at], sum[0] - (g.dlse ? g.dlse[at] : 0.f), 0.f, lse / a.softmax_scale, 0.};
        any_large |= is_large(a, g.lse[at]);
        if (has_terms(a) && g.lse[at] == -INFINITY) rows[lane] = {INFINITY, 0.f, 0.f, 0., 0.};
        if (!empty(keys_of_row(any_mask_of(a, t.b), i))) continue;
        const float zeros[kMostD] = {};
        store_row<T>(zeros, a.d, g.dq, g.dq_stride, t.b, h, i, g.out_dtype);
    }
    return any_large;
}

// A row in normalize_rows: m, l and D of the keys so far. D is not yet divided by l.
struct RowSums {
    double m = -INFINITY, l = 0., D = 0.;
};

// Steps 10 and 11 of Algorithm 1 for a row: Bc scores join, and their dP. Hidden scores are -inf; their dP may
// be anything.
inline void add_scores(double scale, const double *S, const float *dP, RowSums &row) {
    const double m = std::max(row.m, *std::max_element(S, S + Bc));
    if (m == -INFINITY) return;
    VecDouble l = {}, D = {};
    for (int c = 0; c < Bc; c += W) {
        const Vec p = exp_double(S + c, scale, m, 0.);
        const VecDouble p_double = __builtin_convertvector(p, VecDouble);
        const VecDouble dP_double = __builtin_convertvector(vec(dP + c), VecDouble);
        l += p_double, D += p_double * (*(const VecDouble *)(S + c) > -INFINITY ? dP_double : VecDouble{});
    }
    const double alpha = std::exp(scale * (row.m - m));
    row = {m, alpha * row.l, alpha * row.D};
    for (int c = 0; c < W; ++c) row.l += l[c], row.D += D[c];
}

// Normalises the rows of a tile again where lse is large, from the scores and dP that compute_tile will use. D, too, is
// a sum over these P, since o was rounded. A negative softmax_scale negates scores here and counts as positive.
template <class T>
void normalize_rows(const Gradient &g, const QueryTile &t, GradientRow *rows, const GradientBuffers &buffers) {
    const Attention &a = g.a;
    const AnyMask mask = any_mask_of(a, t.b);
    const Keys seen = keys_of_any(mask, t.query(0), t.query(t.rows - 1) + 1);
    const double sign = a.softmax_scale < 0.f ? -1. : 1.;
    RowSums sums[gradient_Br];
    load_queries<T>(a.d, mask, t, rows, a.q, a.q_stride, buffers.Qi);
    load_queries<T>(a.d_v, mask, t, rows, g.do_, g.do_stride, buffers.dOi);
    for (int j0 = seen.begin / Bc * Bc; j0 < seen.end; j0 += Bc) {
        const Keys keys = {std::max(mask.keys.begin, j0), std::min(mask.keys.end, j0 + Bc)};
        if (terms_of_tile(a, t, 0, t.rows, j0, Bc) == TermsOfTile::hide) continue;
        load_keys<T>(a.d, {t.b, t.h, j0}, keys, a.k, a.k_stride, buffers.Kj, buffers.Kj_T);
        load_keys<T>(a.d_v, {t.b, t.h, j0}, keys, a.v, a.v_stride, buffers.Kj, buffers.Vj_T);
        compute_S_double(a, t.rows, buffers);
        multiply_channels(a, a.d_v, t.rows, Bc, buffers.dOi, buffers.Vj_T, buffers.dSij);
        if (buffers.Zij) fill_Z_of_tile(a, t, j0, Bc, buffers.Zij);
        for_each_row(mask, t, j0, Bc, [&](int lane, int begin, int end) {
            double *const S = (double *)buffers.Sij_double + lane * Bc;
            float *const dP = buffers.dSij + lane * Bc;
            for (int c = begin; c < end; ++c) S[c] = capped(a, S[c]);
            if (has_terms(a)) add_terms(a, t.b, t.head(lane), t.query(lane), j0, Bc, S);
            for (int c = begin; c < end; ++c) S[c] *= sign;
            for (int c = begin; c < end && buffers.Zij; ++c) dP[c] *= buffers.Zij[lane * Bc + c];
            std::fill(S, S + begin, -INFINITY), std::fill(S + end, S + Bc, -INFINITY);
            std::fill(dP, dP + begin, 0.f), std::fill(dP + end, dP + Bc, 0.f);
            add_scores(sign * a.softmax_scale, S, dP, sums[lane]);
        });
    }
    for (int lane = 0; lane < t.rows; ++lane) {
        if (!is_large(a, rows[lane].lse)) continue;
        const double dlse = g.dlse ? g.dlse[(t.b * a.Hq + t.head(lane)) * a.Nq + t.query(lane)] : 0.;
        const double D = sums[lane].D / sums[lane].l - dlse;
        rows[lane] = {rows[lane].lse, (float)D, (float)(D - (float)D), sign * sums[lane].m, std::log(sums[lane].l)};
    }
}

template <class T>
constexpr BackwardFunctions functions_of_type = {begin_rows<T>, normalize_rows<T>, backward_tile<T>};

}  // namespace

constexpr BackwardFunctions functions_of(Dtype dtype) {
    return dtype == Dtype::float32   ? functions_of_type<float>
           : dtype == Dtype::float16 ? functions_of_type<c10::Half>
                                     : functions_of_type<c10::BFloat16>;
}

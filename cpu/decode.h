// cpu/decode.h: Algorithm 1 for at most few_rows rows of Q a key head, as in decoding: K and V are read once, and that
// is what takes the time. A lane is a channel in products, and a key in the softmax. kernel.h includes it once for each
// instruction set.

// Steps 10 and 11 for one row. mi is one number in all lanes of a vector; li is the sum of its lanes.
inline Vec update_softmax_of_row(int n, float *Si, float *mi, float *li) {
    Vec m = vec(mi), l = {};
    for (int j = 0; j < n; j += W) m = max(vec(Si + j), m);
    m = Vec{} + max_of(m);
    const Vec alpha = exp(vec(mi) - finite_max(m));
    vec(mi) = m;
    for (int j = 0; j < n; j += W) l += vec(Si + j) = exp(vec(Si + j) - finite_max(m));
    vec(li) = alpha * vec(li) + l;
    return alpha;
}

// Steps 9 to 11 for one row of a tile: Pij, or with dropout Pij Zij, and alpha. The first row prefetches the rows of
// the next tile, up to key `prefetch_end`.
[[gnu::noinline]] inline void compute_P(const Attention &a, const AnyMask &mask, const QueryTile &t, int row,
                                        const KeyTile &tile, int prefetch_end, const Buffers &buffers, Vec *alpha) {
    const int64_t D = D_of(a), D_v = D_v_of(a);
    const int j = tile.keys.begin, n = tile.keys.end - j;
    float *const Si = buffers.Sij + row * Bc;
    dot_products(n, D, buffers.rows + row * D, tile.Kj, tile.K_row, scale_of_products(a), Si, [&](int key) {
        if (row > 0 || tile.keys.end + key >= prefetch_end) return;
        prefetch(tile.Kj + (n + key) * tile.K_row, D * sizeof(float));
        prefetch(tile.Vj + (n + key) * tile.V_row, D_v * sizeof(float));
    });
    if (has_softcap(a)) change_scores(a, n, Si);
    if (has_terms(a)) add_terms(a, t.b, t.head(row), t.query(row), j, n, Si);
    const Keys keys = keys_of_row(mask, t.query(row));
    std::fill(Si, Si + clamp(keys.begin - j, 0, n), -INFINITY);
    std::fill(Si + clamp(keys.end - j, 0, n), Si + round_up(n, W), -INFINITY);
    *alpha = update_softmax_of_row(n, Si, buffers.mi + row * W, buffers.li + row * W);
    if (has_dropout(a)) drop(a, t.b, t.head(row), t.query(row), j, n, Si);
}

// Step 12: Oi = alpha Oi + Pij Vj, R vectors of channels at a time.
template <int C, int R>
void add_PV(int n, int64_t D_v, int64_t c, const Vec *alpha, const KeyTile &tile, const float *Pij, float *Oi) {
    for (; c + R * W <= D_v; c += R * W)
        multiply<R, C>(0, C, n, Pij, Bc, 1, tile.Vj + c, tile.V_row, [&](int row, int r, Vec sum) {
            Vec &o = vec(Oi + row * D_v + c + r * W);
            o = alpha[row] * o + sum;
        });
    if constexpr (R > 1) add_PV<C, R / 2>(n, D_v, c, alpha, tile, Pij, Oi);
}

// Step 12 multiplies C rows of Q, at least as many as the tile has. The rest of Pij stays 0.
constexpr int fewer_rows(int C) { return C > 4 ? C / 2 : C - 1; }

// Steps 9 to 12 for one tile of keys.
template <int C = few_rows>
[[gnu::noinline]] void update_few(const Attention &a, const AnyMask &mask, const QueryTile &t, const KeyTile &tile,
                                  int prefetch_end, const Buffers &buffers) {
    if constexpr (C > 1)
        if (t.rows <= fewer_rows(C)) return update_few<fewer_rows(C)>(a, mask, t, tile, prefetch_end, buffers);
    constexpr int R = sums / C >= 8 ? 8 : 4;
    Vec alpha[C] = {};
    for (int row = 0; row < t.rows; ++row) compute_P(a, mask, t, row, tile, prefetch_end, buffers, &alpha[row]);
    add_PV<C, R>(tile.keys.end - tile.keys.begin, D_v_of(a), 0, alpha, tile, buffers.Sij, buffers.Oi);
}

inline void forward_few(const Attention &a, const QueryTile &t, const QueryTile &next, const Buffers &buffers) {
    int C = few_rows;
    while (C > 1 && t.rows <= fewer_rows(C)) C = fewer_rows(C);
    const int64_t D_v = D_v_of(a);
    const AnyMask mask = any_mask_of(a, t.b);
    const Keys seen = keys_of_queries(mask, t.query(0), t.query(t.rows - 1) + 1).any;
    float *mi = buffers.mi, *li = buffers.li, *Oi = buffers.Oi;

    // 8. Qi, Oi, li, mi
    load_queries(a, t, t.rows, buffers);
    std::fill(buffers.Sij, buffers.Sij + C * Bc, 0.f);
    std::fill(Oi, Oi + C * D_v, 0.f);
    std::fill(li, li + C * W, 0.f);
    std::fill(mi, mi + C * W, -INFINITY);
    prefetch_tile(a, next, next.b == t.b && next.h == t.h);
    const auto hold_rows = [&](int row) {
        hold_sums<1>(D_v / W, mi + row * W, li + row * W, Oi + row * D_v, buffers.mi_held + row * W,
                     buffers.li_held + row * W, buffers.li_lost + row * W, buffers.Oi_held + row * D_v,
                     buffers.Oi_lost + row * D_v);
    };
    if (buffers.Oi_held) start_held_sums(C * W, C * D_v, buffers);

    // Rows that are read in place and are neighbours in memory are prefetched for the next tile of keys one by one,
    // beside the products. Other rows arrive faster if all are prefetched at once.
    const bool in_place = a.dtype == Dtype::float32 && a.d == D_of(a) && a.d_v == D_v;
    const bool row_by_row = in_place && !a.block_table && a.k_stride.row == a.d && a.v_stride.row == a.d_v;
    // 5. for j
    for (int j = seen.begin; j < seen.end;) {
        const KeyTile tile = load_tile(a, t, seen, j, in_place, !row_by_row, buffers);
        if (terms_of_tile(a, t, 0, t.rows, j, tile.keys.end - j) != TermsOfTile::hide)
            update_few(a, mask, t, tile, row_by_row ? seen.end : tile.keys.end, buffers);
        if (buffers.Oi_held && tile.ends_sum())
            for (int row = 0; row < t.rows; ++row) hold_rows(row);
        j = tile.keys.end;
    }

    // 13. O, l and m
    for (int row = 0; row < t.rows; ++row) {
        if (buffers.Oi_held) hold_rows(row);
        float *l = buffers.Oi_held ? buffers.li_held : li, *o = buffers.Oi_held ? buffers.Oi_held : Oi;
        end_row(a, t, row, !empty(keys_of_row(mask, t.query(row))), sum_of(vec(l + row * W)), mi[row * W],
                o + row * D_v);
    }
}

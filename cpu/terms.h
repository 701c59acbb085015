// cpu/terms.h: what is added to scores by the pair of query and key (scores.h), on vectors. kernel.h and gradient.h
// include it once for each instruction set.

// The terms of query i of head h for n keys from j on, at most Bc. Numbers up to a multiple of W are filled.
[[gnu::noinline]] inline void fill_terms(const Attention &a, int64_t b, int64_t h, int64_t i, int j, int n, float *to) {
    const TermsOfRow row(a, b, h, (int)i);
    for (int c = 0; c < round_up(n, W); ++c) to[c] = row.of_position(j + c);
    n = std::min(n, a.Nk - j);
    // The compiler makes vector instructions of the first loop alone, whose keys are neighbours in memory.
    const auto for_keys = [&](int64_t stride, const auto &use) {
        if (stride == 1)
            for (int c = 0; c < n; ++c) use(c, c);
        else
            for (int c = 0; c < n; ++c) use(c, c * stride);
    };
    if (a.terms.bias)
        with_type(a.terms.bias_is_float32 ? Dtype::float32 : a.dtype, [&](auto zero) {
            const auto *const bias = (const decltype(zero) *)a.terms.bias + row.bias + j * a.terms.bias_stride.key;
            for_keys(a.terms.bias_stride.key, [&](int c, int64_t at) { to[c] += (float)bias[at]; });
        });
    if (!row.mask) return;
    const unsigned char *const mask = row.mask + j * a.terms.mask_stride.key;
    for_keys(a.terms.mask_stride.key, [&](int c, int64_t at) { to[c] = mask[at] ? to[c] : -INFINITY; });
}

// n scores of a query become whole ones, in place. Real is float or double.
template <class Real>
[[gnu::noinline]] void add_terms(const Attention &a, int64_t b, int64_t h, int64_t i, int j, int n, Real *Si) {
    alignas(64) float terms[Bc];
    fill_terms(a, b, h, i, j, n, terms);
    for (int c = 0; c < n; ++c) Si[c] = whole(a, Si[c], terms[c]);
}

// use(vector of (key, query), its numbers) for R vectors of queries and n keys. fill(lane, rows) gives the numbers of W
// queries, Bc each, key by key: they are transposed, W x W at a time.
template <int R, class Fill, class Use>
[[gnu::always_inline]] inline void for_rows_of_lanes(int first, int n, float *vectors, const Fill &fill,
                                                     const Use &use) {
    alignas(64) float rows[W * Bc] = {}, transposed[W * W];
    for (int r = 0; r < R; ++r) {
        fill(first + r * W, rows);
        for (int c = 0; c < n; ++c) {
            if (c % W == 0) transpose(rows + c, Bc, transposed, W);
            use(vec(vectors + (c * R + r) * W), vec(transposed + c % W * W));
        }
    }
}

// Scores of R vectors of queries become whole ones, where Sij is (key, query).
template <int R>
[[gnu::noinline]] void add_terms(const Attention &a, const QueryTile &t, int first, int j, int n, float *Sij) {
    for_rows_of_lanes<R>(
        first, n, Sij,
        [&](int first, float *to) {
            for (int lane = first; lane < std::min(first + W, t.rows); ++lane, to += Bc)
                fill_terms(a, t.b, t.head(lane), t.query(lane), j, n, to);
        },
        [&](Vec &s, const Vec &term) { s = whole(a, s, term); });
}

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

// The same for R vectors of queries, where Sij is (key, query): the terms are transposed, W x W at a time.
template <int R>
[[gnu::noinline]] void add_terms(const Attention &a, const QueryTile &t, int first, int j, int n, float *Sij) {
    alignas(64) float terms[W * Bc], transposed[W * W];
    for (int r = 0; r < R; ++r) {
        for (int x = 0; x < W; ++x) {
            const int lane = std::min(first + r * W + x, t.rows - 1);
            fill_terms(a, t.b, t.head(lane), t.query(lane), j, n, terms + x * Bc);
        }
        for (int c = 0; c < n; ++c) {
            if (c % W == 0) transpose(terms + c, Bc, transposed, W);
            Vec &s = vec(Sij + (c * R + r) * W);
            s = whole(a, s, vec(transposed + c % W * W));
        }
    }
}

// cpu/terms.h: what is added to scores by the pair of query and key (scores.h), on vectors. kernel.h and gradient.h
// include it once for each instruction set.

// Where n numbers of query i of a mask or bias are, from key j on. Rows are far apart in memory, so the CPU does not
// foresee them: those of query i + 16 are prefetched, for backward passes, and of query i those of the next tile.
template <class Number>
const Number *from_key(const Attention &a, const Number *row, const PairStrides &stride, int64_t i, int j, int n) {
    const Number *const at = row + j * stride.key;
    if (i + 16 < a.Nq) prefetch(at + 16 * stride.row, n * sizeof(Number));
    if (stride.key == 1 && j + n < a.Nk) prefetch(at + n, n * sizeof(Number));
    return at;
}

// The terms of query i of head h for n keys from j on, at most Bc. Numbers up to a multiple of W are filled.
[[gnu::noinline]] inline void fill_terms(const Attention &a, int64_t b, int64_t h, int64_t i, int j, int n, float *to) {
    const TermsOfRow row(a, b, h, (int)i);
    for (int c = 0; c < round_up(n, W); ++c) to[c] = a.terms.alibi_slopes ? row.of_position(j + c) : 0.f;
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
            const auto *const bias =
                from_key(a, (const decltype(zero) *)a.terms.bias + row.bias, a.terms.bias_stride, i, j, n);
            for_keys(a.terms.bias_stride.key, [&](int c, int64_t at) { to[c] += (float)bias[at]; });
        });
    if (!row.mask) return;
    const unsigned char *const mask = from_key(a, row.mask, a.terms.mask_stride, i, j, n);
    for_keys(a.terms.mask_stride.key, [&](int c, int64_t at) { to[c] = mask[at] ? to[c] : -INFINITY; });
}

// What terms do to the scores of `count` lanes from `first` on and n keys from j on: they hide all, so that no product
// is needed; they are 0; or it is not known.
enum class TermsOfTile { hide, are_zero, any };
[[gnu::noinline]] inline TermsOfTile terms_of_tile(const Attention &a, const QueryTile &t, int first, int count, int j,
                                                   int n) {
    const Terms &terms = a.terms;
    bool hide = terms.mask || terms.bias, are_zero = terms.mask && !terms.bias && !terms.alibi_slopes;
    n = std::min(n, a.Nk - j);
    // Without branches, so that the compiler makes vector instructions.
    const auto count_of = [n](const auto *x, int64_t stride, auto number) {
        int count = 0;
        for (int c = 0; c < n; ++c) count += (decltype(number))x[c * stride] == number;
        return count;
    };
    for (int lane = first; lane < std::min(first + count, t.rows) && (hide || are_zero); ++lane) {
        const int i = t.query(lane);
        const TermsOfRow row(a, t.b, t.head(lane), i);
        const PairStrides &of_mask = terms.mask_stride, &of_bias = terms.bias_stride;
        int hidden = row.mask ? count_of(from_key(a, row.mask, of_mask, i, j, n), of_mask.key, (unsigned char)0) : 0;
        are_zero &= hidden == 0;
        if (terms.bias && hidden < n)
            with_type(terms.bias_is_float32 ? Dtype::float32 : a.dtype, [&](auto zero) {
                const auto *const bias = (const decltype(zero) *)terms.bias + row.bias;
                hidden = count_of(from_key(a, bias, of_bias, i, j, n), of_bias.key, -INFINITY);
            });
        hide &= hidden == n;
    }
    return hide ? TermsOfTile::hide : are_zero ? TermsOfTile::are_zero : TermsOfTile::any;
}

// n scores of a query become whole ones, in place. Real is float or double.
template <class Real>
[[gnu::noinline]] void add_terms(const Attention &a, int64_t b, int64_t h, int64_t i, int j, int n, Real *Si) {
    alignas(64) float terms[Bc];
    fill_terms(a, b, h, i, j, n, terms);
    int c = 0;
    if constexpr (std::is_same_v<Real, float>)  // of numbers the compiler makes branches
        for (; c + W <= n; c += W) {
            const Vec s = whole(a, load_vec(Si + c), vec(terms + c));
            std::memcpy(Si + c, &s, sizeof(s));
        }
    for (; c < n; ++c) Si[c] = whole(a, Si[c], terms[c]);
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

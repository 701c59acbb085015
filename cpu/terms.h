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

// The terms of head h for queries from i on, `rows` of them, and n keys from j on, at most Bc. Each row has Bc numbers,
// of which those up to a multiple of W are filled.
[[gnu::noinline]] inline void fill_terms(const Attention &a, int64_t b, int64_t h, int64_t i, int rows, int j, int n,
                                         float *to) {
    const Terms &terms = a.terms;
    const TermsOfRow first(a, b, h, (int)i);
    const int filled = round_up(n, W);
    n = std::min(n, a.Nk - j);
    // The compiler makes vector instructions of the first loop alone, whose keys are neighbours in memory.
    const auto for_pairs = [&](const auto *row, const PairStrides &stride, const auto &use) {
        for (int r = 0; r < rows; ++r, row += stride.row) {
            const auto *const from = from_key(a, row, stride, i + r, j, n);
            float *const Si = to + r * Bc;
            if (stride.key == 1)
                for (int c = 0; c < n; ++c) use(Si[c], from[c]);
            else
                for (int c = 0; c < n; ++c) use(Si[c], from[c * stride.key]);
        }
    };
    for (int r = 0; r < rows; ++r) std::fill(to + r * Bc + (terms.bias ? n : 0), to + r * Bc + filled, 0.f);
    if (terms.bias)
        with_type(terms.bias_is_float32 ? Dtype::float32 : a.dtype, [&](auto zero) {
            for_pairs((const decltype(zero) *)terms.bias + first.bias, terms.bias_stride,
                      [](float &term, auto bias) { term = (float)bias; });
        });
    for (int r = 0; r < rows && terms.alibi_slopes; ++r) {
        const TermsOfRow row(a, b, h, (int)i + r);
        for (int c = 0; c < filled; ++c) to[r * Bc + c] += row.of_position(j + c);
    }
    if (terms.mask)
        for_pairs(first.mask, terms.mask_stride,
                  [](float &term, unsigned char is_seen) { term = is_seen ? term : -INFINITY; });
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
    fill_terms(a, b, h, i, 1, j, n, terms);
    int c = 0;
    if constexpr (std::is_same_v<Real, float>)  // of numbers the compiler makes branches
        for (; c + W <= n; c += W) {
            const Vec s = whole(a, load_vec(Si + c), vec(terms + c));
            std::memcpy(Si + c, &s, sizeof(s));
        }
    for (; c < n; ++c) Si[c] = whole(a, Si[c], terms[c]);
}

// Scores of R vectors of queries become whole ones, where Sij is (key, query): terms are transposed, W x W at a time.
template <int R>
[[gnu::noinline]] void add_terms(const Attention &a, const QueryTile &t, int first, int j, int n, float *Sij) {
    alignas(64) float rows[W * Bc];  // of W queries
    if (first + R * W > t.rows) std::fill(rows, rows + W * Bc, 0.f);
    const int neighbours = t.group == 1 ? W : 1;  // queries of one head
    for (int r = 0; r < R; ++r) {
        const int begin = first + r * W, end = std::min(begin + W, t.rows);
        for (int lane = begin; lane < end; lane += neighbours)
            fill_terms(a, t.b, t.head(lane), t.query(lane), std::min(neighbours, end - lane), j, n,
                       rows + (lane - begin) * Bc);
        for (int c0 = 0; c0 < n; c0 += W) {
            Vec terms[W];
#pragma GCC unroll 16
            for (int lane = 0; lane < W; ++lane) terms[lane] = vec(rows + lane * Bc + c0);
            transpose(terms);
#pragma GCC unroll 16
            for (int c = 0; c < W; ++c) {
                if (c0 + c >= n) break;
                Vec &s = vec(Sij + ((c0 + c) * R + r) * W);
                s = whole(a, s, terms[c]);
            }
        }
    }
}

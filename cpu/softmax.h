// cpu/softmax.h: steps 10 to 12 of Algorithm 1 on vectors: mi, li, alpha, and sums that are held. kernel.h includes it
// once for each instruction set.

// What step 9 multiplies products by: those that change or have terms are scaled afterwards.
inline float scale_of_products(const Attention &a) { return changes_scores(a) ? 1.f : a.softmax_scale; }

// Step 9: n products become scores (scores.h).
[[gnu::noinline]] inline void change_scores(const Attention &a, int64_t n, float *Sij) {
    change_products(a.scores, n, Sij, [&](int64_t at, Vec t) { vec(Sij + at) = a.softmax_scale * t; });
}

// A sum of how many terms goes through one register: more of them round more.
constexpr int scores_per_sum = 8;

// Where no key was seen yet or all scores were -inf: exp(-inf - 0) is the 0 that exp(-inf - -inf) should be.
[[gnu::always_inline]] inline Vec finite_max(Vec m) { return m == -INFINITY ? Vec{} : m; }

// Steps 10 and 11 for R vectors of rows: mi, alpha = exp(old mi - mi), Pij = exp(Sij - mi), li = alpha li +
// rowsum(Pij). Sij is (key, query).
template <int R>
void update_softmax(int n, float *Sij, float *mi, float *li, Vec (&alpha)[R]) {
    Vec m[R], l[R] = {};
    for (int r = 0; r < R; ++r) m[r] = vec(mi + r * W);
    for (int j = 0; j < n; ++j)
        for (int r = 0; r < R; ++r) m[r] = max(vec(Sij + (j * R + r) * W), m[r]);
    for (int r = 0; r < R; ++r) {
        const Vec old = vec(mi + r * W);
        vec(mi + r * W) = m[r];
        m[r] = finite_max(m[r]);
        alpha[r] = exp(old - m[r]);
    }
    for (int j0 = 0; j0 < n; j0 += scores_per_sum) {
        Vec sum[R] = {};
        for (int j = j0; j < std::min(j0 + scores_per_sum, n); ++j)
            for (int r = 0; r < R; ++r) {
                Vec &p = vec(Sij + (j * R + r) * W);
                p = exp(p - m[r]);
                sum[r] += p;
            }
        for (int r = 0; r < R; ++r) l[r] += sum[r];
    }
    for (int r = 0; r < R; ++r) vec(li + r * W) = alpha[r] * vec(li + r * W) + l[r];
}

// held = alpha held + x, x = 0, for n times R vectors; `lost` is what rounding has taken from held so far (Kahan's
// sum).
template <int R>
void hold(int64_t n, const Vec (&alpha)[R], float *x, float *held, float *lost) {
    for (int64_t c = 0; c < n; ++c)
        for (int r = 0; r < R; ++r) {
            const int64_t at = (c * R + r) * W;
            const Vec before = alpha[r] * vec(held + at), term = vec(x + at) - alpha[r] * vec(lost + at);
            const Vec sum = before + term, too_much = (sum - before) - term;
            vec(held + at) = sum;
            vec(lost + at) = too_much - too_much == 0.f ? too_much : Vec{};  // Inf and NaN lose nothing
            vec(x + at) = Vec{};
        }
}

// Adds li and Oi to the held sums. These are relative to mi_held, an earlier maximum, so they are rescaled first.
// D: channels.
template <int R>
[[gnu::noinline]] void hold_sums(int64_t D, const float *mi, float *li, float *Oi, float *mi_held, float *li_held,
                                 float *li_lost, float *Oi_held, float *Oi_lost) {
    Vec alpha[R];
    for (int r = 0; r < R; ++r) {
        const Vec m = vec(mi + r * W);
        alpha[r] = exp(vec(mi_held + r * W) - finite_max(m));
        vec(mi_held + r * W) = m;
    }
    hold<R>(1, alpha, li, li_held, li_lost);
    hold<R>(D, alpha, Oi, Oi_held, Oi_lost);
}

// Before the first tile of keys.
inline void start_held_sums(int64_t lanes, int64_t size_of_Oi, const Buffers &buffers) {
    std::fill(buffers.mi_held, buffers.mi_held + lanes, -INFINITY);
    for (float *li : {buffers.li_held, buffers.li_lost}) std::fill(li, li + lanes, 0.f);
    for (float *Oi : {buffers.Oi_held, buffers.Oi_lost}) std::fill(Oi, Oi + size_of_Oi, 0.f);
}

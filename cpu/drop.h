// cpu/drop.h: Zij (dropout.h) on vectors. kernel.h and gradient.h include it once for each instruction set, behind
// terms.h.

typedef uint64_t VecLong __attribute__((vector_size(4 * W)));
typedef uint32_t HalfInt __attribute__((vector_size(2 * W)));
constexpr int groups_at_once = W / 2;  // of dropout.h, a 64-bit number each

// The products of the lower 32 bits. GCC makes three multiplications of x & 0xffffffff times a number.
template <class X>
[[gnu::always_inline]] inline X multiply_words(X x) {
    constexpr uint64_t factor = kPhiloxFactor;
#if defined(__x86_64__) && !defined(__clang__)
    if constexpr (sizeof(X) == 64)  // without a mask GCC 12 warns of what its own header leaves undefined
        return (X)_mm512_maskz_mul_epu32(0xff, (__m512i)x, _mm512_set1_epi64(factor));
    if constexpr (sizeof(X) == 32) return (X)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#endif
    return (x & 0xffffffff) * factor;
}

// All rounds for groups_at_once counters. Only the lower halves of x and y count.
[[gnu::always_inline]] inline void philox(const DropoutOfHead &head, VecLong &x, VecLong &y) {
    for (int round = 0; round < kDropoutRounds; ++round) {
        const VecLong product = multiply_words(x);
        x = (product >> 32) ^ (uint64_t)(head.key + round * kPhiloxStep) ^ y, y = product;
    }
}

// Zij of queries i and i ^ 8 (if `other` is wanted) for n keys from j on, at most Bc.
[[gnu::noinline]] inline void fill_Z(const DropoutOfHead &head, int i, int j, int n, float *to, float *other) {
    const int first = j & ~15;
    alignas(64) float Z[2][Bc + 16];
    uint32_t kept;
    std::memcpy(&kept, &head.kept, sizeof(kept));
    const auto store = [&](VecLong words, float *row) {
        for (int half = 0; half < 2; ++half) {
            const VecLong numbers = (half ? words >> 16 : words) & 0xffff;
            const VecLong bits = numbers >= head.dropped ? VecLong{} + kept : VecLong{};
            *(HalfInt *)(row + 8 * half) = __builtin_convertvector(bits, HalfInt);
        }
    };
    for (int j0 = first; j0 < j + n; j0 += 16)
        for (int g0 = 0; g0 < 8; g0 += groups_at_once) {
            VecLong x = VecLong{} + ((uint32_t)(i & ~8) ^ head.origin.x), y;
            for (int g = 0; g < groups_at_once; ++g) y[g] = (uint32_t)(j0 + g0 + g) ^ head.origin.y;
            philox(head, x, y);
            store(i & 8 ? y : x, Z[0] + j0 - first + g0);
            if (other) store(i & 8 ? x : y, Z[1] + j0 - first + g0);
        }
    std::copy(Z[0] + j - first, Z[0] + j - first + n, to);
    if (other) std::copy(Z[1] + j - first, Z[1] + j - first + n, other);
}

// Those of a tile's rows, Bc numbers each.
inline void fill_Z_of_tile(const Attention &a, const QueryTile &t, int j, int n, float *to) {
    for (int lane = 0; lane < t.rows; ++lane, to += Bc) {
        const auto is_pair = [&](int x, int y) {
            return 0 <= x && y < t.rows && t.head(x) == t.head(y) && t.query(y) == t.query(x) + 8 && !(t.query(x) & 8);
        };
        if (is_pair(lane - 8, lane)) continue;
        fill_Z({a, t.b, t.head(lane)}, t.query(lane), j, n, to, is_pair(lane, lane + 8) ? to + 8 * Bc : nullptr);
    }
}

// Pij *= Zij for R vectors of queries, where Pij is (key, query). Counters are lanes, as queries are.
template <int R>
[[gnu::noinline]] void drop(const Attention &a, const QueryTile &t, int first, int j, int n, float *Pij) {
    VecInt even;  // the lower halves of 64-bit words
    for (int c = 0; c < W; ++c) even[c] = 2 * c;
    const DropoutOfHead head(a, t.b, t.h);  // all heads have its key
    const auto drop_by = [&](VecInt words, int r, int key) {
        for (int at = key - j; at < key - j + 16; at += 8, words = (VecInt)((VecUint)words >> 16)) {
            if (at < 0 || at >= n) continue;
            Vec &p = vec(Pij + (at * R + r) * W);
            p = (words & 0xffff) >= (int)head.dropped ? head.kept * p : Vec{};
        }
    };
    // In pairs of vectors queries i and i + 8 have the same lane: y of the first are the words of the second.
    const bool in_pairs = W == 8 && R % 2 == 0 && t.group == 1 && t.query(first) % 16 == 0;
    for (int r = 0; r < R; r += in_pairs ? 2 : 1) {
        uint64_t of_query[W], of_head[W];
        VecInt is_later = {};
        for (int c = 0; c < W; ++c) {
            const int lane = std::min(first + r * W + c, t.rows - 1), i = t.query(lane);
            const Words origin = DropoutOfHead(a, t.b, t.head(lane)).origin;
            of_query[c] = (uint32_t)(i & ~8) ^ origin.x, of_head[c] = origin.y, is_later[c] = i & 8;
        }
        VecLong x0[2], y0[2];
        std::memcpy(x0, of_query, sizeof(x0)), std::memcpy(y0, of_head, sizeof(y0));
        for (int key = j & ~15; key < j + n; key += key % 8 == 7 ? 9 : 1) {  // without the bit 8
            VecLong x[2] = {x0[0], x0[1]}, y[2] = {y0[0] ^ (uint64_t)key, y0[1] ^ (uint64_t)key};
            philox(head, x[0], y[0]), philox(head, x[1], y[1]);
            const VecInt words = (VecInt)shuffle((Vec)x[0], (Vec)x[1], even);
            const VecInt later = (VecInt)shuffle((Vec)y[0], (Vec)y[1], even);
            drop_by(is_later ? later : words, r, key);
            if (in_pairs) drop_by(later, r + 1, key);
        }
    }
}

// The same for n weights of one query.
inline void drop(const Attention &a, int64_t b, int64_t h, int64_t i, int j, int n, float *Pi) {
    float Z[Bc];
    fill_Z({a, b, h}, (int)i, j, n, Z, nullptr);
    for (int c = 0; c < n; ++c) Pi[c] *= Z[c];
}

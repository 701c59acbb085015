// cpu/split.h: float32 into three bfloat16, in the tiles that amx.h multiplies. kernel.h includes it once for each
// instruction set.

template <int R>
constexpr bool fits_amx = W == x_tile && R * W == amx_P;

// Splits rows y and y + 16 of an operand, a vector of each, into one row of each of its three tiles of bfloat16.
[[gnu::always_inline]] inline void split(Vec a, Vec b, float *to) {
#pragma GCC unroll 3
    for (int part = 0; part < 3; ++part) {
        const VecInt first_of_a = (VecInt)a & -0x10000, first_of_b = (VecInt)b & -0x10000;
        vec(to + part * tile_size) = (Vec)((first_of_a >> 16 & 0xffff) | first_of_b);
        a -= (Vec)first_of_a, b -= (Vec)first_of_b;
    }
}

// Of the numbers met so far, as integers: the largest absolute value in each lane, and the least but 0, minus 1.
struct Range {
    VecUint largest = {}, least = ~VecUint{};

    // Inf and NaN can't be split. AMX takes subnormal numbers for 0, and its sums overflow where others don't. Numbers
    // from 2^-48 to 2^60 keep all products of their parts away from both.
    bool splits_well() const {
        bool all = true;
        for (int c = 0; c < W; ++c) all = all && largest[c] < (127u + 60) << 23 && least[c] >= ((127u - 48) << 23) - 1;
        return all;
    }
};

// A vector from anywhere, which the range then covers.
[[gnu::always_inline]] inline Vec load_vec(const float *x, Range *range) {
    const Vec v = load_vec(x);
    const VecUint size = (VecUint)v & 0x7fffffff, less = size - 1;  // 0 becomes the largest
    range->largest = size > range->largest ? size : range->largest;
    range->least = less < range->least ? less : range->least;
    return v;
}

// Qi of the strip that begins at `lane`. The last 16 of y may be missing: zeros.
template <int P>
bool split_queries(const Attention &a, int lane, const Buffers &buffers) {
    const int64_t D = D_of(a), D_split = round_up(a.d, y_tile);
    Range range;
    float *to = buffers.Qi_split + lane * D_split * 3 / 2;
    for (int i = 0; i < P; i += W)
        for (int c = 0; c < a.d; c += y_tile, to += split_size)
            for (int y = 0; y < x_tile; ++y) {
                const float *q = buffers.Qi + lane * D + (c + y) * P + i;
                const Vec lower = load_vec(q, &range);
                split(lower, c + x_tile < a.d ? load_vec(q + x_tile * P, &range) : Vec{}, to + y * W);
            }
    return range.splits_well();
}

inline bool split_keys(const Attention &a, const KeyTile &tile, const Buffers &buffers) {
    const int d = a.d, n = tile.keys.end - tile.keys.begin, tiles_of_d = round_up(d, y_tile) / y_tile;
    Range range;
    for (int j = 0; j < n; ++j) {  // the rows behind key n make scores that nothing reads
        const float *k = tile.Kj + j * tile.K_row;
        float *to = buffers.Kj_split + j / x_tile * tiles_of_d * split_size + j % x_tile * W;
        for (int c = 0; c < d; c += y_tile, to += split_size) {
            const Vec lower = load_vec(k + c, &range);
            split(lower, c + x_tile < d ? load_vec(k + c + x_tile, &range) : Vec{}, to);
        }
    }
    float *to = buffers.Vj_split;
    for (int c = 0; c < a.d_v; c += x_tile)
        for (int j = 0; j < n; j += y_tile, to += split_size) {
            Vec x[2][W];
            for (int half = 0; half < 2; ++half) {
                const int j0 = j + half * x_tile;
#pragma GCC unroll 16
                for (int r = 0; r < W; ++r)  // behind key n any finite number will do, for Pij is 0
                    x[half][r] = load_vec(tile.Vj + std::min(j0 + r, n - 1) * tile.V_row + c, &range);
                transpose(x[half]);
            }
            for (int r = 0; r < W; ++r) split(x[0][r], x[1][r], to + r * W);
        }
    return range.splits_well();
}

template <int R>
void split_P(int n, const Buffers &buffers) {
    float *to = buffers.Pij_split;
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < n; j += y_tile, to += split_size)
            for (int y = j; y < j + x_tile; ++y) {
                const float *p = buffers.Sij + (y * R + r) * W;
                split(y < n ? vec(p) : Vec{}, y + x_tile < n ? vec(p + x_tile * R * W) : Vec{}, to + (y - j) * W);
            }
}

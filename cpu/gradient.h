// cpu/gradient.h: Algorithm 4 for one tile of keys. backward.cpp includes it once for each instruction set, in a namespace
// that gives W, max_R and sums as kernel.h has them.
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

// C(x, column) = sum over y < n of A(x, y) B(y, column), plus C's old value if it `adds`, for x < rows. `columns` is a
// multiple of W. A_x, A_y, B_y and C_x are strides. All products are calls of this one function, which is long to compile.
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

// scores(x, column) = sum over channels c of A(x, c) B_T(c, column), with Bc scores a row. Sums of 64 products are added
// up, as in kernel.h: one long sum would round more.
inline void multiply_channels(int rows, int columns, int d, const float *A, const float *B_T, float *scores) {
    constexpr int channels = 64;
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

// Step 7: Kj, its transpose and that of Vj. Rows of keys that don't count are zeros.
template <class T>
void load_keys(const Gradient &g, const KeyTile &t, Keys keys, const GradientBuffers &buffers) {
    const Attention &a = g.a;
    const int64_t D = round_up(a.d, 16);
    const auto load = [&](const void *x, const Strides &stride, float *rows, float *transposed) {
        std::fill(rows, rows + (keys.begin - t.j0) * D, 0.f);
        std::fill(rows + (keys.end - t.j0) * D, rows + Bc * D, 0.f);
        for (int64_t j = keys.begin; j < keys.end; ++j)
            load_row(row_of<const T>(x, stride, t.b, t.h, j), a.d, D, rows + (j - t.j0) * D);
        for (int64_t j = 0; j < Bc; j += W)
            for (int64_t c = 0; c < D; c += W) transpose(rows + j * D + c, D, transposed + c * Bc + j, Bc);
    };
    load(a.v, a.v_stride, buffers.Kj, buffers.Vj_T);  // no product reads Vj by rows: Kj overwrites it
    load(a.k, a.k_stride, buffers.Kj, buffers.Kj_T);
}

// Step 10: Qi, dOi, lse and D. Rows that see no key are zeros, whatever the tensors hold.
template <class T>
void load_queries(const Gradient &g, const Band &band, const QueryTile &t, const float *D_of_rows,
                  const GradientBuffers &buffers) {
    const Attention &a = g.a;
    const int64_t D = round_up(a.d, 16);
    for (int lane = 0; lane < t.rows; ++lane) {
        const int64_t i = t.query(lane), h = t.head(lane), row = (t.b * a.Hq + h) * a.Nq + i;
        const int d = empty(keys_of_row(band, i)) ? 0 : a.d;
        load_row(row_of<const T>(a.q, a.q_stride, t.b, h, i), d, D, buffers.Qi + lane * D);
        load_row(row_of<const T>(g.do_, g.do_stride, t.b, h, i), d, D, buffers.dOi + lane * D);
        buffers.lse[lane] = g.lse[row], buffers.Di[lane] = D_of_rows[row];
    }
}

// Steps 11 to 20 and 22: Pij, dSij, and what they add to dKj and dVj.
void compute_tile(const Attention &a, const Band &band, const QueryTile &t, int j0, int keys,
                  const GradientBuffers &buffers) {
    const int64_t D = round_up(a.d, 16);
    const int vectors = round_up(keys, W);
    float *const P = buffers.Pij, *const dS = buffers.dSij;
    multiply_channels(t.rows, vectors, a.d, buffers.Qi, buffers.Kj_T, P);
    for (int lane = 0; lane < t.rows; ++lane)
        for (int c = 0; c < vectors; c += W) {
            Vec &p = vec(P + lane * Bc + c);
            p = exp(a.softmax_scale * p - buffers.lse[lane]);
        }
    const Keys seen_by_all = keys_of_all(band, t.query(0), t.query(t.rows - 1) + 1);
    if (j0 < seen_by_all.begin || j0 + keys > seen_by_all.end)
        for (int lane = 0; lane < t.rows; ++lane) {
            const Keys seen = keys_of_row(band, t.query(lane));
            const int begin = clamp(seen.begin - j0, 0, keys), end = clamp(seen.end - j0, begin, keys);
            float *const row = P + lane * Bc;
            std::fill(row, row + begin, 0.f), std::fill(row + end, row + keys, 0.f);
        }
    multiply_matrices(keys, D, t.rows, P, 1, Bc, buffers.dOi, D, buffers.dVj, D, true);
    // Where Pij = 0 dSij is 0, even if a hidden number is NaN.
    multiply_channels(t.rows, vectors, a.d, buffers.dOi, buffers.Vj_T, dS);
    for (int lane = 0; lane < t.rows; ++lane)
        for (int c = 0; c < vectors; c += W) {
            const Vec p = vec(P + lane * Bc + c);
            Vec &ds = vec(dS + lane * Bc + c);
            ds = p == 0.f ? Vec{} : a.softmax_scale * p * (ds - buffers.Di[lane]);
        }
    multiply_matrices(keys, D, t.rows, dS, 1, Bc, buffers.Qi, D, buffers.dKj, D, true);
}

// Step 21: dQi = dQi + dSij Kj. Tiles of keys take turns in their order, which fixes the sum's bits. The first of
// key_tiles begins the sum; after the last one dQi is complete.
inline void add_dQ(int rows, int64_t D, Keys key_tiles, int key_tile, int keys, float *dQi, std::atomic<int> &turn,
                   const GradientBuffers &buffers) {
    const bool is_first = key_tile == key_tiles.begin;
    while (turn.load(std::memory_order_acquire) != key_tile - key_tiles.begin) std::this_thread::yield();
    multiply_matrices(rows, D, keys, buffers.dSij, Bc, 1, buffers.Kj, D, dQi, D, !is_first);
    turn.store(key_tile - key_tiles.begin + 1, std::memory_order_release);
}

// All of Algorithm 4 for a tile of keys.
template <class T>
void backward_tile(const Gradient &g, const KeyTile &t, const GradientWorkspace &workspace,
                   const GradientBuffers &buffers) {
    const Attention &a = g.a;
    const int64_t D = round_up(a.d, 16), rows = rows_of_key_head(a), Tr = round_up(rows, gradient_Br) / gradient_Br;
    const int64_t bh = t.b * a.Hkv + t.h;
    const Band band = band_of(a, t.b);
    // 7., 8. Kj, Vj, dKj = 0, dVj = 0
    const Keys keys = {std::max(band.keys.begin, t.j0), std::min(band.keys.end, t.j0 + Bc)};
    if (!empty(keys)) load_keys<T>(g, t, keys, buffers);
    std::fill(buffers.dKj, buffers.dKj + Bc * D, 0.f);
    std::fill(buffers.dVj, buffers.dVj + Bc * D, 0.f);
    for (int64_t i = 0; i < Tr && !empty(keys); ++i) {
        const int64_t first_row = i * gradient_Br;
        const QueryTile queries = {t.b, t.h, a.Hq / a.Hkv, first_row,
                                   (int)std::min<int64_t>(gradient_Br, rows - first_row)};
        const Keys seen = keys_of_any(band, queries.query(0), queries.query(queries.rows - 1) + 1);
        if (empty(seen) || seen.end <= t.j0 || seen.begin >= t.j0 + Bc) continue;
        const Keys key_tiles = {seen.begin / Bc, (int)round_up(seen.end, Bc) / Bc};
        load_queries<T>(g, band, queries, workspace.D, buffers);
        compute_tile(a, band, queries, t.j0, keys.end - t.j0, buffers);
        float *const dQi = a.Nk > Bc ? workspace.dQ + (bh * rows + first_row) * D : buffers.dQi;
        const int key_tile = t.j0 / Bc;
        add_dQ(queries.rows, D, key_tiles, key_tile, keys.end - t.j0, dQi, workspace.turns[bh * Tr + i], buffers);
        if (key_tile + 1 < key_tiles.end) continue;
        for (int lane = 0; lane < queries.rows; ++lane)
            store_row<T>(dQi + lane * D, a.d, g.dq, g.dq_stride, t.b, queries.head(lane), queries.query(lane),
                         g.out_dtype);
    }
    // 24. dKj, dVj
    for (int j = t.j0; j < std::min(t.j0 + Bc, a.Nk); ++j) {
        store_row<T>(buffers.dKj + (j - t.j0) * D, a.d, g.dk, g.dk_stride, t.b, t.h, j, g.out_dtype);
        store_row<T>(buffers.dVj + (j - t.j0) * D, a.d, g.dv, g.dv_stride, t.b, t.h, j, g.out_dtype);
    }
}

// Step 19 for some rows, numbered as in lse: D = rowsum(dO o O), less the gradient of lse. Rows without a key get their
// dQ here, which is 0.
template <class T>
void begin_rows(const Gradient &g, int64_t begin, int64_t end, float *D_of_rows) {
    const Attention &a = g.a;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t i = row % a.Nq, h = row / a.Nq % a.Hq, b = row / a.Nq / a.Hq;
        const T *o = row_of<const T>(g.o, g.o_stride, b, h, i), *dO = row_of<const T>(g.do_, g.do_stride, b, h, i);
        float sum[16] = {};
        int x = 0;
        for (; x + 16 <= a.d; x += 16)
            for (int c = 0; c < 16; ++c) sum[c] += (float)o[x + c] * (float)dO[x + c];
        for (; x < a.d; ++x) sum[x % 16] += (float)o[x] * (float)dO[x];
        for (int half = 8; half > 0; half /= 2)
            for (int c = 0; c < half; ++c) sum[c] += sum[c + half];
        D_of_rows[row] = sum[0] - (g.dlse ? g.dlse[row] : 0.f);
        if (!empty(keys_of_row(band_of(a, b), i))) continue;
        const float zeros[256] = {};
        store_row<T>(zeros, a.d, g.dq, g.dq_stride, b, h, i, g.out_dtype);
    }
}

template <class T>
constexpr BackwardFunctions functions_of_type = {begin_rows<T>, backward_tile<T>};

}  // namespace

constexpr BackwardFunctions functions_of(Dtype dtype) {
    return dtype == Dtype::float32   ? functions_of_type<float>
           : dtype == Dtype::float16 ? functions_of_type<c10::Half>
                                     : functions_of_type<c10::BFloat16>;
}

// cpu/rows.h: a tile's rows of Q, K, V and O between the tensors and a thread's buffers. kernel.h includes it once for
// each instruction set.

// A row travels from memory to the L2 cache while other rows are computed, which need the L1. Inline, since GCC drops
// calls of a function that does nothing but prefetch.
template <class T>
[[gnu::always_inline]] inline void prefetch(const T *row, int d) {
    for (int c = 0; c < d; c += 64 / sizeof(T)) __builtin_prefetch(row + c, 0, 2);
}

// A tile of keys, with K and V as float32.
struct KeyTile {
    Keys keys;
    const float *Kj, *Vj;
    int64_t K_row, V_row;  // strides
    bool is_split;         // for AMX

    bool ends_sum() const { return (keys.begin / Bc + 1) % tiles_per_sum == 0; }
};

// Step 6: rows of Kj or Vj as float32. With in_place these are the tensor's own rows, if one page has them all. Else
// they are copied to the buffer, where zeros fill each row up to a multiple of 16.
template <class T>
const float *load_keys(const KeyRows<T> &x, Keys keys, int d, bool in_place, float *buffer, int64_t *row) {
    if constexpr (std::is_same_v<T, float>)
        if (in_place && x.have_one_page(keys)) return *row = x.row_stride, x[keys.begin];
    *row = round_up(d, 16);
    for (int j = keys.begin; j < keys.end; ++j) {
        float *to = buffer + (j - keys.begin) * *row;
        convert(x[j], to, d);
        std::fill(to + d, to + *row, 0.f);
    }
    return buffer;
}

// Kj and Vj from key j on, and, if it `prefetches`, the next tile of keys begins its way from memory.
template <class T>
KeyTile load_tile(const Attention &a, const QueryTile &t, Keys wanted, int j, bool in_place, bool prefetches,
                  const Buffers &buffers) {
    const KeyRows<T> K(a, a.k, a.k_stride, t.b, t.h), V(a, a.v, a.v_stride, t.b, t.h);
    KeyTile tile{};
    tile.keys = {j, std::min(wanted.end, j / Bc * Bc + Bc)};
    for (int next = tile.keys.end; prefetches && next < std::min(wanted.end, tile.keys.end + Bc); ++next)
        prefetch(K[next], a.d), prefetch(V[next], a.d);
    tile.Kj = load_keys(K, tile.keys, a.d, in_place, buffers.Kj, &tile.K_row);
    tile.Vj = load_keys(V, tile.keys, a.d, in_place, buffers.Vj, &tile.V_row);
    return tile;
}

// Q as float32, a row for each lane. Lanes beyond the tile's rows get zeros.
template <class T>
void load_queries(const Attention &a, const QueryTile &t, int lanes, const Buffers &buffers) {
    const int64_t D = round_up(a.d, 16);
    for (int lane = 0; lane < lanes; ++lane) {
        float *row = buffers.rows + lane * D;
        const int n = lane < t.rows ? a.d : 0;
        if (n > 0) convert(row_of<const T>(a.q, a.q_stride, t.b, t.head(lane), t.query(lane)), row, n);
        std::fill(row + n, row + D, 0.f);
    }
}

// Step 13 for one row o of Oi: divides it by li, joins the earlier state and writes O, l, m, lse.
template <class T>
void end_row(const Attention &a, const QueryTile &t, int lane, bool sees_key, float li, float mi, float *o) {
    const int i = t.query(lane);
    const int64_t h = t.head(lane), bhi = (t.b * a.Hq + h) * a.Nq + i;
    const RowEnd end = end_of_row(sees_key, li, mi, a.o_in ? a.l_in[bhi] : 0.f, a.o_in ? a.m_in[bhi] : -INFINITY);
    for (int c = 0; c < a.d; ++c) o[c] = end.reads_Oi ? end.weight_Oi * o[c] : 0.f;
    if (a.o_in && end.reads_o_in) {
        const float *o_in = row_of<const float>(a.o_in, a.o_in_stride, t.b, h, i);
        for (int c = 0; c < a.d; ++c) o[c] += end.weight_o_in * o_in[c];
    }
    store_l_m_lse(a, t.b, h, i, end.l, end.m);
    if (a.o_dtype == Dtype::float32)
        convert(o, row_of<float>(a.o, a.o_stride, t.b, h, i), a.d);
    else
        convert(o, row_of<T>(a.o, a.o_stride, t.b, h, i), a.d);
}

// The rows of Q and O of the tile that this thread probably takes next, and its first Kj and Vj if its head is another.
template <class T>
[[gnu::noinline]] void prefetch_tile(const Attention &a, const QueryTile &t, bool same_head) {
    asm volatile("");  // else GCC drops the calls, as above
    for (int lane = 0; lane < t.rows; ++lane) {
        prefetch(row_of<T>(a.q, a.q_stride, t.b, t.head(lane), t.query(lane)), a.d);
        if (a.o_dtype == Dtype::float32)
            prefetch(row_of<float>(a.o, a.o_stride, t.b, t.head(lane), t.query(lane)), a.d);
        else
            prefetch(row_of<T>(a.o, a.o_stride, t.b, t.head(lane), t.query(lane)), a.d);
    }
    if (same_head) return;
    const Keys seen = keys_of_any(band_of(a, t.b), t.query(0), t.query(t.rows - 1) + 1);
    const KeyRows<T> K(a, a.k, a.k_stride, t.b, t.h), V(a, a.v, a.v_stride, t.b, t.h);
    for (int j = seen.begin; j < std::min(seen.end, seen.begin + Bc); ++j) prefetch(K[j], a.d), prefetch(V[j], a.d);
}

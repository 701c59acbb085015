// cpu/rows.h: a tile's rows of Q, K, V and O between the tensors and a thread's buffers. kernel.h includes it once for
// each instruction set.

// Unsigned, since the stride of a dimension of size 1 may be any number.
inline Strides in_bytes(const Strides &stride, Dtype dtype) {
    const uint64_t size = element_size(dtype);
    return {int64_t(stride.batch * size), int64_t(stride.head * size), int64_t(stride.row * size)};
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
[[gnu::noinline]] inline const float *load_keys(const KeyRows<char> &x, Dtype dtype, Keys keys, int d, bool in_place,
                                                float *buffer, int64_t *row) {
    if (dtype == Dtype::float32 && in_place && x.have_one_page(keys))
        return *row = x.row_stride / sizeof(float), (const float *)x[keys.begin];
    *row = round_up(d, 16);
    with_type(dtype, [&](auto zero) {
        for (int j = keys.begin; j < keys.end; ++j) {
            float *to = buffer + (j - keys.begin) * *row;
            convert((const decltype(zero) *)x[j], to, d);
            std::fill(to + d, to + *row, 0.f);
        }
    });
    return buffer;
}

// Kj and Vj from key j on, and, if it `prefetches`, the next tile of keys begins its way from memory.
inline KeyTile load_tile(const Attention &a, const QueryTile &t, Keys wanted, int j, bool in_place, bool prefetches,
                         const Buffers &buffers) {
    const KeyRows<char> K(a, a.k, in_bytes(a.k_stride, a.dtype), t.b, t.h);
    const KeyRows<char> V(a, a.v, in_bytes(a.v_stride, a.dtype), t.b, t.h);
    const int bytes = a.d * element_size(a.dtype), bytes_of_v = a.d_v * element_size(a.dtype);
    KeyTile tile{};
    tile.keys = {j, std::min(wanted.end, j / Bc * Bc + Bc)};
    for (int next = tile.keys.end; prefetches && next < std::min(wanted.end, tile.keys.end + Bc); ++next)
        prefetch(K[next], bytes), prefetch(V[next], bytes_of_v);
    tile.Kj = load_keys(K, a.dtype, tile.keys, a.d, in_place, buffers.Kj, &tile.K_row);
    tile.Vj = load_keys(V, a.dtype, tile.keys, a.d_v, in_place, buffers.Vj, &tile.V_row);
    return tile;
}

// Q as float32, a row for each lane. Lanes beyond the tile's rows get zeros.
[[gnu::noinline]] inline void load_queries(const Attention &a, const QueryTile &t, int lanes, const Buffers &buffers) {
    const int64_t D = D_of(a);
    with_type(a.dtype, [&](auto zero) {
        for (int lane = 0; lane < t.rows; ++lane) {
            const auto *q = row_of<decltype(zero)>(a.q, a.q_stride, t.b, t.head(lane), t.query(lane));
            convert(q, buffers.rows + lane * D, a.d);
            std::fill(buffers.rows + lane * D + a.d, buffers.rows + (lane + 1) * D, 0.f);
        }
    });
    std::fill(buffers.rows + t.rows * D, buffers.rows + lanes * D, 0.f);
}

inline bool is_finite(const float *row, int d) {
    unsigned largest = 0;  // as integers, which GCC compares in vectors
    for (int c = 0; c < d; ++c) {
        unsigned bits;
        std::memcpy(&bits, row + c, sizeof(bits));
        largest = std::max(largest, bits & 0x7fffffff);
    }
    return largest < 0x7f800000;  // Inf
}

// Computes one row of Oi again, from mi and the keys that it sees, so that it has no hidden Inf or NaN (isolate.cu). If
// it sees an Inf or NaN itself, Oi stays.
[[gnu::noinline]] inline void isolate_row(const Attention &a, const QueryTile &t, int lane, float mi, float *Oi) {
    const KeyRows<char> K(a, a.k, in_bytes(a.k_stride, a.dtype), t.b, t.h);
    const KeyRows<char> V(a, a.v, in_bytes(a.v_stride, a.dtype), t.b, t.h);
    const Keys keys = keys_of_row(ranges_of(a, t.b), t.query(lane));
    std::vector<float> q(a.d), k(a.d), v(a.d_v), sum(a.d_v);
    with_type(a.dtype, [&](auto zero) {
        using T = decltype(zero);
        convert(row_of<T>(a.q, a.q_stride, t.b, t.head(lane), t.query(lane)), q.data(), a.d);
        bool all_finite = is_finite(q.data(), a.d);
        for (int j = keys.begin; j < keys.end && all_finite; ++j) {
            convert((const T *)K[j], k.data(), a.d), convert((const T *)V[j], v.data(), a.d_v);
            float Sij = 0.f;
            for (int c = 0; c < a.d; ++c) Sij += q[c] * k[c];
            Sij = capped(a, Sij);
            if (has_terms(a)) add_terms(a, t.b, t.head(lane), t.query(lane), j, 1, &Sij);
            float Pij = std::exp(a.softmax_scale * Sij - (mi == -INFINITY ? 0.f : mi));
            if (has_dropout(a)) drop(a, t.b, t.head(lane), t.query(lane), j, 1, &Pij);
            for (int c = 0; c < a.d_v; ++c) sum[c] += Pij * v[c];
            all_finite = is_finite(k.data(), a.d) && is_finite(v.data(), a.d_v);
        }
        if (all_finite) std::copy(sum.begin(), sum.end(), Oi);
    });
}

// Step 13 for one row o of Oi: divides it by li, joins the earlier state and writes O, l, m, lse.
[[gnu::noinline]] inline void end_row(const Attention &a, const QueryTile &t, int lane, bool sees_key, float li,
                                      float mi, float *o) {
    const int i = t.query(lane);
    const int64_t h = t.head(lane), bhi = (t.b * a.Hq + h) * a.Nq + i;
    if (has_ranges(a) && !is_finite(o, a.d_v)) isolate_row(a, t, lane, mi, o);
    const RowEnd end = end_of_row(sees_by_terms(a, sees_key, li), li, mi, a.o_in ? a.l_in[bhi] : 0.f,
                                  a.o_in ? a.m_in[bhi] : -INFINITY);
    for (int c = 0; c < a.d_v; ++c) o[c] = end.reads_Oi ? end.weight_Oi * o[c] : 0.f;
    if (a.o_in && end.reads_o_in) {
        const float *o_in = row_of<const float>(a.o_in, a.o_in_stride, t.b, h, i);
        for (int c = 0; c < a.d_v; ++c) o[c] += end.weight_o_in * o_in[c];
    }
    store_l_m_lse(a, t.b, h, i, end.l, end.m);
    with_type(a.o_dtype, [&](auto zero) { convert(o, row_of<decltype(zero)>(a.o, a.o_stride, t.b, h, i), a.d_v); });
}

// The rows of Q and O of the tile that this thread probably takes next, and its first Kj and Vj if its head is another.
[[gnu::noinline]] inline void prefetch_tile(const Attention &a, const QueryTile &t, bool same_head) {
    asm volatile("");  // else GCC drops the calls, as above
    const int bytes = a.d * element_size(a.dtype), bytes_of_v = a.d_v * element_size(a.dtype);
    const int bytes_of_o = a.d_v * element_size(a.o_dtype);
    const Strides q_stride = in_bytes(a.q_stride, a.dtype), o_stride = in_bytes(a.o_stride, a.o_dtype);
    for (int lane = 0; lane < t.rows; ++lane) {
        prefetch(row_of<char>(a.q, q_stride, t.b, t.head(lane), t.query(lane)), bytes);
        prefetch(row_of<char>(a.o, o_stride, t.b, t.head(lane), t.query(lane)), bytes_of_o);
    }
    if (same_head) return;
    const Keys seen = keys_of_any(any_mask_of(a, t.b), t.query(0), t.query(t.rows - 1) + 1);
    const KeyRows<char> K(a, a.k, in_bytes(a.k_stride, a.dtype), t.b, t.h);
    const KeyRows<char> V(a, a.v, in_bytes(a.v_stride, a.dtype), t.b, t.h);
    for (int j = seen.begin; j < std::min(seen.end, seen.begin + Bc); ++j)
        prefetch(K[j], bytes), prefetch(V[j], bytes_of_v);
}

// cpu/bias_gradient.h: the gradient of a bias is dS, summed over all pairs that share one of its numbers. A thread takes an
// item, a tile of these numbers, walks the tiles of scores that share it, and writes the sums once. gradient.h includes
// it once for each instruction set.

// One of n, which the item has alone, or all n where the bias is broadcast.
inline std::pair<int64_t, int64_t> part_of_item(int64_t &item, int64_t stride, int64_t n) {
    if (stride == 0) return {0, n};
    const int64_t own = item % n;
    item /= n;
    return {own, own + 1};
}

template <class T>
void sum_bias_item(const Gradient &g, int64_t item, const GradientWorkspace &workspace,
                   const GradientBuffers &buffers) {
    const Attention &a = g.a;
    const PairStrides &stride = g.dbias_stride;
    const int64_t group = a.Hq / a.Hkv, Br = queries_of_item(a), heads_of_sum = stride.head ? group : 1;
    const auto [first_tile, end_tile] = part_of_item(item, stride.key, key_tiles(a));
    const auto [first_queries, end_queries] = part_of_item(item, stride.row, query_items(a));
    const auto [first_head, end_head] = part_of_item(item, stride.head, a.Hkv);
    const auto [first_batch, end_batch] = part_of_item(item, stride.batch, a.B);
    // (query, head of the key head, key), in each of which it is one if the bias is broadcast
    std::vector<double> sums((stride.row ? Br : 1) * heads_of_sum * Bc);
    const auto row_of_sum = [&](int64_t query, int64_t head) {
        return sums.data() + ((stride.row ? query % Br : 0) * heads_of_sum + (stride.head ? head % group : 0)) * Bc;
    };
    for (int64_t b = first_batch; b < end_batch; ++b)
        for (int64_t h = first_head; h < end_head; ++h)
            for (int64_t tile = first_tile; tile < end_tile; ++tile) {
                const AnyMask mask = any_mask_of(a, b);
                const GradientTile t = {b, h, (int)tile * Bc};
                const Keys keys = intersection(mask.keys, {t.j0, std::min(t.j0 + Bc, a.Nk)});
                if (empty(keys)) continue;
                load_keys<T>(a.d_v, t, keys, a.v, a.v_stride, buffers.Kj, buffers.Vj_T);
                load_keys<T>(a.d, t, keys, a.k, a.k_stride, buffers.Kj, buffers.Kj_T);
                const int64_t end_row = std::min<int64_t>(end_queries * Br, a.Nq) * group;
                for (int64_t row = first_queries * Br * group, next; row < end_row; row = next) {
                    next = std::min({row + gradient_Br, (row / (Br * group) + 1) * Br * group, end_row});
                    const QueryTile queries = {b, h, group, row, (int)(next - row)};
                    if (!meet(keys_of_any(mask, queries.query(0), queries.query(queries.rows - 1) + 1), keys) ||
                        terms_of_tile(a, queries, 0, queries.rows, t.j0, Bc) == TermsOfTile::hide)
                        continue;
                    const GradientRow *const rows = workspace.rows_of(a, queries);
                    load_queries<T>(a.d, mask, queries, rows, a.q, a.q_stride, buffers.Qi);
                    load_queries<T>(a.d_v, mask, queries, rows, g.do_, g.do_stride, buffers.dOi);
                    const int count = std::min(Bc, a.Nk - t.j0);
                    compute_tile(a, mask, queries, t.j0, count, {0, 0}, rows, buffers, /*of_bias=*/true);
                    for (int lane = 0; lane < queries.rows; ++lane) {
                        double *const sum = row_of_sum(queries.query(lane), queries.head(lane));
                        const float *const dS = buffers.dSij + lane * Bc;
                        for (int c = 0; c < count; ++c) sum[stride.key ? c : 0] += dS[c];
                    }
                }
            }
    const int64_t j0 = stride.key ? first_tile * Bc : 0, keys = stride.key ? std::min<int64_t>(Bc, a.Nk - j0) : 1;
    const int64_t i0 = first_queries * Br, i1 = stride.row ? std::min<int64_t>(i0 + Br, a.Nq) : i0 + 1;
    for (int64_t i = i0; i < i1; ++i)
        for (int64_t h = first_head * heads_of_sum; h < (first_head + 1) * heads_of_sum; ++h)
            for (int64_t c = 0; c < keys; ++c) {
                const int64_t at =
                    first_batch * stride.batch + h * stride.head + i * stride.row + (j0 + c) * stride.key;
                const float sum = (float)row_of_sum(i, h)[c];
                if (g.dbias_dtype == Dtype::float32)
                    ((float *)g.dbias)[at] = sum;
                else
                    ((T *)g.dbias)[at] = sum;
            }
}

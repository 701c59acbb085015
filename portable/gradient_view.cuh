// gradient_view.cuh: the mask as a backward pass needs it, seen from the queries or from the keys.
#pragma once
#include "portable/common.cuh"
#include "portable/gradient_rows.h"
#include "portable/mma.cuh"

namespace minimal_attn {
namespace {

// Which results a block computes: it owns some of their rows, and walks the rows of the other side.
enum class Pass { dK_dV, dQ };

// What rows of the owned side (row) see of the walked side (column), in batch b. A dQ block owns queries, a dK_dV block
// keys. Mask is Band or Ranges; both forms have the same functions.
template <Pass pass, class Mask>
struct View;

// The bounds of a band only grow with the row, so those of a tile follow from its first and last row.
template <Pass pass>
struct View<pass, Band> {
    BandOf<int> band;
    int Nq;
    Interval rows, columns;  // that see anything. Other rows may hold NaN

    __device__ View(const Attention &a, int64_t b) : band(narrow(band_of(a, b))), Nq(a.Nq) {
        Interval queries = {0, 0};
        if (!empty(band.keys)) {
            queries.begin = queries_of_key(band, Nq, band.keys.begin).begin;
            queries.end = queries_of_key(band, Nq, band.keys.end - 1).end;
        }
        rows = pass == Pass::dQ ? queries : band.keys, columns = pass == Pass::dQ ? band.keys : queries;
    }
    __device__ Interval of_row(int row) const {
        return pass == Pass::dQ ? keys_of_row(band, row) : queries_of_key(band, Nq, row);
    }
    // Columns that some of row0 <= row < row1 see.
    __device__ Interval of_any(int row0, int row1) const {
        const int first = max(row0, rows.begin), last = min(row1, rows.end) - 1;
        return first > last ? Interval{0, 0} : Interval{of_row(first).begin, of_row(last).end};
    }
    // Columns that all of them see: these need no mask.
    __device__ Interval of_all(int row0, int row1) const {
        const bool all_see = row0 >= rows.begin && row1 <= rows.end;
        return all_see ? Interval{of_row(row1 - 1).begin, of_row(row0).end} : Interval{0, 0};
    }

    // What rows row0 <= row < row1 see of a tile of columns: whether anything, whether all.
    struct Rows {
        Interval seen_by_any, seen_by_all;
        __device__ bool see(Interval tile) const {
            return tile.begin < seen_by_any.end && tile.end > seen_by_any.begin;
        }
        __device__ bool all_see(Interval tile) const {
            return !(tile.begin < seen_by_all.begin || tile.end > seen_by_all.end);
        }
    };
    __device__ Rows of_rows(int row0, int row1) const { return {of_any(row0, row1), of_all(row0, row1)}; }

    // What a row sees, of columns in a tile that begins at column0.
    struct Row {
        int begin, end;
        __device__ bool sees(int column) const { return !(column < begin || column >= end); }
    };
    __device__ Row in_tile(int row, int column0) const {
        const Interval seen = of_any(row, row + 1);
        return {seen.begin - column0, seen.end - column0};
    }

    // Rows of Qi and dOi that see nothing may hold NaN and are read as zeros: here they lie outside `rows` or
    // `columns`.
    __device__ EachRow is_read(int) const { return {}; }
};

// With ranges, a table has the keys that each query sees. No table has the queries that see a key: this view looks
// for them among all queries.
template <Pass pass>
struct View<pass, Ranges> {
    static constexpr bool owns_queries = pass == Pass::dQ;
    Ranges ranges;
    int Nq;
    Interval rows, columns;  // all queries, and the keys of the batch

    __device__ View(const Attention &a, int64_t b) : ranges(ranges_of(a, b)), Nq(a.Nq) {
        const Interval queries = {0, Nq};
        rows = owns_queries ? queries : ranges.keys, columns = owns_queries ? ranges.keys : queries;
    }
    __device__ Interval of_any(int row0, int row1) const {
        return owns_queries ? keys_of_any(ranges, row0, row1)
                            : queries_of_any(ranges, Nq, intersection({row0, row1}, rows));
    }

    struct Rows {
        const View &view;
        Interval rows;
        __device__ bool see(Interval tile) const {
            const Interval queries = owns_queries ? rows : tile, keys = owns_queries ? tile : rows;
            return meet(keys_of_any(view.ranges, queries.begin, queries.end), keys);
        }
        __device__ bool all_see(Interval tile) const {
            const Interval queries = owns_queries ? rows : tile, keys = owns_queries ? tile : rows;
            const Keys all = keys_of_all(view.ranges, queries.begin, queries.end);
            return keys.begin >= all.begin && keys.end <= all.end;
        }
    };
    __device__ Rows of_rows(int row0, int row1) const { return {*this, {row0, row1}}; }

    struct Row {
        const Ranges &ranges;
        int row, column0;
        __device__ bool sees(int column) const {
            const int query = owns_queries ? row : column0 + column, key = owns_queries ? column0 + column : row;
            const Keys keys = keys_of_row(ranges, query);
            return key >= keys.begin && key < keys.end;
        }
    };
    __device__ Row in_tile(int row, int column0) const { return {ranges, row, column0}; }

    // Whether a row of Qi or dOi is read, or is 0. Mostly no query of the tile is blind, and no load waits for `rows`.
    __device__ auto is_read(int column0) const {
        const bool all_are = !tile_has_blind_query(ranges, column0);
        return [=, *this](int row) { return all_are || !empty(keys_of_row(ranges, column0 + row)); };
    }
};

template <Pass pass>
struct View<pass, General> : View<pass, Ranges> {
    using View<pass, Ranges>::View;
};

// Rows of Qi and dOi that `is_read` says are read. In a general kernel terms (scores.h) may hide all keys of one: then
// its log2_l is +inf. log2_l points to row 0.
template <class Mask, class IsRead>
__device__ auto read_by_terms(const Attention &a, const float *log2_l, const IsRead &is_read) {
    if constexpr (kIsGeneral<Mask>)
        return [=, &a](int row) { return is_read(row) && !(has_terms(a) && __ldcg(log2_l + row) == INFINITY); };
    else
        return is_read;
}

}  // namespace
}  // namespace minimal_attn

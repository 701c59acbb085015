// gradient_view.cuh: the mask as a backward pass needs it, seen from the queries or from the keys.
#pragma once
#include "portable/common.cuh"

namespace minimal_attn {
namespace {

// Which results a block computes: it owns some of their rows, and walks the rows of the other side.
enum class Pass { dK_dV, dQ };

// What rows of the owned side (row) see of the walked side (column), in batch b. A dQ block owns queries, a dK_dV block
// keys. The bounds only grow with the row, so those of a tile follow from its first and last row.
template <Pass pass>
struct View {
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
};

}  // namespace
}  // namespace minimal_attn

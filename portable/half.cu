// half.cu: attention in float16 and bfloat16 on the tensor cores, by WMMA. Sums, li and mi are float32.
// common.cuh has the steps and the barriers. docs/portable.md has the budget and what was tried.
//
//     role        | warps              | registers             | does
//     every warp  | Tile::Threads / 32 | Oi and the operands:  | loads a part of each tile; computes WarpRows rows of
//                 |                    | up to 252             | Sij, Pij and Oi
//
//     shared memory | size              | row padded by | written                   | read
//     Qi            | Br x D in T       | 8             | once                      | step 9, by the warp of its rows
//     Kj            | Bc x D in T       | 8             | while Pij, Oi computed    | step 9, by all
//     Vj            | Bc x D in T       | 8             | while Sij is computed     | step 12, by all
//     Sij           | Br x Bc in float  | 4             | step 9                    | step 10, by the warp that wrote it
//     Pij           | in Sij's place, T |               | step 10                   | step 12, by the warp that wrote it
//     alphas        | Br in float       |               | step 11                   | step 12, by the warp that wrote it
#include <mma.h>

#include "portable/common.cuh"

namespace minimal_attn {
namespace {

// A warp has WarpRows queries of the tile. WMMA does not say which element of a fragment a thread holds. So the softmax
// reads Sij from shared memory, where 32 / WarpRows neighbouring lanes share a row.
template <int D_, int Br_, int Bc_, int WarpRows_, int BlocksPerSM_>
struct HalfTile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, WarpRows = WarpRows_;
    static constexpr int Threads = Br / WarpRows * 32, BlocksPerSM = BlocksPerSM_;
    static constexpr int Stride = D + 8, SStride = Bc + 4;
    static constexpr int PStride = 2 * SStride;  // Pij, in T, begins where the row of Sij, in float32, began
    static constexpr int SharedBytes = (Br + 2 * Bc) * Stride * 2 + Br * (SStride + 1) * 4;
    static constexpr int RowLanes = 32 / WarpRows, LaneKeys = Bc / RowLanes;  // a lane's part of a row of Sij
    static constexpr int SumFloats =
        0;  // no flush_sums as in float32.cu: its registers would spill on sm_75 and sm_100
    static_assert(Bc == 32 || Bc == 64, "D is a multiple of Bc, and Bc / 8 lanes store a row");
};

// Loads a fragment from shared memory. nvcc compiles load_matrix_sync of bfloat16 to 4-byte loads, which makes the
// whole kernel a fifth slower. The same PTX instruction with a .shared address becomes ldmatrix, as float16's does.
template <class Fragment, class T>
__device__ void load_fragment(Fragment &fragment, const T *tile, int stride) {
    namespace wmma = nvcuda::wmma;
    if constexpr (std::is_same_v<T, __half>) {
        wmma::load_matrix_sync(fragment, tile, stride);
    } else {
        using RowMajorA = wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major>;
        using RowMajorB = wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major>;
        unsigned *const x = (unsigned *)fragment.x, shared = (unsigned)__cvta_generic_to_shared(tile);
        if constexpr (std::is_same_v<Fragment, RowMajorA>)
            asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(shared), "r"(stride)
                         : "memory");
        else if constexpr (std::is_same_v<Fragment, RowMajorB>)
            asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(shared), "r"(stride)
                         : "memory");
        else
            asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(shared), "r"(stride)
                         : "memory");
    }
}

using Accumulator = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;

// WMMA hides which row an element of Oi belongs to. So the alphas of 16 rows are loaded as a fragment of Oi's layout.
// With a stride of 0 between columns, each column of this fragment holds the same alphas.
__device__ Accumulator load_diagonal(const float *alphas) {
    Accumulator diag;
    nvcuda::wmma::load_matrix_sync(diag, alphas, 0, nvcuda::wmma::mem_col_major);
    return diag;
}

__device__ RowEnd shuffle(const RowEnd &end, int lane) {
    return {0.f,
            0.f,
            __shfl_sync(~0u, end.weight_Oi, lane),
            __shfl_sync(~0u, end.weight_o_in, lane),
            (bool)__shfl_sync(~0u, end.reads_Oi, lane),
            (bool)__shfl_sync(~0u, end.reads_o_in, lane)};
}

// 9. - 11. softmax_scale and the mask, mi and li of row i of the block, and Pij in Sij's place. Returns alpha. A lane
// has LaneKeys keys of its row, from j_lane on.
template <class Tile, class T>
__device__ float softmax(const Attention &a, const Block<T> &block, int i, int j0, int row, int j_lane, float *Sij,
                         float &li, float &mi) {
    constexpr int SStride = Tile::SStride, LaneKeys = Tile::LaneKeys;
    float s[LaneKeys];
#pragma unroll
    for (int c = 0; c < LaneKeys; c += 4) *(float4 *)&s[c] = *(const float4 *)&Sij[row * SStride + j_lane + c];
    const bool masked = j0 < block.by_all.begin || j0 + Tile::Bc > block.by_all.end;
    const Keys keys = masked ? keys_of_row(block.band, i) : Keys{};
    float m_new = mi;
#pragma unroll
    for (int c = 0; c < LaneKeys; ++c) {
        const int j = j0 + j_lane + c;
        s[c] *= a.softmax_scale;
        if (masked && (j < keys.begin || j >= keys.end)) s[c] = -INFINITY;
        m_new = fmaxf(m_new, s[c]);
    }
    float m_safe;
    const float alpha = update_row_max(mi, row_max<Tile::RowLanes>(m_new), m_safe);
    // li is the sum of this lane's keys. The lanes of the row add theirs up after the last tile.
    float l = 0.f;
#pragma unroll
    for (int c = 0; c < LaneKeys; ++c) {
        s[c] = exp_fast(s[c] - m_safe);
        l += s[c];
    }
    li = alpha * li + l;
    __syncwarp();  // all lanes of a row have read their part of Sij: Pij may take its place
#pragma unroll
    for (int c = 0; c < LaneKeys; c += 8) store<8>((T *)Sij + row * Tile::PStride + j_lane + c, s + c);
    return alpha;
}

// 12. - 13. O = Oi / li, l and m to HBM, of the warp's rows from warp_row on. Oi goes through Sij, Bc columns at a
// time.
template <class Tile, class T, int M, int X>
__device__ void store_rows(const Attention &a, const Block<T> &block, const Accumulator (&Oi)[M][X], float li, float mi,
                           float *Sij, int warp_row, bool aligned) {
    namespace wmma = nvcuda::wmma;
    constexpr int D = Tile::D, Bc = Tile::Bc, N = Bc / 16, WarpRows = Tile::WarpRows, RowLanes = Tile::RowLanes;
    constexpr int SStride = Tile::SStride;
    const int lane = threadIdx.x % 32, i = block.i0 + warp_row + lane / RowLanes;
    li = row_sum<RowLanes>(li);
    RowEnd end{};
    if (i < a.Nq) {
        end = end_row(a, block, i, li, mi);
        if (lane % RowLanes == 0) store_state(a, block, i, end);
    }
#pragma unroll
    for (int x0 = 0; x0 < D; x0 += Bc) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
                wmma::store_matrix_sync(Sij + 16 * m * SStride + 16 * n, Oi[m][x0 / 16 + n], SStride,
                                        wmma::mem_row_major);
        __syncwarp();
        // Now neighbouring lanes take neighbouring columns, 8 each, so that HBM gets whole rows.
        constexpr int LanesARow = Bc / 8, RowsAtOnce = 32 / LanesARow;
#pragma unroll
        for (int r = 0; r < WarpRows; r += RowsAtOnce) {
            const int row = r + lane / LanesARow, x = lane % LanesARow * 8;
            const RowEnd row_end = shuffle(end, row * RowLanes);
            if (warp_row + row < block.rows)
                store_o<8>(a, block, block.i0 + warp_row + row, x0 + x, row_end, Sij + row * SStride + x, aligned);
        }
        __syncwarp();
    }
}

template <class T, class Tile>
__device__ void half_block(const Attention &a, int64_t index, bool aligned) {
    namespace wmma = nvcuda::wmma;
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc, Threads = Tile::Threads, WarpRows = Tile::WarpRows;
    constexpr int Stride = Tile::Stride, SStride = Tile::SStride, PStride = Tile::PStride;
    constexpr int RowLanes = Tile::RowLanes, LaneKeys = Tile::LaneKeys;
    constexpr int M = WarpRows / 16, N = Bc / 16, X = D / 16;  // fragments of 16 x 16
    using RowMajorA = wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major>;
    using RowMajorB = wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major>;
    using TransposedB = wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major>;

    extern __shared__ __align__(16) float shared[];
    const int warp_row = threadIdx.x / 32 * WarpRows, lane = threadIdx.x % 32;
    T *const Q_tile = (T *)shared, *const Kj = Q_tile + Br * Stride, *const Vj = Kj + Bc * Stride;
    float *const S_tile = (float *)(Vj + Bc * Stride);
    // This warp's rows, and this lane's row and part of it.
    const T *const Qi = Q_tile + warp_row * Stride;
    float *const Sij = S_tile + warp_row * SStride, *const alphas = S_tile + Br * SStride + warp_row;
    const T *const Pij = (const T *)Sij;
    const int row = lane / RowLanes, j_lane = lane % RowLanes * LaneKeys;

    const Block<T> block = block_of<T>(a, index, Br);
    const int i = block.i0 + warp_row + row;
    const auto load_K = [&](int j0) {
        load_tile<Bc, D, Stride, Threads>(Kj, block.K + j0 * a.k_stride.row, a.k_stride.row, block.band.keys.end - j0,
                                          a.d, aligned);
    };

    // 8. Qi from HBM; Oi, li, mi begin empty (an earlier state joins at the end, by step 12)
    load_tile<Br, D, Stride, Threads>(Q_tile, block.Q, a.q_stride.row, block.rows, a.d, aligned);
    Accumulator Oi[M][X];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int x = 0; x < X; ++x) wmma::fill_fragment(Oi[m][x], 0.f);
    float li = 0.f, mi = -INFINITY;

    // 5. for j: the tiles of keys that some query of this tile sees, counted from the first such key. No tile holds a
    // key before leftpad_k; keys past the last one seen are loaded, too, and masked.
    if (!empty(block.seen)) load_K(block.seen.begin);
    for (int j0 = block.seen.begin; j0 < block.seen.end; j0 += Bc) {
        // 6. Kj, Vj from HBM
        wait_for_tiles();
        load_tile<Bc, D, Stride, Threads>(Vj, block.V + j0 * a.v_stride.row, a.v_stride.row, block.band.keys.end - j0,
                                          a.d, aligned);

        // 9. Sij = Qi Kj^T
        // Two columns of fragments at a time: with all four, registers run out.
#pragma unroll
        for (int n0 = 0; n0 < N; n0 += 2) {
            Accumulator S[M][2];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < 2; ++n) wmma::fill_fragment(S[m][n], 0.f);
#pragma unroll 2
            for (int x = 0; x < a.d; x += 16) {
                RowMajorA q[M];
#pragma unroll
                for (int m = 0; m < M; ++m) load_fragment(q[m], Qi + 16 * m * Stride + x, Stride);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    TransposedB k;
                    load_fragment(k, Kj + 16 * (n0 + n) * Stride + x, Stride);
#pragma unroll
                    for (int m = 0; m < M; ++m) wmma::mma_sync(S[m][n], q[m], k, S[m][n]);
                }
            }
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    wmma::store_matrix_sync(Sij + 16 * m * SStride + 16 * (n0 + n), S[m][n], SStride,
                                            wmma::mem_row_major);
        }
        wait_for_tiles();
        if (j0 + Bc < block.seen.end) load_K(j0 + Bc);

        // 9. - 11.
        const float alpha = softmax<Tile>(a, block, i, j0, row, j_lane, Sij, li, mi);
        if (lane % RowLanes == 0) alphas[row] = alpha;
        __syncwarp();

        // 12. Oi = diag(alpha) Oi + Pij Vj
        if (__any_sync(~0u, alpha != 1.f)) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
                const Accumulator diag = load_diagonal(alphas + 16 * m);
#pragma unroll
                for (int x = 0; x < X; ++x)
#pragma unroll
                    for (int e = 0; e < diag.num_elements; ++e) Oi[m][x].x[e] *= diag.x[e];
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            RowMajorA p[M];
#pragma unroll
            for (int m = 0; m < M; ++m) load_fragment(p[m], Pij + 16 * m * PStride + 16 * n, PStride);
#pragma unroll
            for (int x = 0; x < X; ++x) {
                RowMajorB v;
                load_fragment(v, Vj + 16 * n * Stride + 16 * x, Stride);
#pragma unroll
                for (int m = 0; m < M; ++m) wmma::mma_sync(Oi[m][x], p[m], v, Oi[m][x]);
            }
        }
        __syncwarp();  // Pij is read: the next Sij may take its place
    }

    store_rows<Tile>(a, block, Oi, li, mi, Sij, warp_row, aligned);
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    half_kernel(const __grid_constant__ Attention a, int64_t first_block, bool aligned, float *) {
    if constexpr (on_tensor_cores<T>()) half_block<T, Tile>(a, first_block + blockIdx.x, aligned);
}

// Tiles in order of preference: D, Br, Bc, rows of a warp, blocks on a multiprocessor. Beside each: shared memory,
// TFLOP/s on an H200 at 16k tokens and N 2048 (commit dd4d463 and earlier), and why it is in the list.
struct HalfKernels {
    static constexpr int kTilesOfSum = 0;
    template <class T, class Tile>
    static auto kernel() {
        return half_kernel<T, Tile>;
    }
    using D64 = TileList<HalfTile<64, 128, 64, 32, 3>,    // 71 KB: 165
                         HalfTile<64, 64, 64, 32, 4>>;    // 44 KB: 141; fits a T4, and few queries
    using D128 = TileList<HalfTile<128, 128, 64, 32, 2>,  // 103 KB: 211
                          HalfTile<128, 64, 32, 32, 2>>;  // 43 KB: 152; fits a T4, and few queries
    using D256 = TileList<HalfTile<256, 128, 64, 16, 1>,  // 167 KB: 181
                          HalfTile<256, 64, 32, 16, 2>,   // 75 KB: 173; fits 99 KB
                          HalfTile<256, 32, 32, 16, 2>>;  // 54 KB; fits a T4
};

}  // namespace

namespace portable {

Plan plan_half(const Attention &a, const Device &device) { return plan_kernel<HalfKernels>(a, device, kHalf); }

const char *launch_half(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    return a.dtype == Dtype::float16 ? launch_kernel<HalfKernels, __half>(a, plan, workspace, stream)
                                     : launch_kernel<HalfKernels, __nv_bfloat16>(a, plan, workspace, stream);
}

// PTX for sm_75 may be what runs on a newer GPU, so the loaded code is asked and not the device.
const char *has_bfloat16_tensor_cores(bool &yes) {
    cudaFuncAttributes attributes;
    const auto kernel = with_tile(0, HalfKernels::D64(),
                                  [](auto tile) { return HalfKernels::kernel<__nv_bfloat16, decltype(tile)>(); });
    const char *error = why_not(cudaFuncGetAttributes(&attributes, kernel));
    if (!error) yes = attributes.ptxVersion >= 80;
    return error;
}

}  // namespace portable
}  // namespace minimal_attn

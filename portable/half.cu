// half.cu: attention in float16 and bfloat16 on the tensor cores, by mma.sync. Sums, li and mi are float32.
// common.cuh has the steps, mma.cuh the instructions. docs/portable.md has the budget and what was tried.
//
//     role        | warps              | registers             | does
//     every warp  | Tile::Threads / 32 | Oi, Sij or Pij, and   | loads a part of each tile; computes WarpRows rows of
//                 |                    | operands: up to 255   | Sij, Pij and Oi
//
//     shared memory | size, in T     | written                     | read
//     Qi            | Br x D         | once                        | step 9, by the warp of its rows
//     Kj, Vj        | 2 x Bc x D     | while tile j-1 is computed  | steps 9 and 12, by all
//     Kj+1, Vj+1    | 2 x Bc x D     | while tile j is computed    | likewise, one tile later
//
//     barrier          | arrives and waits  | then
//     wait_for_tiles   | the block          | Kj and Vj (and the first time Qi) have arrived; all warps have read Kj-1
//                      |                    | and Vj-1, so Kj+1 and Vj+1 may overwrite them
#include "portable/accumulators.cuh"
#include "portable/common.cuh"
#include "portable/mma.cuh"

namespace minimal_attn {
namespace {

// A warp has WarpRows queries of the tile: the more, the more often an operand from shared memory is used.
template <int D_, int Br_, int Bc_, int WarpRows_, int BlocksPerSM_>
struct HalfTile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, WarpRows = WarpRows_;
    static constexpr int Threads = Br / WarpRows * 32, BlocksPerSM = BlocksPerSM_;
    static constexpr int M = WarpRows / 16, N = Bc / 8, X = D / 8;  // a warp's accumulators, 16 x 8 each
    static constexpr int SharedBytes = (Br + 4 * Bc) * D * 2;
    static constexpr int NeededBytes = BlocksPerSM * (SharedBytes + 1024) - 1024;  // that a GPU must let a block have
    static constexpr bool QInRegisters = D == 64;
    static constexpr int SumFloats = 0;  // no flush_sums as in float32.cu
    static_assert(WarpRows % 16 == 0 && Bc % 16 == 0 && D % 64 == 0);
};

// 9. Sij = Qi Kj^T. Columns past d are zeros; 64 of them are skipped.
template <class T, class Tile>
__device__ void multiply_QK(float (&Sij)[Tile::M][Tile::N][4], const unsigned (&q)[Tile::M][4][4], unsigned Qi,
                            unsigned Kj, int d) {
    constexpr int D = Tile::D;
#pragma unroll
    for (int x0 = 0; x0 < D; x0 += 64) {
        if (x0 > D / 2 && x0 >= d) break;  // d > D / 2
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            unsigned a[Tile::M][4];
#pragma unroll
            for (int m = 0; m < Tile::M; ++m) {
                if constexpr (Tile::QInRegisters)
                    for (int e = 0; e < 4; ++e) a[m][e] = q[m][x][e];
                else
                    load_matrices(a[m], (Qi ^ 32 * x) + 2 * (x0 + 16 * m * D));
            }
#pragma unroll
            for (int n = 0; n < Tile::N; n += 2) {
                unsigned k[4];
                load_matrices(k, (Kj ^ 32 * x) + 2 * (x0 + 8 * n * D));
#pragma unroll
                for (int m = 0; m < Tile::M; ++m) {
                    mma<T>(Sij[m][n], a[m], k[0], k[1]);
                    mma<T>(Sij[m][n + 1], a[m], k[2], k[3]);
                }
            }
        }
    }
}

// 11. - 12. li += rowsum(Pij), Oi += Pij Vj, 16 keys at a time, so that exponentials and products overlap. Two
// accumulators of Sij side by side become an operand of the product.
template <class T, class Tile>
__device__ void multiply_PV(Rows<Tile> &rows, float (&Sij)[Tile::M][Tile::N][4], const float (&subtract)[Rows<Tile>::R],
                            float c, unsigned Vj, int d) {
    constexpr int D = Tile::D, R = Rows<Tile>::R;
    float l[R] = {};  // of this tile: one sum over all keys would lose small terms
#pragma unroll
    for (int n = 0; n < Tile::N; n += 2) {
        unsigned p[Tile::M][4];
#pragma unroll
        for (int m = 0; m < Tile::M; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = 2 * m + e % 2;
                const float *s = &Sij[m][n + e / 2][e % 2 * 2];
                const float left = exp2_fast(fmaf(s[0], c, -subtract[r]));
                const float right = exp2_fast(fmaf(s[1], c, -subtract[r]));
                l[r] += left + right;
                p[m][e] = pack<T>(left, right);
            }
#pragma unroll
        for (int x = 0; x < D / 16; ++x) {
            if (16 * x == 192 && d <= 192) break;
            unsigned v[4];
            load_matrices_transposed(v, (Vj ^ x % 4 * 32) + 2 * (x / 4 * 64 + 8 * n * D));
#pragma unroll
            for (int m = 0; m < Tile::M; ++m) {
                mma<T>(rows.Oi[m][2 * x], p[m], v[0], v[1]);
                mma<T>(rows.Oi[m][2 * x + 1], p[m], v[2], v[3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) rows.li[r] += l[r];
}

// 12. - 13. O = Oi / li, l and m to HBM. In the usual case even lanes store the left one of every two neighbouring
// accumulators and odd lanes the right one, 4 columns each, so that HBM gets whole sectors of 32 bytes.
template <class Tile, class T>
__device__ void store_rows(const Attention &a, const Block<T> &block, const Rows<Tile> &rows, int row0, bool aligned) {
    const int lane = threadIdx.x % 32;
    const bool odd = lane % 2;
    pad_lse(a, block.b, block.h, block.i0 + block.rows, threadIdx.x);
#pragma unroll
    for (int r = 0; r < Rows<Tile>::R; ++r) {
        const int i = block.i0 + row0 + 8 * r;
        const float li = row_sum<4>(rows.li[r]);
        const float mi = rows.mi[r] == -INFINITY ? -INFINITY : rows.mi[r] * fabsf(a.softmax_scale);
        RowEnd end{};
        if (i < a.Nq) {
            end = end_row(a, block, i, li, mi);
            if (lane % 4 == 0) store_l_m_lse(a, block.b, block.h, i, end.l, end.m);
        }
        if (aligned && a.o_dtype != Dtype::float32) {
            T *const o = (T *)a.o + block.b * a.o_stride.batch + block.h * a.o_stride.head + i * a.o_stride.row;
#pragma unroll
            for (int x = 0; x < Tile::X; x += 2) {
                unsigned pair[2];  // of the left and the right accumulator
#pragma unroll
                for (int y = 0; y < 2; ++y) {
                    const float *Oi = &rows.Oi[r / 2][x + y][r % 2 * 2];
                    pair[y] = end.reads_Oi ? pack<T>(end.weight_Oi * Oi[0], end.weight_Oi * Oi[1]) : 0;
                }
                const unsigned received = __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 1);
                const uint2 four = {odd ? received : pair[0], odd ? pair[1] : received};
                const int column = 8 * (x + odd) + lane % 4 / 2 * 4;
                if (i < a.Nq && column < a.d) *(uint2 *)(o + column) = four;
            }
        } else if (i < a.Nq) {
#pragma unroll
            for (int x = 0; x < Tile::X; ++x)
                store_o<2>(a, block, i, 8 * x + lane % 4 * 2, end, &rows.Oi[r / 2][x][r % 2 * 2], aligned);
        }
    }
}

template <class T, class Tile>
__device__ void half_block(const Attention &a, int64_t index, bool aligned) {
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc, Threads = Tile::Threads, M = Tile::M;
    extern __shared__ __align__(128) unsigned char shared[];
    T *const Q_tile = (T *)shared, *const K_tiles = Q_tile + Br * D, *const V_tiles = K_tiles + 2 * Bc * D;
    const int warp_row = __shfl_sync(~0u, threadIdx.x / 32, 0) * Tile::WarpRows, lane = threadIdx.x % 32;

    const Block<T> block = block_of<T>(a, index, Br);
    const T *K = block.K + block.seen.begin * a.k_stride.row, *V = block.V + block.seen.begin * a.v_stride.row;
    const auto load_KV = [&](int j0, int stage) {
        const int rows = block.band.keys.end - j0;
        load_swizzled<Bc, D, Threads>(K_tiles + stage * Bc * D, K, a.k_stride.row, rows, a.d, aligned);
        load_swizzled<Bc, D, Threads>(V_tiles + stage * Bc * D, V, a.v_stride.row, rows, a.d, aligned);
        K += Bc * a.k_stride.row, V += Bc * a.v_stride.row;
    };
    // A and transposed B: matrices 1 and 3 lie 8 rows below. B: matrices 2 and 3 do.
    const unsigned Qi = lane_address<D>(Q_tile, warp_row + lane % 16, lane / 16);
    const unsigned K0 = lane_address<D>(K_tiles, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const unsigned V0 = lane_address<D>(V_tiles, lane % 16, lane / 16);
    // Which keys the warp's rows see
    const BandOf<int> band = narrow(block.band);
    const int i_warp = block.i0 + warp_row, i_lane = i_warp + lane / 4;
    const Keys seen = keys_of_any(band, i_warp, i_warp + Tile::WarpRows);
    const Keys by_all = keys_of_all(band, i_warp, i_warp + Tile::WarpRows);
    // Kept away from 0 and inf, since 0 * -inf (a hidden score) and inf * 0 are NaN
    const float c = fminf(fmaxf(fabsf(a.softmax_scale) * kLog2e, 1e-45f), 1.5e38f);

    // 8. Qi from HBM; Oi, li, mi begin empty (an earlier state joins at the end, by step 12)
    load_swizzled<Br, D, Threads>(Q_tile, block.Q, a.q_stride.row, block.rows, a.d, aligned);
    if (!empty(block.seen)) load_KV(block.seen.begin, 0);
    Rows<Tile> rows;
    unsigned q[M][4][4];
    if constexpr (Tile::QInRegisters) {
        wait_for_tiles();
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int x = 0; x < 4; ++x) load_matrices(q[m][x], (Qi ^ 32 * x) + 32 * m * D);
    }

    // 5. for j: the tiles of keys that some query of this tile sees, counted from the first such key. No tile holds a
    // key before leftpad_k; keys past the last one seen are loaded, too, and masked.
    for (int j0 = block.seen.begin, stage = 0; j0 < block.seen.end; j0 += Bc, stage ^= 1) {
        // 6. Kj, Vj from HBM
        wait_for_tiles();
        if (j0 + Bc < block.seen.end) load_KV(j0 + Bc, stage ^ 1);
        if (j0 >= seen.end || j0 + Bc <= seen.begin) continue;
        const unsigned bytes = stage * Bc * D * 2;
        // 9.
        float Sij[M][Tile::N][4] = {};
        multiply_QK<T, Tile>(Sij, q, Qi, K0 + bytes, a.d);
        const bool masked = j0 < by_all.begin || j0 + Bc > by_all.end;
        change_scores<Tile>(Sij, a, band, i_lane, j0 + lane % 4 * 2, masked);
        // 10. - 12.
        float subtract[Rows<Tile>::R], alpha[Rows<Tile>::R];
        update_rows<Tile>(Sij, rows, subtract, alpha, c);
        scale_Oi<Tile>(rows, alpha);
        multiply_PV<T, Tile>(rows, Sij, subtract, c, V0 + bytes, a.d);
    }
    // The block is computed anew: its numbers would take registers from the loop.
    asm volatile("" : "+l"(index));
    store_rows<Tile>(a, block_of<T>(a, index, Br), rows, warp_row + lane / 4, aligned);
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    half_kernel(const __grid_constant__ Attention a, int64_t first_block, bool aligned, float *) {
    if constexpr (on_tensor_cores<T>()) half_block<T, Tile>(a, first_block + blockIdx.x, aligned);
}

// Tiles in order of preference: D, Br, Bc, rows of a warp, blocks on a multiprocessor. Beside each: shared memory, and
// why it is in the list.
struct HalfKernels {
    static constexpr int kTilesOfSum = 0;
    template <class T, class Tile>
    static auto kernel() {
        return half_kernel<T, Tile>;
    }
    using D64 = TileList<HalfTile<64, 128, 64, 32, 2>,    // 48 KB
                         HalfTile<64, 64, 64, 16, 2>>;    // 40 KB; few queries
    using D128 = TileList<HalfTile<128, 128, 64, 32, 2>,  // 96 KB
                          HalfTile<128, 128, 32, 32, 2>,  // 64 KB; two fit an A100
                          HalfTile<128, 64, 32, 16, 2>>;  // 48 KB; fits a T4, two fit 99 KB; few queries
    using D256 = TileList<HalfTile<256, 128, 64, 16, 1>,  // 192 KB
                          HalfTile<256, 128, 32, 16, 1>,  // 128 KB; fits an A100
                          HalfTile<256, 64, 32, 16, 1>,   // 96 KB; fits 99 KB; few queries
                          HalfTile<256, 64, 16, 16, 1>>;  // 64 KB; fits a T4
};

}  // namespace

namespace portable {

Plan plan_half(const Attention &a, const Device &device) { return plan_kernel<HalfKernels>(a, device, kHalf); }

const char *launch_half(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    return a.dtype == Dtype::float16 ? launch_kernel<HalfKernels, __half>(a, plan, workspace, stream)
                                     : launch_kernel<HalfKernels, __nv_bfloat16>(a, plan, workspace, stream);
}

// PTX for sm_75 may be what runs on a newer GPU, so the loaded code is asked and not the device.
const char *is_code_since_ampere(bool &yes) {
    cudaFuncAttributes attributes;
    const auto kernel = with_tile(0, HalfKernels::D64(),
                                  [](auto tile) { return HalfKernels::kernel<__nv_bfloat16, decltype(tile)>(); });
    const char *error = why_not(cudaFuncGetAttributes(&attributes, kernel));
    if (!error) yes = attributes.ptxVersion >= 80;
    return error;
}

}  // namespace portable
}  // namespace minimal_attn
